"""`hexa_fx.graphed` on one device: a no-op on a CPU, and replays of a stand-in for CUDA graphs, which tests/gpu has."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from test_graphed import OnHost
from test_mesh import CONFIG, build, data, loss_of
from torch import Tensor, nn

import hexa_fx
from hexa_fx.errors import InputError
from hexa_fx.steps.context import OneDevice
from hexa_fx.steps.graphed import GraphedStep
from hexa_fx.steps.recorder import CudaRecorder


class Case:
    """A rewritten model whose steps go through a graph, and a copy whose steps do not."""

    def __init__(self, inside: bool) -> None:
        self.model = build("stacked")
        hexa_fx.optimize_(self.model, data(6), CONFIG)
        assert len(self.model.report.rewritten) == 2
        self.same, self.inside, self.made = copy.deepcopy(self.model), inside, 0
        self.scale: Callable[[], float] = lambda: 1.0
        self.optimizers = [
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False) for net in (self.model, self.same)
        ]

    def step(self, net: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x) * self.scale()
        loss.backward()
        if self.inside:
            optimizer.step()
        return loss

    def graphed(self, x: Tensor) -> Tensor:
        return self.step(self.model, self.optimizers[0], x)

    def compare(self, run: Any, rows: int = 6) -> None:
        """One step each way: loss, gradients and parameters have the same bits."""
        self.made += 1
        x = data(rows) * (1 + 0.1 * self.made)
        assert torch.equal(run(x), self.step(self.same, self.optimizers[1], x))
        if not self.inside:
            for optimizer in self.optimizers:
                optimizer.step()
        for ours, theirs in zip(self.model.parameters(), self.same.parameters()):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("inside", [False, True])
def test_on_a_cpu_steps_run_as_they_are(inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(inside)
    with caplog.at_level(logging.WARNING, "hexa_fx.steps.graphed"):
        run = hexa_fx.graphed(case.graphed, case.model)
        for _ in range(5):
            case.compare(run)
    assert (run.replays, run.reason) == (0, "the model is on a cpu, which has no graphs")
    assert [record.getMessage() for record in caplog.records] == [f"steps run without a CUDA graph: {run.reason}"]


@pytest.mark.parametrize("inside", [False, True])
def test_replays_are_steps(inside: bool) -> None:
    case = Case(inside)
    run = GraphedStep(OneDevice(case.model), case.graphed, 2, OnHost(case.model, case.optimizers[0]))
    for rows in (6, 6, 6, 6, 4, 6):  # the first without gradients, so of another kind
        case.compare(run, rows)
    assert run.replays == 2, run.reason


def test_a_recording_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(inside=True)
    recorder = OnHost(case.model, case.optimizers[0])
    recorder.fails = "operation not permitted when stream is capturing"
    with caplog.at_level(logging.WARNING, "hexa_fx.steps.graphed"):
        run = GraphedStep(OneDevice(case.model), case.graphed, 2, recorder)
        for _ in range(6):
            case.compare(run)
    assert run.replays == 0
    assert recorder.forgotten
    assert [record.getMessage() for record in caplog.records] == [
        f"steps run without a CUDA graph: it cannot be recorded: {recorder.fails}"
    ]


class Counting(torch.optim.SGD):
    """Counts its steps on the host, as optimizers in 8 bits do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


@pytest.mark.parametrize("what", ["steps", "numpy"])
def test_what_changes_on_the_host_is_not_recorded(what: str) -> None:
    case = Case(inside=True)
    numpy.random.seed(0)
    if what == "steps":
        case.optimizers = [Counting(net.parameters(), lr=0.1) for net in (case.model, case.same)]
    else:
        case.scale = lambda: 1 + 0 * numpy.random.rand()
    run = GraphedStep(OneDevice(case.model), case.graphed, 2, OnHost(case.model, case.optimizers[0]))
    for _ in range(4):
        case.compare(run)
    assert run.replays == 0
    if what == "steps":
        assert "Counting changes 'step' of its state on the host" in run.reason
        assert {state["step"] for optimizer in case.optimizers for state in optimizer.state.values()} == {4}
    else:
        assert "draws random numbers on the host" in run.reason
        drawn = numpy.random.rand()
        numpy.random.seed(0)
        assert numpy.random.rand(9)[-1] == drawn


class Broken:
    """In place of `torch.cuda.graph`: its end raises another error than the one that broke it, and leaves its stream current."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None:
        torch.cuda.set_stream("side")

    def __exit__(self, *_: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


class Numbers:
    """Stands in for a device's random numbers, which count as recorded after a recording that failed."""

    state = "recorded"

    def clone_state(self) -> str:
        return "before the recording"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


def test_a_recording_that_broke_off_says_why_and_leaves_no_stream_current(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ["the user's"]

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        before = streams[-1]
        streams.append(stream)
        try:
            yield
        finally:
            streams.append(before)

    numbers = Numbers()
    monkeypatch.setattr(torch.cuda, "default_generators", (numbers,))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    for name, stands_in in {
        "Stream": lambda _: "side",
        "stream": on,
        "set_stream": streams.append,
        "current_device": lambda: 0,
        "current_stream": lambda: streams[-1],
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)

    made: list[weakref.ref[torch.Tensor]] = []

    def reads() -> None:
        kept = torch.ones(1)
        made.append(weakref.ref(kept))
        raise RuntimeError("operation not permitted when stream is capturing")

    said = ""
    gc.disable()  # which would find a circle of errors and frames, and free in the end what the step made
    try:
        CudaRecorder(torch.device("cuda")).record(reads)
    except RuntimeError as error:
        said = str(error)
    finally:
        gone = [tensor() is None for tensor in made]
        gc.enable()
    assert "not permitted when stream is capturing" in said
    assert gone == [True], "the memory that a recording took stays until garbage is collected"
    assert streams[-1] == "the user's"
    assert numbers.state == "before the recording", "random numbers do not go on"


def test_what_graphed_is_given() -> None:
    with pytest.raises(InputError, match=r"expected the nn\.Module that the step trains"):
        hexa_fx.graphed(lambda: None, nn.Identity())
    with pytest.raises(InputError, match="1 or more, got 0"):
        hexa_fx.graphed(lambda: None, nn.Linear(2, 2), warmup=0)
