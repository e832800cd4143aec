"""Experts that run without gradients in a block that has some: only their routing, say, is trained."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, K, Mixture
from tests.zoo.agree import agree


def without(expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return expert(rows)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "no_grad": without,
    "detach": lambda expert, rows: expert(rows).detach(),
    "both ends": lambda expert, rows: expert(rows.detach()).detach(),
}


class CutOff(Mixture):
    def __init__(self, way: str, first: str = "") -> None:
        super().__init__()
        self.ways = [WAYS[first or way], WAYS[way]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, self.ways[number > 0](expert, x[token]) * weights[token, slot, None])
        return out


def optimized(block: nn.Module) -> nn.Module:
    x = torch.randn(9, D, dtype=torch.float64)
    return hexa_fx.optimize(block.double(), x)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_routing_alone(way: str) -> None:
    block = CutOff(way)
    agree(block, optimized(block), *(torch.randn(count, D, dtype=torch.float64) for count in (7, 1)))


def test_some_experts_alone() -> None:
    opt = optimized(CutOff("both ends", first="no_grad"))
    assert "experts run without gradients here" in opt.report.blocks[0].reason
