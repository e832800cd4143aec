"""Routing that is given as zeros and ones, at most one a slot, and in no other form."""

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.compare import compare

D, E = 6, 4


class Marked(nn.Module):
    """Experts that are given a mask (T, E) or (T, k, E) and weights (T,) or (T, k)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))

    def forward(self, x: torch.Tensor, marks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        marks, weights = marks.view(x.shape[0], -1, E), weights.view(x.shape[0], -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(marks[..., number] == 1)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def given(tokens: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token in four is dropped."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :k]
    marks = nn.functional.one_hot(ids, E)
    marks[::4, 0] = 0
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64)
    return (x, marks[:, 0], weights[:, 0]) if k == 1 else (x, marks.to(dtype), weights)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
@pytest.mark.parametrize("k", [1, 2])
def test_marks_are_read_as_ids(k, dtype):
    model = Marked().double()
    opt = hexa_fx.optimize(model, given(9, k, dtype, 0))
    (block,) = opt.report.blocks
    assert block.status == "rewritten", block.reason
    for tokens, seed in ((9, 1), (5, 2), (1, 3)):
        found = compare(model, opt, given(tokens, k, dtype, seed))
        assert found.within(1e-10), found
    x, marks, weights = given(7, k, dtype, 4)
    assert compare(model, opt, (x, torch.zeros_like(marks), weights)).within(1e-10)
