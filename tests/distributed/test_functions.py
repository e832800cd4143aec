"""Functions of several processes are seen through or never tried; scripts of examples/ for several processes."""

import io
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from harness import run, start
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hexa_fx
from tests.test_examples import FOLDER, OF_SEVERAL, SAYS
from tests.zoo.common import MLP, Looped, looped
from tests.zoo.compare import operators_run

GROUP: Any = None


class Parallel(Looped):
    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = Summed.apply(self.experts[e](rows))
        return given


class Summed(torch.autograd.Function):
    """The tensor itself; its gradient is added up over the group that is set, as libraries find theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size(GROUP) > 1:
            dist.all_reduce(gradient, group=GROUP)
        return gradient


def inside_experts(rank: int, world: int, alone: bool) -> str:
    """One rank at a time is optimized; with a collective, the other would have to come to it."""
    global GROUP
    groups = [dist.new_group([each]) for each in range(world)]
    GROUP = groups[rank] if alone else dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(Parallel(lambda: MLP(8, 12), 8)).double()
    if rank == 0 or alone:
        hexa_fx.optimize_(model, torch.randn(9, 8).double(), hexa_fx.HexaConfig(own_code_when_small=False))
    dist.barrier()
    return model.report.blocks[0].status if rank == 0 or alone else "rewritten" if alone else "refused"


def test_a_group_of_one_adds_nothing() -> None:
    assert run(2, inside_experts, True) == ["rewritten", "rewritten"]


def test_nobody_waits_for_a_function_that_is_tried() -> None:
    assert run(2, inside_experts, False) == ["refused", "refused"]


@pytest.fixture
def two_processes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Together(torch.autograd.Function):
    """The sum over all processes. It stays a call, in which they meet."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def added_up(load: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(load)
    return load


def of_all(load: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros_like(load) for _ in range(2)]
    torch.distributed.all_gather(parts, load)
    return torch.stack(parts).sum(0)


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": added_up,
    "gathered": of_all,
    "by torch's functions": torch.distributed.nn.functional.all_reduce,
    "by a function": lambda load: Together.apply(load),
}


class Balancing(nn.Module):
    """Chooses with a bias that follows what all processes chose, as routers without a balance loss do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.gate, self.way = nn.Linear(8, 4), way
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = (self.gate(x) + self.bias).softmax(-1).topk(2)
        with torch.no_grad():
            load = WAYS[self.way](torch.bincount(ids.flatten(), minlength=4).to(x.dtype))
            self.bias.add_(torch.sign(load.mean() - load), alpha=0.01)
        return weights, ids


class Balanced(Looped):
    """``apart``: the router is a module of its own, which stays a call; else its code is the block's."""

    def __init__(self, way: str, apart: bool) -> None:
        super().__init__(lambda: MLP(8, 12), 8)
        self.balancing, self.apart = Balancing(way), apart

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.balancing(x) if self.apart else Balancing.forward(self.balancing, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(x)
        return looped(x, weights, ids, self.experts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("apart", [False, True])
def test_what_processes_exchange_is_not_left_out(way: str, apart: bool, two_processes: None) -> None:
    """One process alone shows no difference."""
    (report,) = hexa_fx.explain(Balanced(way, apart), torch.randn(20, 8)).blocks
    stays = apart or way == "by a function"
    assert (report.status == "rewritten") == stays, report.reason
    assert ("the code exchanges tensors with other processes (" in report.reason) != stays
    assert stays or report.location is not None


class TogetherLater(Together):
    """The same, of which nobody knows how long it took."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x + 0 * time.time()
        dist.all_reduce(total)
        return total


def test_what_else_a_function_does_that_exchanges_is_not_left_out(
    two_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WAYS, "with a clock", lambda load: TogetherLater.apply(load))
    (report,) = hexa_fx.explain(Balanced("with a clock", apart=False), torch.randn(20, 8)).blocks
    assert report.status == "refused"
    assert "clock" in report.reason, report.reason


def test_processes_that_come_later() -> None:
    block, x = Balanced("in place", apart=False), torch.randn(20, 8)
    optimized = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert operators_run(optimized, (x,))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert not operators_run(optimized, (x,))
    dist.destroy_process_group()


def example(rank: int, world: int, name: str) -> str:
    """What the script prints. The ranks have met already."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": "test",
    }
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}  # accelerate asks whether they are there
    os.environ |= {key: str(value) for key, value in given.items()}
    sys.path.insert(0, str(FOLDER))
    dist.init_process_group = lambda *_: None  # in this process, which ends with the script
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_two_processes(name: str) -> None:
    if name == "trainer_on_a_mesh":
        pytest.importorskip("accelerate")
    outcomes = start(2, example, name)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    assert SAYS[name] in "".join(said for _, said in outcomes)
