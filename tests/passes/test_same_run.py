"""Two recorded runs that show the same are searched once; whatever differs between them keeps them apart."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.capture.started_functions import told_of_starts
from hexa_fx.passes import detect as detection
from hexa_fx.passes.same_run import same_run, seen_before
from tests.detect.mixture import D, Mixture


class Plain(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


def test_runs_of_one_call_are_the_same_and_share_a_graph() -> None:
    block, x = Plain().eval(), torch.randn(12, D)
    first, second = (capture(block, (x,), {}) for _ in range(2))
    assert same_run(first, second)
    shared = seen_before(second, [first])
    assert shared.graph is first.graph
    assert shared.reads is second.reads


class Changeable(Plain):
    """What one run does and another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.how: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 1.5
        self.loss: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(self.how(x))
        self.loss = out.sum() if self.loss is not None else None
        return out


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x * 2.5,
        lambda x: x + 1.5,
        lambda x: (x * 1.5).detach(),
        lambda x: x.mul_(1.5),
        lambda x: x * torch.tensor(1.5),
        lambda x: x * torch.rand(()),
    ],
    ids=["number", "operation", "detached", "written", "constant", "random"],
)
def test_runs_that_differ_are_kept_apart(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block, x = Changeable().eval(), torch.randn(12, D)
    first = capture(block, (x,), {})
    block.how = how
    second = capture(block, (x,), {})
    assert not same_run(first, second)
    assert seen_before(second, [first]) is second


def test_what_a_run_leaves_beside_its_output_counts() -> None:
    block, x = Changeable().eval(), torch.randn(12, D)
    first = capture(block, (x,), {})
    block.loss = 0.0
    assert not same_run(first, capture(block, (x,), {}))


def test_both_modes_are_searched_once_where_they_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    plain = detection.detect
    monkeypatch.setattr("hexa_fx.passes.complete.detect", lambda c, *a: searched.append(c.path) or plain(c, *a))
    opt = hexa_fx.optimize(Plain(), torch.randn(12, D))
    assert len(searched) == 1
    assert opt.report.blocks[0].modes == {"eval": "rewritten", "train": "rewritten"}


class Noisy(Plain):
    """Another function in train mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5 if self.training else x)


def test_modes_that_differ_are_searched_apart_and_both_are_right() -> None:
    block, x = Noisy(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    for training in (True, False):
        torch.testing.assert_close(opt.train(training)(x), block.train(training)(x))


def test_functions_that_nobody_wants_to_hear_of_are_told_once() -> None:
    def wanted() -> None: ...
    def unwanted() -> None: ...

    heard: list[str] = []

    def hear(frame: object) -> bool:
        heard.append(frame.f_code.co_name)  # type: ignore[attr-defined]
        return heard[-1] == "wanted"

    before = sys.gettrace()
    with told_of_starts(hear):
        for _ in range(3):
            wanted()
            unwanted()
    wanted()
    assert (heard.count("wanted"), heard.count("unwanted")) == (3, 1)
    assert sys.gettrace() is before


def test_a_second_context_hears_of_what_the_first_did_not_want() -> None:
    def called() -> None: ...

    for _ in range(2):
        heard: list[str] = []
        with told_of_starts(lambda frame: bool(heard.append(frame.f_code.co_name))):  # noqa: B023
            called()
        assert "called" in heard


def test_nothing_of_an_experts_module_is_taken_from_another_run() -> None:
    """The rewritten forward of each mode is guarded by what its own run read."""
    block, x = Plain(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    forward = opt.forward
    modes = {
        mode: {str(r): r.value for r in guards.reads if r.steps[-1] == "training"}
        for mode, guards in forward.attributes.items()
    }
    assert all(value is mode for mode, read in modes.items() for value in read.values())
    assert isinstance(opt, nn.Module)
