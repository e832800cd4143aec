"""Python code that is handed to torch is in no recorded graph: such blocks are refused with their line."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop

import hexa_fx
from tests.detect.mixture import D, Mixture


class Chooses(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, lambda given: given.cos(), (self.mix(x)[2],))


class ByLayers(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cond(x.sum() > 0, self.first, self.second, (x,)))[2]


class Loops(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(count: torch.Tensor, value: torch.Tensor) -> Any:
            return count + 1, value * 0.9

        return self.mix(while_loop(lambda count, _: count < 3, step, (torch.tensor(0), x))[1])[2]


class ElementByElement(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.detach().clone().apply_(lambda number: number + 1))[2]


@pytest.mark.parametrize("kind", [Chooses, ByLayers, Loops, ElementByElement])
def test_it_is_refused_with_a_sentence_and_its_line(kind: type[Mixture]) -> None:
    model = nn.Sequential(kind().double())
    x = torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(model, x)
    (block,) = optimized.report.blocks
    assert "it hands Python code to" in block.reason
    assert "test_handed_code.py" in str(block.location)
    torch.testing.assert_close(optimized(x), model(x))


class Plain(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


def test_beside_a_block_it_is_no_matter() -> None:
    """torch.cond() compiles itself and what it is called in, our code that watches the model's run too."""
    model, x = Beside().double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(model, x)
    assert optimized.report.rewritten
    torch.testing.assert_close(optimized(x), model(x))
