"""Weights that the code reads as plain numbers, and ids that are not the places of experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture, _tokens
from tests.zoo.compare import compare, operators_run
from tests.zoo.variant import D, E


class WeightsByItem(Mixture):
    """The router gets no gradient from the outputs, only from its own loss."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        rows = []
        for token in range(len(flat)):
            given = zip(weights[token], index[token])
            rows.append(sum(weight.item() * self.experts[int(number)](flat[token]) for weight, number in given))
        return torch.stack(rows).view(x.shape), weights.square().sum()


class Renumbered(Mixture):
    """Loops over ids; `place` says which expert one stands for, if any."""

    def place(self, number: int) -> int | None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        out = torch.zeros_like(flat)
        for number in range(E):
            place = self.place(number)
            if place is not None:
                token, slot = torch.where(index == number)
                out.index_add_(0, token, self.experts[place](flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


class Backwards(Renumbered):
    def place(self, number: int) -> int:
        return E - 1 - number


class NoneFirst(Renumbered):
    """The first id is of no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = self.experts[1:]

    def place(self, number: int) -> int | None:
        return number - 1 if number else None


class InPieces(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(InPieces, self).forward(piece) for piece in x.split(4, 1)], 1)


def test_plain_numbers_pass_no_gradient_on() -> None:
    torch.manual_seed(0)
    model = WeightsByItem().double().eval()
    optimized = hexa_fx.optimize(model, _tokens(2, 7))
    assert optimized.report.rewritten, optimized.report
    assert operators_run(optimized, (_tokens(1, 5),))
    assert compare(model, optimized, (_tokens(3, 4),)).within(1e-10)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Backwards, f"{E - 1} stands for the expert at place 0"),
        (NoneFirst, "1 stands for the expert at place 0"),
        (InPieces, "the same experts run more than once in a forward"),
    ],
)
def test_what_is_said_of_others(kind: type[nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    (block,) = hexa_fx.explain(kind().double().eval(), _tokens(2, 7)).blocks
    assert reason in block.reason
