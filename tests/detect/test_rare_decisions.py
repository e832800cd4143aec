"""Decisions on tokens that hardly ever go the other way, so that no example shows it: seen, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import operators_run

ON_DATA = "the code takes a host decision (if, while, item()) on the data"


def is_rare(x: torch.Tensor) -> torch.Tensor:
    return (x[:1, :3] == 7.25).sum() == 3


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": torch.Tensor.item,
    "item of any": lambda rare: rare.any().item() is True,
    "int": int,
    "float": float,
    "a key": lambda rare: {True: 1}.get(rare.item(), 0),
    "a text": lambda rare: str(rare.item()) == "True",
    "a tensor's text": lambda rare: f"{rare.float()}" == "1.0",
    "a part of its text": lambda rare: str(rare.double())[7] == "1",
    "a float's text": lambda rare: f"{rare.double().item():.1f}" in ("1.0", "2.0"),
    "a float in a text": lambda rare: f"load {rare.double().item():.3f}" == "load 1.000",
    "a float in a text, formatted": lambda rare: "x" + format(rare.double().item(), ".2f") == "x1.00",
    "a float in a key": lambda rare: {"x1.0": 1}.get(f"x{rare.double().item()}", 0),
    "a tensor in a text": lambda rare: f"x{rare.double()}" == "x1.0",
    "a list": lambda rare: rare.tolist(),
}


class Decides(Mixture):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        return 2 * out if WAYS[self.way](is_rare(x)) else out


GIVEN: dict[str, tuple[Callable[[bool], Any], Callable[[Any], Any]]] = {
    "a flag": (lambda rare: rare, lambda given: given),
    "a number": (lambda rare: 3 if rare else 0, lambda given: given),
    "a text": (lambda rare: "rare" if rare else "", lambda given: given == "rare"),
}


class Gives(nn.Module):
    def __init__(self, give: Callable[[bool], Any]) -> None:
        super().__init__()
        self.gate, self.give = nn.Linear(D, E), give

    def forward(self, x: torch.Tensor) -> Any:
        return *self.gate(x).softmax(-1).topk(K, -1), self.give(bool(is_rare(x)))


class GoesByIt(Mixture):
    """What a router gives depends on tokens, and the output on it."""

    def __init__(self, give: Callable[[bool], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.router, self.take = Gives(give), take  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids, given = self.router(x)
        out = self.chosen(x, weights, ids)
        return 2 * out if self.take(given) else out


BLOCKS = {how: GoesByIt(*GIVEN[how]) for how in GIVEN} | {w: Decides(w) for w in WAYS}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_refused_and_right(block: nn.Module) -> None:
    block, x = block.double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    assert ON_DATA in optimized.report.blocks[0].reason
    usual = optimized(x)
    x[0, :3] = 7.25
    torch.testing.assert_close(optimized(x), block(x))
    assert not torch.allclose(optimized(x)[1:], usual[1:])


class Counts(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        return 2 * out if len(is_rare(x).nonzero()) > 0 else out


def test_what_is_counted_before_anything_is_chosen_is_asked_in_every_call() -> None:
    block, x = Counts().double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    assert operators_run(optimized, (x,))
    for _ in range(2):
        torch.testing.assert_close(optimized(x), block(x))
        x[0, :3] = 7.25


class Skips(Mixture):
    """Leaves experts out by their column of a matrix of weights, or by the weights of those who chose them."""

    def __init__(
        self, asks: Callable[[torch.Tensor], Any], summed: bool, scores: Callable[[torch.Tensor], Any]
    ) -> None:
        super().__init__()
        self.asks, self.summed, self.scores = asks, summed, scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.scores(self.router(x)).topk(K, -1)
        gates, out = torch.zeros(len(x), E).to(x).scatter(1, ids, weights), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            gate = (weights * (ids == number)).sum(-1) if self.summed else gates[:, number]
            if self.asks(gate):
                token = (ids == number).any(-1).nonzero()[:, 0]
                out.index_add_(0, token, gate[token, None] * expert(x[token]))
        return out


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


CHOSEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "(g > 0).any()": lambda g: (g > 0).any(),
    "(g != 0).sum() != 0": lambda g: (g != 0).sum() != 0,
    "g.sum().item() != 0": lambda g: g.sum().item() != 0,
}


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("way", CHOSEN)
def test_experts_are_left_out_where_nobody_chose_them(way: str, summed: bool) -> None:
    block, x = Skips(CHOSEN[way], summed, softmax).double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    for rows in (x, x[:1]):
        assert operators_run(optimized, (rows,))
        torch.testing.assert_close(optimized(rows), block(rows))


@pytest.mark.parametrize("summed", [False, True])
def test_the_size_of_weights_is_of_the_data(summed: bool) -> None:
    block, x = (
        Skips(lambda gate: gate.mean().item() < 0.97, summed, softmax).double(),
        torch.randn(9, D, dtype=torch.float64),
    )
    optimized = hexa_fx.optimize(block, x)
    assert ON_DATA in optimized.report.blocks[0].reason
    for row in 100 * x:
        torch.testing.assert_close(optimized(row[None]), block(row[None]))


class Dropped(Mixture):
    """Expert dropout: experts that are switched off at random, unless too few were left."""

    def mix(self, x: torch.Tensor) -> Any:
        off = torch.rand(E) < 0.05
        if off.sum() > E - K:
            off = torch.zeros_like(off)
        weights, ids = self.router(x).masked_fill(off, float("-inf")).softmax(-1).topk(K, -1)
        return weights, ids, self.chosen(x, weights, ids)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class AnyOf(Mixture):
    """Random routing: whether an expert was drawn is a question of the routing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, out = torch.randint(0, E, (len(x),)), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (ids == number).any():
                out[ids == number] = expert(x[ids == number])
        return out


def test_a_decision_on_drawn_numbers_is_one_on_data() -> None:
    x = torch.randn(9, D, dtype=torch.float64)
    assert ON_DATA in hexa_fx.explain(Dropped().double(), x).blocks[0].reason
    assert hexa_fx.explain(AnyOf().double(), x).rewritten
