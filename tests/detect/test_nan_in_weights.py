"""Routing weights in which code replaces NaN: a slot that is dropped by a weight of zero may get a number there."""

import math

import torch
from torch import nn

import hexa_fx

T, D, E, K = 14, 6, 5, 2


class Capacity(nn.Module):
    """Slots scattered into a padded (E, C, D) buffer, as PaddedBmm of the zoo does; NaN in their weights becomes a number."""

    def __init__(self, masked_first: bool) -> None:
        super().__init__()
        self.router, self.masked_first = nn.Linear(D, E, bias=False), masked_first
        self.w1, self.w2 = (nn.Parameter(torch.randn(E, D, D)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(K)
        ids, weights, capacity = index.reshape(-1), weights.reshape(-1), max(2, math.ceil(len(x) * K / E))
        marks = nn.functional.one_hot(ids, E)
        place = ((marks.cumsum(0) - 1) * marks).sum(-1)
        keep = place < capacity
        row = torch.where(keep, ids * capacity + place, torch.full_like(ids, E * capacity))
        padded = x.new_zeros(E * capacity + 1, D).index_copy(0, row, x.repeat_interleave(K, 0))[:-1]
        out = torch.bmm(nn.functional.gelu(torch.bmm(padded.view(E, capacity, D), self.w1)), self.w2).view(-1, D)
        if self.masked_first:
            weights = weights * keep
            weights = weights.masked_fill(weights.isnan(), 0.25)
        else:
            weights = weights.masked_fill(weights.isnan(), 0.25) * keep
        return (torch.cat([out, out.new_zeros(1, D)])[row] * weights[:, None]).view(-1, K, D).sum(1)


def test_a_slot_dropped_by_its_weight_stays_dropped_where_the_router_gives_nan() -> None:
    x = torch.randn(T, D, dtype=torch.float64)
    for masked_first in (True, False):
        block = Capacity(masked_first).double().eval()
        opt = hexa_fx.optimize(block, x)
        assert (opt.report.blocks[0].status == "rewritten") is not masked_first
        for module in (block, opt):
            module.router.weight.data[-1, 0] = float("nan")
        torch.testing.assert_close(opt(x), block(x), equal_nan=True)


class Thresholded(nn.Module):
    """Gates that are zero past a share of the probability; an expert is given the tokens whose gate is not."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, ids = self.router(x).softmax(-1).sort(-1, descending=True)
        gates = torch.zeros_like(share).scatter(-1, ids, share * (share.cumsum(-1) - share < 0.6))
        out = torch.zeros_like(x)
        for expert, gate in zip(self.experts, gates.unbind(-1)):
            token = gate.nonzero().squeeze(-1)
            out.index_add_(0, token, expert(x[token]) * gate[token, None])
        return out


def test_a_token_of_nan_stays_nan_where_experts_are_given_what_has_a_gate() -> None:
    x = torch.randn(T, D, dtype=torch.float64)
    block = Thresholded().double()
    optimized = hexa_fx.optimize(block, x)
    assert optimized.report.rewritten, str(optimized.report)
    x[3, 1] = math.nan
    torch.testing.assert_close(optimized(x), block(x), equal_nan=True)
    assert optimized(x)[3].isnan().all()


class Crowded(nn.Module):
    """The first tokens of each expert are computed, up to a capacity; the weights of all others are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(K)
        marks = nn.functional.one_hot(index, E).flatten(0, 1)
        place = ((marks.cumsum(0) - 1) * marks).sum(-1).view(-1, K)
        kept = place < max(2, math.ceil(len(x) * K / E / 2))
        weights, out = weights * kept, torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where((index == number) & kept)
            out[token] += expert(x[token]) * weights[token, slot, None]
        return out


def test_an_expert_that_gives_nan_harms_no_token_that_it_drops() -> None:
    x = torch.ones(T, D, dtype=torch.float64)
    block = Crowded().double()
    optimized = hexa_fx.optimize(block, torch.randn_like(x))
    assert optimized.report.rewritten, str(optimized.report)
    best = int(block.router(x)[0].argmax())
    for module in (block, optimized):
        module.experts[best][2].weight.data[0, 0] = math.inf
        module.experts[best][2].weight.data[0, 1] = -math.inf
    expected, found = block(x), optimized(x)
    assert expected[0].isnan().any()
    assert expected[-1].isfinite().all()
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert optimized.report.blocks[0].calls.rewritten == 1
