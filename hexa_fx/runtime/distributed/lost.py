"""What a rank does when others are lost while collectives run on a device.

Over Gloo a collective with a dead rank fails. On NCCL it waits, and so does a host that waits for the device. So where
collectives run on NCCL, a `Watch` says who is lost, and then

* nothing new is launched: every start of a collective raises `RankError` (`check`);
* if a collective that was launched before is still unfinished after `GRACE` seconds, the groups' communicators are aborted,
  which lets a waiting host go on, to the next `check`. What an aborted collective wrote is garbage. The same if the device
  has not finished what it had to do when the rank was lost after the group's timeout, at most `LONG_GRACE` seconds: others
  (DDP, FSDP2) launch collectives too;
* if no `RankError` is raised within `SETTLE` seconds after that, the process ends, with the sentence and the stacks.

A rank that says goodbye is not lost: others may have nothing more to do with it. Only if they still wait for one of its
collectives after as long, it counts as lost too.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hexa_fx.errors import RankError
from hexa_fx.runtime.distributed.watch import Watch, connect_star

if TYPE_CHECKING:
    from hexa_fx.runtime.distributed.groups import Groups

logger = logging.getLogger(__name__)

GRACE = 3.0
SETTLE = 5.0
LONG_GRACE = 30.0
_POLL = 0.25
_SETUP_SECONDS = 10.0

# Whether any rank of any group is lost: what the way of every collective asks first.
alarm = False

# By the names of their groups. Beside the sessions, not in them, so that models with sessions are copied as before.
_keepers: dict[str, Keeper] = {}


class Keeper:
    """The care for one set of ranks, for as long as sessions use them.

    Args:
        groups: whose collectives these are.
        peers: connections of the watch.
    """

    def __init__(self, groups: Groups, peers: dict[int, Any]) -> None:
        self.main, self.rank, self.seconds = groups.main, groups.rank, groups.timeout.total_seconds()
        self.sessions = 0
        self.told = False
        self.aborted = False
        self._pgs: list[Any] = []
        self._latest: dict[str, Any] = {}
        self._done: dict[str, Any] = {}
        self._idle: threading.Event | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._noticed = self._waiting_since = self._aborted_at = 0.0
        self._waiting: list[Any] = []
        self.watch = Watch(groups.rank, peers, self.tick)
        self.watch.start()

    def add(self, groups: Groups) -> None:
        """One more session on these groups."""
        self.sessions += 1
        for name, group in _named(groups).items():
            _keepers[name] = self
            if group not in self._pgs:
                self._pgs.append(group)

    def keep(self, name: str, work: Any) -> None:
        """A collective was launched. Those of one communicator end in order, so the last one stands for all."""
        self._latest[name] = work

    @property
    def sentence(self) -> str:
        """Who is lost."""
        return f"ranks {sorted(self.watch.lost)} do not answer: their processes ended in the middle of the job"

    # --- on the watch's thread -------------------------------------------------------------------------------------

    def tick(self) -> float | None:
        """After a loss or a goodbye: sees to it that nobody waits for ever. Returns when to be called again."""
        now = time.monotonic()
        if self.watch.lost and not self._noticed:
            self._notice(now)
        if not self._noticed and not self.watch.left:
            return None
        if self.aborted:
            if now >= self._aborted_at + SETTLE and (not self.told or self._unfinished()):
                self._end_process()
            return _POLL
        unfinished = self._unfinished()
        if not unfinished or not _same(unfinished, self._waiting):
            self._waiting, self._waiting_since = unfinished, now
        if unfinished and now >= self._waiting_since + self._patience(unfinished):
            if self._noticed:
                self._abort(now)
            else:
                self.watch.lost.extend(self.watch.left)
        return _POLL

    def _patience(self, unfinished: list[Any]) -> float:
        """A device may be busy with work of this rank alone; a collective with a lost rank never ends."""
        is_ours = any(work is not self._idle for work in unfinished)
        return GRACE if self._noticed and is_ours else min(self.seconds, LONG_GRACE)

    def _notice(self, now: float) -> None:
        global alarm
        alarm = True
        self._noticed = now
        self._waiting = []
        if self._device is not None:
            self._idle = threading.Event()
            threading.Thread(target=self._await_device, daemon=True).start()
        logger.error("rank %d: %s", self.rank, self.sentence)

    def _await_device(self) -> None:
        assert self._idle is not None
        torch.cuda.synchronize(self._device)
        self._idle.set()

    def _unfinished(self) -> list[Any]:
        """Launched and not done. Asked only after a loss or a goodbye, and nobody once done: asking disturbs captures of
        CUDA graphs, and a rank may go on alone."""
        found: list[Any] = []
        for name, work in list(self._latest.items()):
            if self._done.get(name) is work:
                continue
            if _is_done(work):
                self._done[name] = work
            else:
                found.append(work)
        if self._idle is not None and not self._idle.is_set():  # perhaps with collectives that only torch knows
            found.append(self._idle)
        return found

    def _abort(self, now: float) -> None:
        self.aborted, self._aborted_at = True, now
        logger.error("rank %d: a collective waits for ranks %s, so it is aborted", self.rank, sorted(self.watch.lost))
        for group in self._pgs:  # all at once: one communicator's abort may wait for another's kernel
            threading.Thread(target=_abort, args=(group,), daemon=True).start()

    def _end_process(self) -> None:
        text = f"hexa_fx.errors.RankError: rank {self.rank}: {self.sentence}. Collectives were aborted, so the process ends\n"
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        self.watch.leave(0.2)
        os._exit(1)

    # --- on any thread ---------------------------------------------------------------------------------------------

    def error(self, where: str) -> RankError:
        """The error to raise; from now on somebody knows."""
        self.told = True
        return RankError(f"no collective can run in {where} on rank {self.rank}: {self.sentence}")

    def lost_within(self, seconds: float) -> list[int]:
        """Who is lost; waits for the watch to say so."""
        end = time.monotonic() + seconds
        while not self.watch.lost and time.monotonic() < end:
            time.sleep(0.02)
        return sorted(self.watch.lost)

    def close(self, failed: bool = False) -> None:
        """Ends the watch; a rank that failed by itself says no goodbye."""
        for name in [name for name, keeper in _keepers.items() if keeper is self]:
            del _keepers[name]
        if failed and not self.watch.lost:
            self.watch.stop()
        else:
            self.watch.leave()
        self._latest.clear()
        self._done.clear()

    def close_at_exit(self, failed: bool) -> None:
        """Ends the watch with the process, whose last steps must not wait for the device either."""
        if self.watch.lost:
            end = time.monotonic() + SETTLE
            if self._unfinished() and not self.aborted:
                self._abort(time.monotonic())
            while self._unfinished() and time.monotonic() < end:
                time.sleep(_POLL)
            if (self.aborted and not self.told) or self._unfinished():
                self._end_process()
        self.close(failed)


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right))


def _is_done(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # part of a CUDA graph, which cannot be asked
        return True


def _abort(group: Any) -> None:
    try:
        backend = group._get_backend(torch.device("cuda"))
        getattr(backend, "abort", group.abort)()
    except RuntimeError as error:
        logger.warning("a communicator could not be aborted: %s", error)


def _named(groups: Groups) -> dict[str, Any]:
    return {groups.main_name: groups.main, groups.gather_name: groups.gather, groups.reduce_name: groups.reduce}


def waits_on_device(groups: Groups) -> bool:
    """Whether collectives of these groups run on a device and wait for a lost rank instead of failing."""
    try:
        backend = groups.main._get_backend(torch.device("cuda"))
    except RuntimeError:
        return False
    return "nccl" in str(backend.name()).lower()


# --- what sessions and collectives call ------------------------------------------------------------------------------


def begin(groups: Groups) -> None:
    """Watches these ranks from now on, where that is needed. All ranks call it at the same point."""
    if groups.world == 1 or not waits_on_device(groups):
        return

    def exchange(value: Any) -> list[Any]:
        out = [None] * groups.world
        dist.all_gather_object(out, value, group=groups.host)
        return out

    known = _keepers.get(groups.main_name)
    if not all(exchange(known is not None and known.main is groups.main)):
        if known is not None:
            known.close()
        try:
            seconds = min(_SETUP_SECONDS, groups.timeout.total_seconds() / 2)
            peers = connect_star(groups.rank, groups.world, exchange, seconds)
        except OSError as error:
            _warn_once(str(error))
            return
        known = Keeper(groups, peers)
    assert known is not None
    _watch_exits()
    known.add(groups)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "lost ranks are not watched (%s): a rank that dies ends the others only after the process group's timeout",
        reason,
    )


def end(groups: Groups) -> None:
    """A session of these groups closes. The last one says goodbye, unless an exception is under way."""
    keeper = _keepers.get(groups.main_name)
    if keeper is None or keeper.main is not groups.main:
        return
    keeper.sessions -= 1
    if keeper.sessions <= 0 and not keeper.watch.lost and not _is_failing():
        keeper.close()


def keep(name: str, work: Any) -> Any:
    """Gives back a collective that was launched on the group of this name."""
    keeper = _keepers.get(name)
    if keeper is not None:
        keeper.keep(name, work)
    return work


def _find(groups: Groups | str) -> Keeper | None:
    return _keepers.get(groups if isinstance(groups, str) else groups.gather_name)


def check(where: str, groups: Groups | str) -> None:
    """Raises `RankError` if ranks of these groups are lost. Ask `alarm` first: it is cheaper."""
    keeper = _find(groups)
    if keeper is not None and keeper.watch.lost:
        raise keeper.error(where)


def is_aborted(groups: Groups | str) -> bool:
    """Whether collectives of these groups were aborted, so that what they wrote is garbage."""
    keeper = _find(groups)
    return keeper is not None and keeper.aborted


def find_lost(groups: Groups, seconds: float) -> list[int]:
    """Which ranks the watch knows to be lost, after a collective failed; empty where nobody watches."""
    keeper = _find(groups)
    if keeper is None:
        return []
    found = keeper.lost_within(seconds)
    keeper.told |= bool(found)
    return found


# --- ends of the process ---------------------------------------------------------------------------------------------


@functools.cache
def _watch_exits() -> None:
    atexit.register(_at_exit)
    # children of multiprocessing skip atexit
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
    os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    failed = _is_failing() or getattr(sys, "last_value", None) is not None
    for keeper in set(_keepers.values()):
        keeper.close_at_exit(failed)


def _is_failing() -> bool:
    """Whether an exception is on its way out of here, other than an exit that reports success."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _in_child() -> None:
    """A forked child must not keep its parent's connections open, nor say goodbye for it."""
    global alarm
    for keeper in set(_keepers.values()):
        keeper.watch.forget()
    _keepers.clear()
    _watch_exits.cache_clear()
    alarm = False
