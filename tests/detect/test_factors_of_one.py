"""Weights that are one on the example, as those normalised over a single expert: they have gradients, and vary elsewhere."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hexa_fx
from tests.zoo.compare import compare, operators_run

D, E = 12, 4
Weigh = Callable[[Tensor], Tensor]
WEIGHTS: dict[str, Weigh] = {
    "over their sum": lambda w: w / (w.sum(-1, keepdim=True) + 1e-20),
    "and scaled": lambda w: 2.5 * w / (w.sum(-1, keepdim=True) + 1e-20),
    "over a bounded sum": lambda w: w / w.sum(-1, keepdim=True).clamp(min=1e-9),
    "normalised": lambda w: F.normalize(w, p=1, dim=-1),
    "straight through": lambda w: 1 + w - w.detach(),
}


class OneExpert(nn.Module):
    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        self.gate, self.weigh = nn.Linear(D, E), weigh
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).sigmoid().topk(1, -1)
        weights, out = self.weigh(weights), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("way", WEIGHTS)
def test_small_scores_and_the_routers_gradient(way: str) -> None:
    """Scores as after training with a large bias: 0.5, 1e-13, 1e-26."""
    block = OneExpert(WEIGHTS[way]).double()
    x = torch.randn(40, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    assert operators_run(opt, (x,)), opt.report
    for bias in (0.0, -30.0, -60.0):
        for module in (block, opt):
            module.gate.bias.data.fill_(bias)
        found = compare(block, opt, (x,))
        assert found.within(1e-9), (bias, found)
        assert not found.none_gradients
