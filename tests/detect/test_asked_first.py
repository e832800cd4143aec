"""Conditions on parameters and sizes alone: seen with the values that parameters have, checked before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, Mixture

CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


class Flagged(Mixture):
    """``flag`` is a new parameter of one, and is decided on."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * 1.5 if self.flag.item() == 1 else x)[2]


def test_a_decision_on_a_constant_parameter_is_seen_as_it_goes() -> None:
    block, x = Flagged(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x, CONFIG)
    assert opt.report.blocks[0].status == "rewritten"
    for value in (1.0, 0.0, 1.0):
        block.flag.fill_(value)
        torch.testing.assert_close(opt(x), block(x))


class Counted(Mixture):
    """A size is asked after a buffer was written, of an input that was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x.mul_(2)
        return self.mix(x * 1.5 if x.shape[0] > 1 else x)[2]


def test_a_size_that_is_asked_after_a_buffer_is_written_comes_too_late() -> None:
    block, x = Counted(), torch.randn(12, D)
    (report,) = hexa_fx.optimize(block, x, CONFIG).report.blocks
    assert report.status == "refused"
    assert "a decision that comes first can be rewritten" in report.reason


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gradients_with_a_decision_on_a_learned_scale(value: float) -> None:
    class Scaled(Flagged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.mix(x)[2]
            return out * self.flag if self.flag.item() != 0 else out

    block, x = Scaled().double(), torch.randn(12, D, dtype=torch.float64)
    block.flag.requires_grad_().data.fill_(value)
    opt = hexa_fx.optimize(block, x, CONFIG)
    assert opt.report.blocks[0].status == "rewritten"
    wanted = [p for p in block.parameters() if value or p is not block.flag]
    one, two = (torch.autograd.grad(m(x).square().sum(), wanted) for m in (block, opt))
    torch.testing.assert_close(one, two)
