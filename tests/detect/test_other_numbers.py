"""Weights and sizes that code reads as plain numbers, ids that are not the places of experts, and numbers that are few."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten, tokens
from tests.zoo.variant import D, E


class ByPlainNumbers(Mixture):
    """The router gets no gradient from the outputs, only from its own loss."""

    numbers: Callable[[torch.Tensor], Any]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        rows = []
        for token in range(len(flat)):
            given = zip(type(self).numbers(weights[token]), index[token])
            rows.append(sum(weight * self.experts[int(number)](flat[token]) for weight, number in given))
        return torch.stack(rows).view(x.shape), weights.square().sum()


class ByItem(ByPlainNumbers):
    numbers = staticmethod(lambda weights: [weight.item() for weight in weights])


class ByFloat(ByPlainNumbers):
    numbers = staticmethod(lambda weights: [float(weight) for weight in weights])


class ByList(ByPlainNumbers):
    numbers = staticmethod(torch.Tensor.tolist)


class InPieces(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(InPieces, self).forward(piece) for piece in x.split(4, 1)], 1)


class OneByOne(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(OneByOne, self).forward(sequence[None])[0] for sequence in x])


class ByPlace(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(ByPlace, self).forward(x[place][None])[0] for place in range(x.size(0))])


@pytest.mark.parametrize("kind", [InPieces, OneByOne, ByPlace])
def test_pieces_are_routed_one_by_one(kind: type[nn.Module]) -> None:
    sizes = ((2, 7), (2, 7), (2, 5), (3, 9), (1, 8))  # as many pieces, and more or fewer: another kind of call
    rewritten(kind().double().eval(), *(tokens(*size) for size in sizes), train=False)


@pytest.mark.parametrize("kind", [ByItem, ByFloat, ByList])
def test_plain_numbers_pass_no_gradient_on(kind: type[nn.Module]) -> None:
    rewritten(kind().double().eval(), tokens(2, 7), tokens(1, 5), tokens(3, 4), train=False)


class OfSizes(Mixture):
    """What `float` makes of sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(x.shape[0]) / math.sqrt(float(x.shape[-1]) / 2)
        return super().forward(x) * (scale if isinstance(scale, float) else 0.0)


def test_floats_of_sizes_stay_sizes() -> None:
    rewritten(OfSizes().double().eval(), tokens(2, 7), tokens(1, 5), tokens(3, 4), train=False)


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, width)), nn.Parameter(torch.randn(E, width, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        hidden = torch.einsum("td,tkdi->tki", x, self.w1[ids]).relu()
        return (torch.einsum("tki,tkid->tkd", hidden, self.w2[ids]) * weights[..., None]).sum(1)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_relu_of_narrow_experts_is_seen(width: int) -> None:
    (block,) = hexa_fx.explain(Narrow(width).double(), torch.randn(24, D).double()).blocks
    assert block.status == "rewritten", block.reason
