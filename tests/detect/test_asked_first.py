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


def test_a_size_of_an_input_is_asked_before_a_buffer_is_written() -> None:
    block, x = Counted(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.blocks[0].status == "rewritten"
    names = [str(node.target) for node in opt.graphs[""].rewritten.graph.nodes]
    first = next(place for place, name in enumerate(names) if "require" in name)
    assert first < next(place for place, name in enumerate(names) if name == "add_")
    for rows in (12, 1, 2):  # one token: its own code runs, and counts once
        block.count.zero_()
        expected, counted = block(x[:rows].clone()), block.count.clone()
        opt.count.zero_()
        torch.testing.assert_close(opt(x[:rows].clone()), expected)
        torch.testing.assert_close(opt.count, counted)


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


class DrawnFirst(nn.Module):
    """Asks for a number of tokens after it has drawn random numbers, as code with a case for one token does."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.w = nn.Linear(D, E, bias=False), nn.Parameter(torch.randn(E, D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 1.0
        if self.training:
            hidden *= torch.empty_like(hidden).uniform_(0.9, 1.1)
        scores = self.router(hidden).softmax(-1)
        weights, index = (scores * 0.5 if scores.shape[0] == 1 else scores).topk(2)
        out = torch.zeros_like(hidden)
        for e in range(E):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, (hidden[token] @ self.w[e]).relu() @ self.w[e] * weights[token, slot, None])
        return out


def test_a_case_for_one_token_after_random_numbers_draws_them_once() -> None:
    block, x = DrawnFirst().double(), torch.randn(12, D, dtype=torch.float64)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.blocks[0].status == "rewritten"
    for rows in (1, 12):
        results = []
        for module in (block, opt):
            torch.manual_seed(3)
            results.append((module(x[:rows]), torch.rand(1)))
        torch.testing.assert_close(*results)


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
