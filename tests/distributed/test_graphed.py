"""`PartitionSession.graphed`: replays do what steps do. A stand-in records on the host; several devices have CUDA graphs."""

import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from models import largest
from test_mesh import CONFIG, WIDTH, build, difference, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import hexa_fx
from hexa_fx.distributed import lockstep
from hexa_fx.distributed import session as sessions
from hexa_fx.distributed.gradients import sync_gradients
from hexa_fx.errors import PlanError
from hexa_fx.passes.partition.plan_layers import PartitionConfig
from hexa_fx.steps.graphed import GraphedStep

KINDS = {"0": "data", "1": "model"}


class OnHost:
    """Records what was called. As with a CUDA graph, recording changes no tensor and replays fill the same memory each time."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model, self.optimizer, self.fails = model, optimizer, ""
        self.failed: list[Any] = []
        self.forgotten = False

    def settled(self) -> bool:
        return True

    def beside(self) -> Any:
        return nullcontext()

    def record(self, run: Callable[[], Any]) -> Any:
        held = [*self.model.parameters(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
        if self.optimizer is not None:
            held += [t for t in pytree.tree_leaves(self.optimizer.state_dict()["state"]) if isinstance(t, Tensor)]
        before, fresh = [t.detach().clone() for t in held], [p for p in self.model.parameters() if p.grad is None]
        result = run()
        grads = [p.grad for p in self.model.parameters()]
        with torch.no_grad():
            for tensor, value in zip(held, before):
                tensor.copy_(value)
        if self.fails:
            self.failed = grads
            raise RuntimeError(self.fails)
        return Replayed(self.model, run, result, grads, fresh), result

    def forget(self) -> None:
        assert not any(p.grad is failed for p, failed in zip(self.model.parameters(), self.failed)), "it is still held"
        self.forgotten = True


class Replayed:
    def __init__(self, model: nn.Module, run: Callable[[], Any], result: Any, grads: Any, fresh: Any) -> None:
        self.model, self.run, self.result, self.grads, self.fresh = model, run, result, grads, fresh

    def replay(self) -> None:
        for parameter in self.fresh:  # had no gradient when the recording began
            parameter.grad = None
        fresh = pytree.tree_leaves(self.run())
        fresh += [p.grad for p in self.model.parameters()]
        for memory, value in zip([*pytree.tree_leaves(self.result), *self.grads], fresh):
            if memory is not None and memory is not value:
                memory.detach().copy_(value)

    def reset(self) -> None:
        self.run = None


class Case:
    """A partitioned model and one device's, each with a step."""

    def __init__(self, rank: int, world: int, inside: bool = False) -> None:
        mesh = init_device_mesh("cpu", (world,))
        self.rank, self.model, self.whole = rank, build("stacked"), build("stacked")
        config = PartitionConfig(tile=2, batch=8, prefetch=True)
        x = torch.randn(8, WIDTH, dtype=torch.float64)
        hexa_fx.optimize_(self.model, x, CONFIG, mesh=mesh, strategy=KINDS, capacities=None, partition=config)
        self.session = self.model.partition
        self.ours = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.theirs = torch.optim.SGD(self.whole.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.inside, self.zero, self.noise = inside, True, lambda: 1.0
        self.recorder = OnHost(self.model, self.ours)
        self.graphed = GraphedStep(self.session, self.step, 2, self.recorder)

    def step(self, x: Tensor) -> Tensor:
        if self.zero:
            self.model.zero_grad()
        loss = loss_of(self.model, x) * self.noise()
        (loss / 2).backward()
        if self.zero:
            sync_gradients(self.model, self.session)
        if self.inside:
            self.ours.step()
        return loss

    def compare(self, sizes: tuple[int, int] = (4, 4), number: int = 0) -> float:
        """One step on as many rows on each rank, and what one device makes of them."""
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(sum(sizes), WIDTH, generator=generator, dtype=torch.float64)
        parts = x.split(sizes)
        got = self.graphed(parts[self.rank])
        if self.zero:
            self.whole.zero_grad()
        want = [loss_of(self.whole, part) for part in parts]
        (sum(want) / 2).backward()
        worst = float((got - want[self.rank]).detach().abs())
        return worst if not self.zero else max(worst, self.update())

    def update(self) -> float:
        """Compares gradients and steps the optimizers."""
        worst = difference(self.model, self.whole, self.session, lambda p: p.grad)
        self.theirs.step()
        if not self.inside:
            self.ours.step()
        return worst


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("hexa_fx.steps.graphed").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def replayed(rank: int, world: int) -> Any:
    """Steps in one shape, some in others, on all ranks and on one; sums over several steps; a step with its optimizer."""
    log, case = Log(), Case(rank, world)
    worst = [case.compare(number=i) for i in range(6)]  # the first without gradients, two to warm up
    assert case.graphed.replays == 3
    worst += [case.compare((6, 6), 6), case.compare((4, 2), 7), case.compare(number=8)]
    assert case.graphed.replays == 4
    held = [case.graphed(torch.ones(4, WIDTH, dtype=torch.float64)) for _ in range(2)]
    assert held[0].data_ptr() != held[1].data_ptr()
    case.whole.zero_grad()
    case.model.eval()  # another kind of step
    worst.append(case.compare(number=9))
    case.session.close()
    said = log.said[:]

    case = Case(rank, world)
    case.zero = False
    for i in range(10):  # two steps add up, as two kinds of call
        if i % 2 == 0:
            case.model.zero_grad()
            case.whole.zero_grad()
        worst.append(case.compare(number=i))
        if i % 2:
            sync_gradients(case.model, case.session)
            worst.append(case.update())
    assert case.graphed.replays == 6
    case.session.close()

    case = Case(rank, world, inside=True)
    versions = [p._version for p in case.model.parameters()]
    worst += [case.compare(number=i) for i in range(5)]
    assert all(p._version > before for p, before in zip(case.model.parameters(), versions))
    before, log.said[:] = case.graphed.replays, []
    for optimizer in (case.ours, case.theirs):
        optimizer.param_groups[0]["lr"] = 0.05
    worst += [case.compare(number=6), case.compare(number=7)]
    assert (before, case.graphed.replays) == (2, 2)
    case.session.close()
    return worst, said, log.said


def test_replays_are_steps() -> None:
    for rank, (worst, said, later) in enumerate(run(2, replayed)):
        assert max(worst) < 1e-12, [place for place, value in enumerate(worst) if value > 1e-12]
        assert "argument 0 was ((4, 8), torch.float64" in said[0]
        assert "is ((6, 8), torch.float64" in said[0]
        assert ("is ((2, 8)" in said[1]) if rank else ("the ranks' calls are of different kinds" in said[1])
        assert "which modules train changed" in said[-1]
        assert later == [
            "a step runs without its CUDA graph: lr of SGD was 0.1 and is 0.05: give it as a tensor on the device, or call the "
            "optimizer outside of the step"
        ]


def given_up(rank: int, world: int) -> Any:
    """Recordings that fail, on all ranks and on one. The call that was to be recorded does its step all the same."""
    found, worst = [], []
    for wrong in ("one rank", "host random", "reads back"):
        case = Case(rank, world)
        torch.manual_seed(5)
        if wrong == "host random":
            case.noise = lambda: float(torch.rand(()) * 0 + 1)
        if wrong == "reads back" or (wrong == "one rank" and rank == 1):
            case.recorder.fails = "operation not permitted when stream is capturing\nmore"
        worst += [case.compare(number=i) for i in range(4)]
        drawn = torch.get_rng_state()
        torch.manual_seed(5)
        for _ in range(4 if wrong == "host random" else 0):
            torch.rand(())
        assert torch.equal(drawn, torch.get_rng_state())
        assert case.graphed.replays == 0
        found.append(case.graphed.reason)
        case.session.close()
    case = Case(rank, world)
    plain = case.session.graphed(case.step)
    plain(torch.ones(4, WIDTH, dtype=torch.float64))
    case.session.close()
    dist.barrier()
    return worst, [*found, plain.reason]


def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    for rank, (worst, reasons) in enumerate(run(2, given_up)):
        assert largest([(torch.tensor(worst), torch.zeros(len(worst)))]) < 1e-12
        alone = "it cannot be recorded: operation not permitted when stream is capturing"
        assert reasons == [
            alone if rank else "ranks [1] could not record it",
            "the step draws random numbers on the host, which a replay would repeat: draw them on the device",
            alone,
            "the model is on a cpu, which has no graphs",
        ]


class AsOnDevice(OnHost):
    """While it records, hosts tell each other nothing, as where a CUDA graph is captured."""

    def record(self, run: Callable[[], Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for module in (lockstep, sessions):
                patch.setattr(module, "is_capturing", lambda: True)
            return super().record(run)


def noted(rank: int, world: int) -> Any:
    """Model-centric layers whose ranks have different numbers of tokens, which are not in the plan."""
    case = Case(rank, world)
    case.recorder = AsOnDevice(case.model, case.ours)
    case.graphed = GraphedStep(case.session, case.step, 2, case.recorder)
    worst = [case.compare((6, 2), number=i) for i in range(6)]
    assert case.graphed.replays == 3, case.graphed.reason
    worst += [case.compare((3, 5), number=i) for i in range(5)]
    assert case.graphed.replays == 6, case.graphed.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "is_capturing", lambda: True)
        counts = lockstep.NotedCounts()
        with counts.following([[6, 2]]), pytest.raises(PlanError, match="record the step with"):
            counts.exchange(case.session.groups, 7)
    case.session.close()
    return worst


def test_numbers_of_tokens_are_those_of_the_step_before() -> None:
    assert max(map(max, run(2, noted))) < 1e-12


SCRIPT = Path(__file__).with_name("captured_step.py")


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("split", ["even", "uneven"])
@pytest.mark.parametrize("mode", ["data", "model", "mixed"])
def test_replays_see_fresh_tokens_and_weights(mode: str, split: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(SCRIPT), mode, split]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished") == 2
