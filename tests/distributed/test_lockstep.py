"""Ranks that do not make the same forwards and backwards: a sentence on all of them, before anything else pairs up."""

import pytest
import torch
import torch.distributed as dist
from harness import start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own

from hexa_fx.distributed.gradients import loss_weight, sync_gradients
from hexa_fx.errors import PlanError, RankError

TWO = [KINDS["concat"]] * 2


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


def broken_off(rank: int, world: int, mode: str, static: bool) -> str:
    """What both ranks are told when rank 0 catches an error in a forward and goes on with the next, before anything was stepped."""
    model = Net(TWO)
    session = install(model, make_plan(world, "even", MODES[mode][:2], TWO, static=static)).session
    session.follow(model)
    x, target = batch(sum(session.plan.batch))
    x, target = x[own(session.plan.batch, rank)], target[own(session.plan.batch, rank)]

    def fail(*_: object) -> None:
        raise ValueError("by the user")

    handle = model.layers[1].register_forward_pre_hook(fail) if rank == 0 else None
    try:
        model(x)
    except ValueError:
        assert handle is not None
        handle.remove()
    except RankError as error:
        return str(error)
    with pytest.raises(RankError) as found:
        loss_sum(model(x), target).backward()
    return str(found.value)


@pytest.mark.parametrize(("mode", "static"), [("data", False), ("model", False), ("model", True)])
def test_a_step_that_one_rank_breaks_off(mode: str, static: bool) -> None:
    for kind, said in start(2, broken_off, mode, static, timeout=8):
        assert kind == "ok", said
        assert "have come apart" in said or "a collective failed in" in said


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
    for kind, said in start(2, apart, mode, what):
        assert kind == "ok", said
        assert f"ranks [0] at {place}, ranks [1] at the beginning of a forward" in said
        assert "synced_gpus=True" in said
