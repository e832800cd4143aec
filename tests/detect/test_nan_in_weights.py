"""Routing weights in which code replaces NaN: a slot that is dropped by a weight of zero may get a number there."""

from __future__ import annotations

import torch
from torch import nn

import hexa_fx

T, D, E = 14, 6, 5


class Capacity(nn.Module):
    """One expert a token, up to four tokens an expert."""

    def __init__(self, masked_first: bool) -> None:
        super().__init__()
        self.router, self.w = nn.Linear(D, E, bias=False), nn.Parameter(torch.randn(E, D, D))
        self.masked_first = masked_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).max(-1)
        marks = nn.functional.one_hot(index, E)
        keep = ((marks.cumsum(0) - 1) * marks).sum(-1) < 4
        rows = torch.stack([torch.where((keep & (index == e))[:, None], x, 0.0) for e in range(E)])
        out = torch.bmm(rows, self.w).sum(0)
        if self.masked_first:
            weights = weights * keep
            weights = weights.masked_fill(weights.isnan(), 0.25)
        else:
            weights = weights.masked_fill(weights.isnan(), 0.25) * keep
        return out * weights[:, None]


def test_a_slot_dropped_by_its_weight_stays_dropped_where_the_router_gives_nan() -> None:
    config = hexa_fx.HexaConfig(own_code_when_small=False)
    x = torch.randn(T, D, dtype=torch.float64)
    for masked_first in (True, False):
        block = Capacity(masked_first).double().eval()
        opt = hexa_fx.optimize(block, x, config)
        for module in (block, opt):
            module.router.weight.data[-1, 0] = float("nan")
        torch.testing.assert_close(opt(x), block(x), equal_nan=True)
