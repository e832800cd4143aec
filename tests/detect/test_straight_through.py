"""One-hot gates that carry the gradient of probabilities: the weights are ones, but no constants."""

import pytest
import torch

import hexa_fx
from tests.detect.test_size_decisions import Block, D, E
from tests.zoo.compare import compare, operators_run


class StraightThrough(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.gate(x).softmax(-1)
        index = probabilities.argmax(-1, keepdim=True)
        gates = torch.zeros_like(probabilities).scatter_(-1, index, 1.0) - probabilities.detach() + probabilities
        out = torch.zeros_like(x)
        for e in range(E):
            chosen = index[:, 0] == e
            out[chosen] = self.run(e, x[chosen]) * gates[chosen, e : e + 1]
        return out


@pytest.mark.parametrize("seed", range(4))
def test_the_ones_of_all_tokens_are_found(seed: int) -> None:
    """Also where an expert happens to have as many rows as there are experts."""
    torch.manual_seed(seed)
    model, given = StraightThrough().double().eval(), torch.randn(16, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(model, given)
    assert optimized.report.rewritten, optimized.report
    assert operators_run(optimized, (given,))
    assert compare(model, optimized, (torch.randn(23, D, dtype=torch.float64),)).within(1e-10)
