"""Conditions on parameters and sizes alone: seen with the values that parameters have, checked before anything is written."""

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, Mixture
from tests.zoo.compare import operators_run


class Flagged(Mixture):
    """``flag`` is a new parameter of one, and is decided on."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * 1.5 if self.flag.item() == 1 else x)[2]


def test_a_decision_on_a_constant_parameter_is_seen_as_it_goes() -> None:
    block, x = Flagged(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.blocks[0].status == "rewritten"
    for value in (1.0, 0.0, 1.0):
        block.flag.fill_(value)
        torch.testing.assert_close(opt(x), block(x))


class Counted(Mixture):
    """A size is asked after a buffer was written, of an input that was written to; ``late``: one that the input does not have."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("count", torch.zeros(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x.mul_(2)
        rows = x.view(-1, 1, D) if self.late else x
        return self.mix(x * 1.5 if rows.shape[0] > 1 else x)[2]


def test_another_size_of_what_was_written_to_is_asked_where_it_is() -> None:
    block, x = Counted(late=True), torch.randn(12, D)
    (report,) = hexa_fx.optimize(block, x).report.blocks
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
    opt = hexa_fx.optimize(block, x)
    assert opt.report.blocks[0].status == "rewritten"
    wanted = [p for p in block.parameters() if value or p is not block.flag]
    one, two = (torch.autograd.grad(m(x).square().sum(), wanted) for m in (block, opt))
    torch.testing.assert_close(one, two)


class AsksForGradients(Mixture):
    """Has a loss for its router only if that is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        return out + out.square().mean() if self.router.weight.requires_grad else out


@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_that_wants_no_gradient_is_seen_as_it_is(frozen: bool) -> None:
    block, x = AsksForGradients(), torch.randn(12, D)
    block.router.requires_grad_(not frozen)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.rewritten, opt.report
    for wanted in (not frozen, frozen):
        for model in (block, opt):
            model.router.requires_grad_(wanted)
        torch.testing.assert_close(opt(x), block(x))
        assert operators_run(opt, (x,)), opt.report
