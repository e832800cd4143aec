"""The watch of lost ranks, over real connections of real processes, and what a rank does when others are lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import scripts, start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own

from hexa_fx.distributed import checkpoint, collectives, rank_connections, rank_failures, watchdog
from hexa_fx.distributed.collective_errors import guarded
from hexa_fx.distributed.gradients import sync_gradients
from hexa_fx.distributed.groups import make_groups
from hexa_fx.errors import RankError

GRACE, SETTLE = 0.4, 1.5


class NeverDone:
    """A collective that waits for a lost rank."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def is_completed(self) -> bool:
        return self.freed.is_set()


def watched():
    """A watched group over Gloo, with short times."""
    rank_failures.waits_on_device = lambda groups: True
    watchdog.GRACE, watchdog.SETTLE, watchdog.LONG_GRACE = GRACE, SETTLE, 2 * GRACE
    groups = make_groups(None, timedelta(seconds=10))
    rank_failures.watch(groups)
    return groups, rank_failures._watchdogs[groups.main_name]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def die(how, looked=None):
    """``looked`` is a file that is there when the others have seen it."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(0)
    if how == "raise":
        try:
            raise ValueError("at the end of a process of multiprocessing")
        except ValueError:
            rank_failures._at_exit()
    if how == "goodbye":
        rank_failures._at_exit()
    if how == "child":
        if os.fork() == 0:  # like a loader's worker, which outlives its rank for a while
            until(looked.exists, 12)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


# --- who is lost -----------------------------------------------------------------------------------------------------


def ending(rank, world, who, how, looked):
    _, ours = watched()
    dist.barrier()
    if rank == who:
        die(how, looked)
    began = time.monotonic()
    until(lambda: ours.detector.lost or ours.detector.left)
    found = list(ours.detector.lost), list(ours.detector.left), time.monotonic() - began
    store = dist.distributed_c10d._get_default_store()
    # who ends is lost, a survivor too: not before the others have looked
    store.set(f"looked/{rank}", "")
    store.wait([f"looked/{other}" for other in {0, 1, 2} - {who}])
    looked.touch()
    return found


@pytest.mark.parametrize(
    ("who", "how"), [(1, "kill"), (0, "exit"), (2, "raise"), (1, "goodbye"), (0, "goodbye"), (1, "child")]
)
def test_everyone_knows_who_ended(who, how, tmp_path):
    outcomes = start(3, ending, who, how, tmp_path / "looked")
    for rank in {0, 1, 2} - {who}:
        kind, value = outcomes[rank]
        assert kind == "ok", value
        gone, left, seconds = value
        assert (gone, left) == (([], [who]) if how == "goodbye" else ([who], []))
        assert seconds < 8  # before the child ends, on a busy machine too


def test_an_uncaught_exception_is_a_loss_and_a_normal_end_is_none(tmp_path):
    with scripts(3, "watched_rank.py", tmp_path / "store") as ranks:
        output = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert "lost [1] left [2]" in output[0], output
    # of the one that raised Gloo's threads may end the process before Python does, with a status of their own
    assert [rank.returncode == 0 for rank in ranks] == [True, False, True], output


# --- the star --------------------------------------------------------------------------------------------------------


def connected(world, seconds=3.0):
    """The connections of all ranks, made by threads; or their errors."""
    meeting, offers, out = threading.Barrier(world), [None] * world, [None] * world

    def run(rank):
        def exchange(value):
            meeting.wait(10)
            offers[rank] = value
            meeting.wait(10)
            return list(offers)

        try:
            out[rank] = rank_connections.connect_ranks(rank, world, exchange, seconds)
        except OSError as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@pytest.mark.parametrize("master", [None, "localhost", socket.gethostname()])
def test_strangers_are_refused(monkeypatch, master):
    monkeypatch.setattr(rank_connections, "_GREETING_SECONDS", 0.3)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    connect, refused = rank_connections._connect, []

    def after_strangers(offer, rank, seconds):
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" + bytes(40), rank_connections._HELLO.pack(bytes(32), rank), b""):
            with socket.create_connection((offer[0][-1], offer[1]), timeout=5) as stranger:
                stranger.sendall(greeting)
                refused.append(_ends_without_welcome(stranger))
        return connect(offer, rank, seconds)

    monkeypatch.setattr(rank_connections, "_connect", after_strangers)
    hub, spoke = connected(2)
    assert refused == [True] * 3
    assert (list(hub), list(spoke)) == ([1], [0])
    for connection in (*hub.values(), *spoke.values()):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connection.close()


def _ends_without_welcome(stranger):
    try:
        return stranger.recv(10) == b""
    except ConnectionResetError:
        return True


def test_a_rank_that_does_not_get_through_is_named_everywhere(monkeypatch):
    connect = rank_connections._connect

    def blocked(offer, rank, seconds):
        if rank == 2:
            raise OSError("no route to host")
        return connect(offer, rank, seconds)

    monkeypatch.setattr(rank_connections, "_connect", blocked)
    for error in connected(3, seconds=0.5):
        assert "rank 2: no route to host" in str(error)
        assert "rank 0: ranks [2] did not connect within 0.5 s" in str(error)


def unwatched(rank, world):
    rank_failures.waits_on_device = lambda groups: True
    warned = []
    rank_failures.logger.warning = lambda text, *args: warned.append(text % args)
    rank_connections._connect = lambda *_: (_ for _ in ()).throw(OSError("no route to host"))
    groups = make_groups(None, timedelta(seconds=1))
    rank_failures.watch(groups)
    rank_failures.watch(groups)
    return warned, list(rank_failures._watchdogs)


def test_without_a_watch_the_job_goes_on_and_says_so_once():
    for kind, value in start(2, unwatched):
        assert kind == "ok", value
        (warning,), watchdogs = value
        assert "lost ranks are not watched (rank 0: ranks [1] did not connect" in warning
        assert watchdogs == []


# --- sessions --------------------------------------------------------------------------------------------------------

TWO = [KINDS["concat"]] * 2


def several_sessions(rank, world):
    plan = make_plan(2, "uneven", MODES["data"][:2], TWO)
    install(Net(TWO), plan).session.close()
    over_gloo = list(rank_failures._watchdogs)
    rank_failures.waits_on_device = lambda groups: True
    first, second = install(Net(TWO), plan).session, install(Net(TWO), plan).session
    (ours,) = set(rank_failures._watchdogs.values())
    first.close()
    first.close()
    alive = set(rank_failures._watchdogs.values()) == {ours}
    dist.barrier()
    untouched = (list(ours.detector.lost), list(ours.detector.left))
    dist.barrier()
    if rank == 1:  # the other one forgets to close
        second.close()
    else:
        until(lambda: ours.detector.left)
    left = list(ours.detector.left)
    model = Net(TWO)
    third = install(model, plan).session
    x, target = (t[own(plan.batch, rank)] for t in batch(sum(plan.batch)))
    loss_sum(model(x), target).backward()
    sync_gradients(model, third)
    fresh = rank_failures._watchdogs[third.groups.main_name]
    done = until(lambda: not fresh._unfinished())
    kept = set(fresh._latest) == {third.groups.gather_name, third.groups.main_name}
    return over_gloo, alive, untouched, left, fresh is not ours, fresh.detector.lost, done and kept


def test_several_sessions_share_a_watch_and_the_last_one_ends_it():
    outcomes = start(2, several_sessions)
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "ok", value
        assert value == ([], True, ([], []), [] if rank else [1], True, [], True)


def starts(rank, world, folder):
    watched()
    plan = make_plan(2, "uneven", MODES["mixed"][:2], TWO)
    model = Net(TWO)
    session = install(model, plan, timeout=timedelta(seconds=10)).session
    x, target = (t[own(plan.batch, rank)] for t in batch(sum(plan.batch)))
    loss = loss_sum(model(x), target)
    if rank == 1:
        os._exit(0)
    (ours,) = set(rank_failures._watchdogs.values())
    assert until(lambda: ours.detector.lost)
    rows = torch.zeros(plan.batch[0], 2)
    calls = {
        "forward": lambda: model(x),
        "backward": loss.backward,
        "join": session.join,
        "counts": lambda: session.exchange_counts(3),
        "sum": lambda: session.sum(rows),
        "gradients": lambda: sync_gradients(model, session),
        "gather": lambda: collectives.all_gather_v(rows, list(plan.batch), session.groups.main_name),
        "scatter": lambda: collectives.start_scatter(rows, [3, 2], session.groups.reduce_name),
        "checkpoint": lambda: checkpoint.save(f"{folder}/kept", model, session),
        "state": lambda: checkpoint.state_dict(model, session),
        "new session": lambda: install(Net(TWO), plan, timeout=timedelta(seconds=10)),
    }
    out = {name: _outcome(call) for name, call in calls.items()}
    session.close()
    return out, os.listdir(folder)


def _outcome(call):
    began = time.monotonic()
    try:
        call()
    except RankError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


def test_after_a_loss_nothing_starts_and_no_checkpoint_is_written(tmp_path):
    kind, value = start(2, starts, str(tmp_path))[0]
    assert kind == "ok", value
    outcomes, written = value
    for name, (text, seconds) in outcomes.items():
        assert "ranks [1] do not answer" in text, (name, text)
        assert seconds < 5, name
    assert written == []


# --- a collective that never ends ------------------------------------------------------------------------------------


def stuck(rank, world, then, file):
    groups, ours = watched()
    work, aborted = NeverDone(), []
    if then == "device":  # waits in a collective of DDP's, say
        torch.cuda.synchronize = lambda device: work.freed.wait(30)
        ours._device = 0
    dist.barrier()
    if rank == 1:
        die("goodbye" if then == "left" else "exit")
    out = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    watchdog._abort = lambda group: (aborted.append(str(group.group_name)), then != "hangs" and work.freed.set())
    if then not in ("idle", "device"):
        rank_failures.track(groups.gather_name, work)
    if then == "idle":
        time.sleep(2 * (GRACE + SETTLE))
        return "lives", list(ours.detector.lost), aborted
    work.freed.wait(30)  # as a host waits for its device
    if then == "next":
        with (
            pytest.raises(RankError, match=r"forward on rank 0: ranks \[1\] do not answer"),
            guarded("forward", groups),
        ):
            pass
        time.sleep(2 * SETTLE)
        return "raised", list(ours.detector.lost), sorted(aborted) == sorted(rank_failures._named(groups))
    if then == "ends":
        rank_failures._at_exit()
    time.sleep(30)
    return "went on", list(ours.detector.lost), aborted


@pytest.mark.parametrize("then", ["hangs", "silent", "ends", "left", "device"])
def test_who_waits_for_a_lost_rank_ends_with_its_name(then, tmp_path):
    file, began = tmp_path / "err", time.monotonic()
    kind, value = start(2, stuck, then, str(file))[0]
    assert kind == "gone", value
    assert time.monotonic() - began < 20
    text = file.read_text()
    assert "RankError: rank 0: ranks [1] do not answer" in text
    assert "in stuck" in text  # where the main thread stands


def test_an_aborted_wait_leads_to_an_error():
    kind, value = start(2, stuck, "next", os.devnull)[0]
    assert (kind, value) == ("ok", ("raised", [1], True))


def test_a_rank_with_nothing_under_way_lives_on():
    kind, value = start(2, stuck, "idle", os.devnull)[0]
    assert (kind, value) == ("ok", ("lives", [1], []))


def crash(rank, world):
    rank_failures.waits_on_device = lambda groups: True
    plan = make_plan(4, "uneven", MODES["mixed"][:2], TWO)
    model = Net(TWO)
    session = install(model, plan, timeout=timedelta(seconds=25)).session
    x, target = (t[own(plan.batch, rank)] for t in batch(sum(plan.batch)))
    loss = loss_sum(model(x), target)
    if rank == 1:
        os._exit(17)
    began = time.monotonic()
    text, _ = _outcome(lambda: (loss.backward(), session.join()))
    return text, time.monotonic() - began


def test_a_failed_collective_names_lost_ranks_without_waiting_for_marks():
    outcomes = start(4, crash)
    for rank in (0, 2, 3):
        kind, (text, seconds) = outcomes[rank]
        assert kind == "ok"
        assert re.search(r"ranks \[[^\]]*\b1\b", text), text  # and who ended because of it
        assert seconds < 15


def again(rank, world, store):
    _, first = watched()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    _, second = watched()
    dist.barrier()
    return (
        second is not first,
        set(rank_failures._watchdogs.values()) == {second},
        second.detector.lost,
        second.detector.left,
    )


def test_process_groups_that_are_made_again_are_watched_anew(tmp_path):
    for kind, value in start(2, again, str(tmp_path / "store")):
        assert (kind, value) == ("ok", (True, True, [], []))


def garbage(rank, world):
    groups, _ = watched()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    work = NeverDone()
    watchdog._abort = lambda group: work.freed.set()
    rank_failures.track(groups.main_name, work)
    out = []
    for wrong in (lambda: None, lambda: [][7]):  # the values are garbage, so any error may follow
        try:
            with guarded("a step", groups):
                work.freed.wait(10)
                wrong()
        except RankError as error:
            out.append(str(error))
    return out


def test_what_was_computed_from_aborted_collectives_is_an_error():
    kind, value = start(2, garbage)[0]
    assert kind == "ok", value
    assert len(value) == 2
    assert all("ranks [1] do not answer" in text for text in value)
