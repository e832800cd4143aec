"""Weights that are set to zero where another expert was chosen, by torch.where or masked_fill; and other conditions beside."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.compare import compare, operators_run

D, E, K = 8, 4, 2
Factor = Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]


class Block(nn.Module):
    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.factor = factor
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)) for _ in range(E))
        self.register_buffer("live", torch.ones(E, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, i = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (i == e).any(-1).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * self.factor(self, w, i, e).sum(-1)[rows, None])
        return out


ALONE: dict[str, Factor] = {
    "where": lambda block, w, i, e: torch.where(i == e, w, 0.0),
    "where not": lambda block, w, i, e: torch.where(i != e, torch.zeros_like(w), w),
    "masked_fill": lambda block, w, i, e: w.masked_fill(i != e, 0.0),
}
BESIDE: dict[str, Factor] = {
    "a buffer": lambda block, w, i, e: torch.where((i == e) & block.live[e], w, 0.0),
    "another where": lambda block, w, i, e: torch.where(block.live[e], torch.where(i == e, w, 0.0), 0.0),
    "a bound": lambda block, w, i, e: torch.where((i == e) & (w > 1e-9), w, 0.0),
    "filled below a bound": lambda block, w, i, e: w.masked_fill((i != e) | (w < 1e-9), 0.0),
}


def tokens(scale: float = 1.0) -> tuple[torch.Tensor]:
    return (scale * torch.randn(19, D, dtype=torch.float64),)


def both(factor: Factor) -> tuple[Block, Block]:
    """A block and its optimized copy."""
    torch.manual_seed(0)
    model = Block(factor).double().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), tokens())
    return model, optimized


@pytest.mark.parametrize("factor", ALONE.values(), ids=ALONE)
def test_they_are_rewritten(factor: Factor) -> None:
    model, optimized = both(factor)
    assert operators_run(optimized, tokens()), optimized.report
    assert compare(model, optimized, tokens()).within(1e-10)


@pytest.mark.parametrize("factor", BESIDE.values(), ids=BESIDE)
def test_another_condition_is_kept_or_refused(factor: Factor) -> None:
    model, optimized = both(factor)
    for each in (model, optimized):
        each.get_buffer("live")[1] = False
    for scale in (1.0, 100.0):
        assert compare(model, optimized, tokens(scale)).within(1e-10)
