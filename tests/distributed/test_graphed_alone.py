"""`hexa_fx.graphed` on one device: a no-op on a CPU, and replays of a stand-in for CUDA graphs, which tests/gpu has."""

import copy
import logging
from typing import Any

import pytest
import torch
from test_graphed import OnHost
from test_mesh import CONFIG, build, data, loss_of
from torch import Tensor, nn

import hexa_fx
from hexa_fx.errors import InputError
from hexa_fx.steps.context import OneDevice
from hexa_fx.steps.graphed import GraphedStep


class Case:
    """A rewritten model whose steps go through a graph, and a copy whose steps do not."""

    def __init__(self, inside: bool) -> None:
        self.model = build("stacked")
        hexa_fx.optimize_(self.model, data(6), CONFIG)
        assert len(self.model.report.rewritten) == 2
        self.same, self.inside, self.made = copy.deepcopy(self.model), inside, 0
        self.optimizers = [
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False) for net in (self.model, self.same)
        ]

    def step(self, net: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
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
    assert [record.getMessage() for record in caplog.records] == [
        f"steps run without a CUDA graph: it cannot be recorded: {recorder.fails}"
    ]


def test_what_graphed_is_given() -> None:
    with pytest.raises(InputError, match=r"expected the nn\.Module that the step trains"):
        hexa_fx.graphed(lambda: None, nn.Identity())
    with pytest.raises(InputError, match="1 or more, got 0"):
        hexa_fx.graphed(lambda: None, nn.Linear(2, 2), warmup=0)
