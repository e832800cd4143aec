"""Numbers of a block's own that every run takes a step further: kept up if nothing else reads them, else refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hexa_fx
from tests.runtime.handmade import D, ListMoE
from tests.zoo.compare import compare, operators_run

NAMES = ("steps", "left", "scale", "epochs", "looks")


class Counting(ListMoE):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.left, self.scale, self.epochs, self.looks = 0, 10.0, 1.0, 5, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.left = self.left - 0.5
        if self.training:
            self.scale *= 0.99
            self.epochs -= 2
        else:
            self.looks += 3
        return super().forward(hidden)


class Annealed(Counting):
    """What the block makes of the number would be that of the example."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden / (1 + self.steps))


class Saturated(ListMoE):
    steps = 3

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.steps = min(self.steps + 1, 50)
        return super().forward(hidden)


class ByRows(ListMoE):
    """Counts what verification sees at other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(hidden.shape[0] // 12):
            self.rows += 1
        return super().forward(hidden)


def pair(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    return model, hexa_fx.optimize(copy.deepcopy(model), torch.randn(12, D))


def numbers(model: nn.Module) -> list[float]:
    return [getattr(model, name) for name in NAMES]


def test_counters_go_on_where_the_rewritten_block_runs():
    model, optimized = pair(Counting)
    assert numbers(optimized) == numbers(model)
    optimized = pickle.loads(pickle.dumps(optimized))
    for step in range(4):
        x = torch.randn(5 + step, D)
        assert operators_run(copy.deepcopy(optimized).train(step % 2 == 0), (x,))
        assert compare(model, optimized, (x,), train=step % 2 == 0).within(1e-5)
        assert numbers(optimized) == numbers(model)
    for m in (model, optimized):
        m.train().steps = 100
        checkpoint(m, torch.randn(5, D, requires_grad=True), use_reentrant=False).sum().backward()
    assert numbers(optimized) == numbers(model)
    assert optimized.steps == 102


def test_counters_under_a_compiler():
    model, optimized = pair(Counting)
    compiled = torch.compile(optimized.train(), backend="eager", fullgraph=True)
    for step in range(3):
        x = torch.randn(6, D)
        torch.testing.assert_close(compiled(x), model.train()(x), atol=1e-5, rtol=1e-5)
        assert numbers(optimized) == numbers(model), step
    torch.compiler.reset()


@pytest.mark.parametrize("kind", [Annealed, Saturated, ByRows])
def test_a_number_that_is_more_than_counted_is_refused(kind):
    _, optimized = pair(kind)
    (block,) = optimized.report.blocks
    assert block.status == "refused"
