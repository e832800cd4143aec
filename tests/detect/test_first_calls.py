"""What a block sets to plain values, what its first call sets up for all others, and what it says of its numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, Mixture
from tests.zoo.compare import compare, operators_run


class Mode(Mixture):
    """A loss in train mode, and no loss as a number else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        self.aux_loss: Any = probs.pow(2).sum() if self.training else 0
        self.facts = {"trains": self.training, "scale": 0.5}
        return out


class StartsAtZero(Mode):
    def __init__(self) -> None:
        super().__init__()
        self.aux_loss = 0


class Saturates(Mixture):
    """Counts its first two calls."""

    steps = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = min(self.steps + 1, 5)
        return self.mix(x)[2] * self.steps


class FromFirstTokens(Mixture):
    """What it keeps is of the first tokens that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.mix(x - self.mean)[2]


class Grows(Mixture):
    """Keeps a table of as many rows as it needed so far."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table") or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype)[:, None].cos()
        return self.mix(x * self.table[: len(x)])[2]


class Average(Mixture):
    """Keeps an average as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(D, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.mean.dtype) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.mix(x.double())[2]


class TwoNames(Average):
    """Keeps the same tensor by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.other = [self.mean]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x + self.mean)[2]


class Keeps(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        self.told = f"{probs.max().item():.1f}"
        return out


def _x(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def _optimized(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = kind().double()
    return block, hexa_fx.optimize(block, _x(9))


@pytest.mark.parametrize("kind", [Mode, StartsAtZero])
def test_plain_values_are_set_in_every_call(kind: type[Mode]) -> None:
    block, opt = _optimized(kind)
    assert hasattr(opt, "aux_loss") is (kind is StartsAtZero)
    for train in (False, True, False):
        assert operators_run(opt.train(train), (_x(7),))
        for each in (block, opt):
            each.train(train)(_x(7))
        torch.testing.assert_close(opt.aux_loss, block.aux_loss)
        assert opt.facts == block.facts == {"trains": train, "scale": 0.5}


def test_a_number_that_first_calls_bring_to_its_end() -> None:
    block, opt = _optimized(Saturates)
    for tokens in (5, 7, 9, 7):
        torch.testing.assert_close(opt(_x(tokens)), block(_x(tokens)))
        assert opt.steps == block.steps
    assert operators_run(opt, (_x(7),))
    opt.steps = block.steps = 1
    torch.testing.assert_close(opt(_x(5)), block(_x(5)))
    assert opt.steps == block.steps == 2


@pytest.mark.parametrize("kind", [FromFirstTokens, Grows, Average])
def test_tensors_that_modules_hold_as_attributes_are_read_in_every_call(kind: type[nn.Module]) -> None:
    block, opt = _optimized(kind)
    name = "table" if kind is Grows else "mean"
    assert getattr(opt, name, None) is None or kind is Average
    for tokens in (5, 9, 7):
        torch.testing.assert_close(opt(_x(tokens)), block(_x(tokens)))
    for changed in (lambda held: held + 1, torch.Tensor.float):
        for each in (block, opt):
            setattr(each, name, changed(getattr(each, name)))
        assert operators_run(copy.deepcopy(opt), (_x(7),)) or getattr(opt, name).dtype == torch.float32
        found = compare(block, opt, (_x(7),), train=True)
        in_32_bits = (
            getattr(opt, name).dtype == torch.float32
        )  # gradients of tokens come together before a cast or behind it
        assert found.within(1e-6 if in_32_bits else 1e-10), found
        torch.testing.assert_close(getattr(opt, name), getattr(block, name))
    for tokens in (12, 7):
        torch.testing.assert_close(opt(_x(tokens)), block(_x(tokens)))


def test_a_tensor_that_lies_elsewhere_too_is_refused() -> None:
    (report,) = hexa_fx.explain(TwoNames().double(), _x(9)).blocks
    assert "neither a parameter nor a buffer" in report.reason


def test_texts_of_numbers_that_are_kept_are_refused_at_their_line() -> None:
    (report,) = hexa_fx.explain(Keeps().double(), _x(9)).blocks
    assert "takes a host decision (if, while, item()) on the data" in report.reason
    assert "test_first_calls.py" in str(report.location)
