"""Calls that no plan was made for are analysed by all ranks together; ranks that differ get a sentence before anything pairs up."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run, start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own
from test_mesh import Layer, Stacked, data, difference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx.distributed.gradients import loss_weight, sync_gradients, weighted_loss
from hexa_fx.errors import PlanError, RankError
from hexa_fx.passes.partition.plan_layers import PartitionConfig


class Squashed(Stacked):
    """What its code reads decides what it does with what experts give."""

    squash = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.tanh(y) if self.squash else y


def build(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(kind) for _ in range(2))).to(dtype)


def spread(kind: type[nn.Module], strategy: str, world: int, x: Tensor) -> nn.Sequential:
    model, config = build(kind, x.dtype), PartitionConfig(tile=2, batch=len(x))
    mesh = init_device_mesh("cpu", (world,))
    hexa_fx.optimize_(model, x, mesh=mesh, strategy=strategy, capacities=(1.0, 2.0), partition=config)
    return model


def squash(model: nn.Module, wanted: bool) -> None:
    for layer in model:
        layer.moe.squash = wanted


def together(rank: int, world: int, strategy: str) -> Any:
    """Differences to one device in steps of two kinds in turn, and how many kinds each block was made for."""
    x, whole = data(9), build(Squashed)
    model = spread(Squashed, strategy, world, x)
    session, worst = model.partition, []
    mine = x.split(session.plan.batch)[rank]
    for wanted in (False, True, False, True):
        for net in (model, whole):
            squash(net, wanted)
            net.zero_grad()
        weighted_loss(session, (model(mine) ** 2).mean(), len(mine)).backward()
        sync_gradients(model, session)
        (whole(x) ** 2).mean().backward()
        worst.append(difference(model, whole, session, lambda p: p.grad))
    ran = [(len(f.specialisations), f.ran, dict(f.own)) for f in (vars(layer.moe)["forward"] for layer in model)]
    session.close()
    return worst, ran


@pytest.mark.parametrize("strategy", ["data", "model"])
def test_all_ranks_analyse_a_call_of_another_kind(strategy: str) -> None:
    for worst, ran in run(2, together, strategy):
        assert max(worst) < 1e-12
        assert ran == [(2, 4, {})] * 2  # of both modes, and the other kind


def alone(rank: int, world: int, strategy: str) -> str:
    """What each rank is told where one of them calls its blocks in another way."""
    x = data(6)
    model = spread(Squashed, strategy, world, x)
    mine = x.split(model.partition.plan.batch)[rank]
    model(mine).sum().backward()
    squash(model, rank == 1)
    with pytest.raises((PlanError, RankError)) as error:
        model(mine).sum().backward()
    return str(error.value)


@pytest.mark.parametrize("strategy", ["data", "model"])
def test_a_rank_alone_is_told_and_so_are_the_others(strategy: str) -> None:
    for kind, said in start(2, alone, strategy, timeout=8):
        assert kind == "ok", said
        assert "have come apart" in said or "a collective failed" in said


def refused(rank: int, world: int) -> str:
    """A kind of call whose experts are not the operators' any more."""
    x = data(6)
    model = spread(Squashed, "model", world, x)
    mine = x.split(model.partition.plan.batch)[rank]
    for layer in model:
        layer.moe.expert = lambda e, rows, moe=layer.moe: torch.cummax(rows @ moe.down[e], -1)[0] @ moe.down[e].t()
    said = []
    for _ in range(2):
        with pytest.raises(PlanError) as error:
            model(mine)
        said.append(str(error.value))
    assert said[0] == said[1]
    return said[0]


def test_a_kind_that_cannot_be_spread_is_an_error_on_all_ranks() -> None:
    for said in run(2, refused):
        assert "'0.moe' was called in a way it was not recorded for" in said


def different(rank: int, world: int, strategy: str) -> list[str]:
    x = data(6, torch.float32)
    model = spread(Stacked, strategy, world, x)
    mine, said = x.split(model.partition.plan.batch)[rank], []
    ways = {
        "mode": lambda: (model.train(rank == 0), nullcontext())[1],
        "autocast": lambda: (model.train(), torch.autocast("cpu", torch.bfloat16, enabled=rank == 0))[1],
        "dtype": lambda: (model.bfloat16() if rank else model, nullcontext())[1],
    }
    for way in ways.values():
        with way(), pytest.raises(PlanError, match="call the model in different ways") as error:
            model(mine)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("strategy", ["data", "model"])
def test_modes_dtypes_and_autocast_are_those_of_all_ranks(strategy: str) -> None:
    for mode, autocast, dtype in run(2, different, strategy):
        assert "rank 0 in train mode" in mode
        assert "rank 1 in eval mode" in mode
        assert "rank 0 in train mode, weights in torch.float32, autocast to torch.bfloat16; rank 1" in autocast
        assert "rank 1 in train mode, weights in torch.bfloat16, no autocast" in dtype


class Scaled(Stacked):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def scheduled(rank: int, world: int, strategy: str) -> Any:
    """The same where a number changes in every step."""
    x, whole = data(9), build(Scaled)
    model, worst = spread(Scaled, strategy, world, x), []
    mine = x.split(model.partition.plan.batch)[rank]
    for step in range(5):
        for net in (model, whole):
            for layer in net:
                layer.moe.factor = 1.0 - 0.1 * step
        with torch.no_grad():
            worst.append(float((model(mine) - whole(x).split(model.partition.plan.batch)[rank]).abs().max()))
    ran = [(len(f.specialisations), dict(f.own)) for f in (vars(layer.moe)["forward"] for layer in model)]
    model.partition.close()
    return worst, ran


def test_all_ranks_ask_for_a_number_that_changes() -> None:
    for worst, ran in run(2, scheduled, "model"):
        assert max(worst) < 1e-12
        assert ran == [(2, {})] * 2


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
