"""A number in the code that the experts' outputs are multiplied by, beside the routing weight or in its place."""

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.compare import operators_run, perturb
from tests.zoo.variant import D, E, K


class Scaled(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, self.scaled(expert(flat[token]), weights[token, slot, None]))
        return out.view(x.shape)

    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * weight * self.scaling


class Divided(Scaled):
    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / self.scaling * weight


class Mean(Scaled):
    """No weight at all."""

    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / K


class OverExperts(Mixture):
    """The mean over all experts, of which those that were not chosen have a weight of zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        gates = torch.zeros(len(flat), E, dtype=flat.dtype).scatter(1, index, weights)
        return (gates[..., None] * torch.stack([expert(flat) for expert in self.experts], 1)).mean(1).view(x.shape)


class Adapters(nn.Module):
    """Low-rank experts on a base layer, all of them on every token, their weights zero for most."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.router, self.scaling = nn.Linear(D, D), nn.Linear(D, E, bias=False), 16 / 2
        self.down = nn.ModuleList(nn.Linear(D, 2, bias=False) for _ in range(E))
        self.up = nn.ModuleList(nn.Linear(2, D, bias=False) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        weights, index = self.router(x).softmax(-1).topk(K, -1)
        for number, (down, up) in enumerate(zip(self.down, self.up)):
            y = y + up(down(x)) * (weights * (index == number)).sum(-1, keepdim=True) * self.scaling
        return y


class OfTokens(Scaled):
    """Divided by the number of tokens: no constant."""

    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * weight / self.tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens = float(x.shape[0] * x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("kind", [Scaled, Divided, Mean, OverExperts, Adapters])
def test_rewritten_in_one_operator(kind: type[nn.Module]) -> None:
    block = kind().double()
    optimized = rewritten(block, tokens(2, 7))
    assert optimized.report.blocks[0].rewritten_to == "hexa::moe_ffn"
    perturb(block, optimized)
    agree(block, optimized, tokens(3, 5), tokens(1, 1), tokens(0, 3))
    if hasattr(block, "scaling") and kind is not Mean:
        block.scaling = optimized.scaling = 3.0
        torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


def test_in_16_bits_it_keeps_the_dtype() -> None:
    block = Mean()
    optimized = hexa_fx.optimize(block, tokens(2, 7).float()).bfloat16()
    x = tokens(3, 5).bfloat16()
    assert operators_run(optimized, (x,))
    torch.testing.assert_close(optimized(x), block.bfloat16()(x), rtol=0.05, atol=0.05)


def test_a_count_is_no_constant() -> None:
    block = OfTokens().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))
