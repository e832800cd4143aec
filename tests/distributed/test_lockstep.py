"""Ranks that do not make the same forwards and backwards: a sentence on all of them, before anything else pairs up."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from harness import start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan

from hexa_fx.distributed import whereabouts
from hexa_fx.distributed.gradients import clip_grad_norm_, loss_weight, sync_gradients
from hexa_fx.errors import PlanError, RankError

TWO = [KINDS["concat"]] * 2
PLACES = {"forward": "the beginning of a forward", "backward": "a backward", "norm": "the norm of the gradients"}


def apart(rank: int, world: int, mode: str, what: str) -> str:
    """What both ranks are told when rank 1 makes a forward more than rank 0."""
    model = Net(TWO)
    session = install(model, make_plan(world, "even", MODES[mode][:2], TWO, slots=2)).session
    session.follow(model)
    x, target = batch(3)
    loss_sum(model(x), target).backward()
    loss = loss_sum(model(x), target)
    others = {
        "backward": loss.backward,
        "count": lambda: loss_weight(session, 3),
        "sync": lambda: sync_gradients(model, session),
    }
    with pytest.raises(RankError, match="have come apart") as error, torch.set_grad_enabled(rank == 0):
        others[what]() if rank == 0 else model(x)
    return str(error.value)


def in_a_barrier(rank: int, world: int, mode: str, place: str) -> str:
    """What rank 0 is told when rank 1 is late, which is no error, and then waits in a barrier of the user's own."""
    whereabouts._PATIENCE = whereabouts._POLL = whereabouts._STILL = whereabouts._LOOK = 0.2
    model = Net(TWO)
    session = install(model, make_plan(world, "even", MODES[mode][:2], TWO, slots=2)).session
    session.follow(model)
    x, target = batch(3)
    time.sleep(2.0 * rank)
    loss = loss_sum(model(x), target)
    others = {
        "forward": lambda: model(x),
        "backward": loss.backward,
        "norm": lambda: clip_grad_norm_(model, session, 1.0),
    }
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(RankError, match="have come apart") as error:
        others[place]()
    return str(error.value)


def waits_for_another(rank: int, world: int) -> str:
    """Rank 1 sends something to rank 2, which is in no partition, and waits long for it. Rank 0 waits for rank 1."""
    whereabouts._PATIENCE = whereabouts._POLL = whereabouts._STILL = whereabouts._LOOK = 0.2
    partition, pair = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 2:
        dist.recv(torch.zeros(1), 1)
        time.sleep(4.0)
        dist.barrier(group=pair)
        return ""
    model = Net(TWO)
    session = install(model, make_plan(2, "even", MODES["model"][:2], TWO), mesh=partition).session
    session.follow(model)
    x, _ = batch(3)
    model(x)
    if rank == 1:
        dist.send(torch.zeros(1), 2)
        dist.barrier(group=pair)
    model(x)
    return "went on"


def test_a_rank_that_waits_for_another_outside_of_the_partition() -> None:
    assert start(3, waits_for_another) == [("ok", "went on"), ("ok", "went on"), ("ok", "")]


@pytest.mark.parametrize(("mode", "place"), [("data", "forward"), ("model", "backward"), ("data", "norm")])
def test_a_rank_in_a_barrier_of_its_own(mode: str, place: str) -> None:
    (kind, said), (_, other) = start(2, in_a_barrier, mode, place)
    assert (kind, other) == ("ok", ""), said
    assert "rank 1 waits at test_lockstep.py:" in said
    assert "(barrier) for a collective that rank 0 has not begun" in said
    assert f"rank 0 waits for it at {PLACES[place]}" in said


def made_again(rank: int, world: int, mode: str) -> None:
    """A model of process groups that are gone, of whose names there are others by now."""
    model = Net(TWO)
    session = install(model, make_plan(world, "even", MODES[mode][:2], TWO, static=True)).session
    session.follow(model)
    x, _ = batch(3)
    model(x)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    whereabouts._STILL = whereabouts._LOOK = 0.1
    time.sleep(1.5)
    assert whereabouts._answering()._thread.is_alive()  # for the groups that are made again
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    dist.new_group()
    with pytest.raises(PlanError, match="process groups of this partition were destroyed"):
        model(x)
    session.close()


@pytest.mark.parametrize("mode", ["data", "model"])
def test_process_groups_that_are_gone(mode: str) -> None:
    assert start(2, made_again, mode) == [("ok", None)] * 2


@pytest.mark.parametrize("mode", ["data", "model"])
@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("backward", "a backward"),
        ("count", "the count of a step's samples or tokens"),
        ("sync", "the sum of a step's gradients"),
    ],
)
def test_a_forward_more_on_one_rank(mode: str, what: str, place: str) -> None:
    forward = "the beginning of a forward" if mode == "data" else "the forward of a layer"
    for kind, said in start(2, apart, mode, what):
        assert kind == "ok", said
        assert f"ranks [0] at {place}, ranks [1] at {forward}" in said
        assert "synced_gpus=True" in said
