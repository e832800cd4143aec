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


class SummedOverSlots(nn.Module):
    """An expert's weights are those of its tokens, added up over the slots."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.width = nn.Linear(D, 6), width
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, width)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        out = x.new_zeros(len(x), self.width)
        for number, expert in enumerate(self.experts):
            chosen = (ids == number).any(-1)
            own = torch.where(ids[chosen] == number, weights[chosen], torch.zeros_like(weights[chosen]))
            out[chosen] += own.sum(-1, keepdim=True) * expert(x[chosen])
        return out


@pytest.mark.parametrize("width", [D, 1])
def test_an_expert_of_one_token(width: int) -> None:
    """Its one weight is no level that sums are brought to. Experts may give one number, as those of a regression."""
    torch.manual_seed(0)
    block = SummedOverSlots(width).double()
    examples = (torch.randn(8, D, dtype=torch.float64) for _ in range(100))
    x = next(x for x in examples if 1 in block.gate(x).topk(2).indices.flatten().bincount())
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    for rows in (x, x[:1], torch.randn(50, D, dtype=torch.float64)):
        assert operators_run(opt, (rows,)), opt.report
        assert compare(block, opt, (rows,)).within(1e-10)
