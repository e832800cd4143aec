"""Decisions on sizes by way of types and of functions elsewhere, and on exact numbers that follow from the routing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hexa_fx
from tests.detect import sizes_elsewhere
from tests.detect.test_size_decisions import Block, D, E

CERTAIN_COUNTS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "in floats": lambda block, x, ids: (ids == 1).float().sum() == 97,
    "in a histogram": lambda block, x, ids: torch.histc(ids.double(), E, 0, E - 1)[0].item() == 97,
    "scattered": lambda block, x, ids: torch.zeros(E).scatter_add(0, ids.flatten(), torch.ones(ids.numel()))[0] == 97,
    "of one-hot numbers": lambda block, x, ids: F.one_hot(ids, E).double().sum((0, 1))[1].item() == 97,
    "of unique": lambda block, x, ids: ids.unique(return_counts=True)[1][0].item() == 97,
    "in a queue": lambda block, x, ids: (ids == 1).cumsum(0).max().item() == 97,
}
LONG: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "instance": lambda block, x, ids: sizes_elsewhere.is_long(x),
    "length": lambda block, x, ids: sizes_elsewhere.is_long_by_length(x),
}


class Asking(Block):
    def __init__(self, asked: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.asked = asked

    def factor(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> float:
        return 2.0 if self.asked(self, x, i) else 1.0


class CastingToInt(Block):
    def factor(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        kinds = type("Kinds", (), {"whole": type(E)})
        return (i > 0).to(int) + torch.ones(x.shape[0], 1, dtype=kinds.whole)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64)


@pytest.mark.parametrize("asked", LONG.values(), ids=LONG)
def test_sizes_are_asked_of_types_and_elsewhere(asked: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Asking(asked).double().eval()
    optimized = hexa_fx.optimize(model, tokens(24))
    assert optimized.report.rewritten, optimized.report
    given = tokens(5001)
    torch.testing.assert_close(optimized(given), model(given))
    assert "len" not in vars(sizes_elsewhere)  # what stood for it is gone


@pytest.mark.parametrize("asked", [*CERTAIN_COUNTS.values()])
def test_certain_counts_are_refused(asked: Callable[..., Any]) -> None:
    (block,) = hexa_fx.explain(Asking(asked).double().eval(), tokens(24)).blocks
    assert block.status == "refused"
    assert "exact number of tokens" in block.reason, block.reason
    assert block.location is not None


def test_types_stand_for_dtypes() -> None:
    model = CastingToInt().double().eval()
    optimized = hexa_fx.optimize(model, tokens(24))
    assert optimized.report.rewritten, optimized.report
    given = tokens(31)
    torch.testing.assert_close(optimized(given), model(given))
