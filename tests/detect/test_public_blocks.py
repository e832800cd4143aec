"""Ways of writing that blocks of public repositories have and the zoo has not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.compare import compare, operators_run
from tests.zoo.variant import D, E, I, K


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


class AllAtOnce(nn.Module):
    """Loops over the experts in train mode, on ids; in eval mode it multiplies with all, on weights that are mostly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, D, I)), nn.Parameter(torch.randn(E, I, D))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if not self.training:
            hidden = torch.bmm(x.repeat(E, 1).view(E, -1, D), self.up).relu()
            return (torch.bmm(hidden, self.down) * weights.T[..., None]).sum(0)
        out, mask = torch.zeros_like(x), nn.functional.one_hot(index, E).permute(2, 1, 0)
        for number in range(E):
            _, token = torch.where(mask[number])
            out.index_add_(
                0, token, (x[token] @ self.up[number]).relu() @ self.down[number] * weights[token, number, None]
            )
        return out


class GivenWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E, bias=False), AllAtOnce()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(K)
        return self.experts(flat, torch.zeros(len(flat), E).to(x).scatter(1, index, weights), index).view(x.shape)


@pytest.mark.parametrize("train", [False, True])
def test_around_a_part_that_chooses_in_one_mode_only_both_modes_are_rewritten(train: bool) -> None:
    torch.manual_seed(0)
    block = GivenWeights().double()
    optimized = hexa_fx.optimize(block, _tokens(2, 7))
    for x in (_tokens(3, 5), _tokens(1, 1)):
        assert operators_run(optimized.train(train), (x,))
        found = compare(block, optimized, (x,), train=train)
        assert found.within(1e-10), found
