"""What lies in a result beside the experts' outputs is found at any scale of weights and tokens, and on small examples."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.common import MLP, Mixture, SwiGLU, TopKGate, experts
from tests.zoo.compare import compare
from tests.zoo.variant import D

Cleaned = Callable[[torch.Tensor], torch.Tensor]


class OntoShared(Mixture):
    """Experts' outputs are added onto that of a shared expert."""

    def __init__(self, kind: type[nn.Module], std: float | None) -> None:
        super().__init__(kind)
        self.shared = SwiGLU()
        for parameter in self.parameters() if std else ():
            nn.init.normal_(parameter, std=std)

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return self.shared(flat)


class OntoCleaned(OntoShared):
    """Numbers of the shared expert that are too large or not finite are put right by a mask, of which the example has none."""

    def __init__(self, cleaned: Cleaned) -> None:
        super().__init__(MLP, None)
        self.cleaned = cleaned

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return self.cleaned(super().start(flat))


class OntoTokens(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.gate, self.experts = TopKGate(num_experts=3, top_k=1), experts(count=3)

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()


@pytest.mark.parametrize("kind", [SwiGLU, MLP])
@pytest.mark.parametrize(("std", "size"), [(1e-4, 1e-3), (1e-4, 1.0), (None, 1e4)])
def test_a_shared_expert_of_any_scale(std: float | None, size: float, kind: type[nn.Module]) -> None:
    """Small weights of small tokens give less than any fixed number, and rounding of large ones is more."""
    torch.manual_seed(0)
    block = OntoShared(kind, std).eval()
    optimized = hexa_fx.optimize(block, (size * torch.randn(2, 7, D),))
    assert optimized.report.rewritten, optimized.report
    assert compare(block, optimized, (size * torch.randn(3, 5, D),), {}, train=True, seed=1).within(2e-5)


def test_an_expert_that_is_given_all_tokens_holds_them_too() -> None:
    """In its rows, which are others on other inputs; what outputs are added onto is the block's input."""
    torch.manual_seed(0)
    block = OntoTokens().eval()
    with torch.no_grad():
        block.gate.weight.weight[1] = 9.0
    optimized = hexa_fx.optimize(block, (torch.rand(1, 4, D),))
    assert optimized.report.rewritten, optimized.report
    assert compare(block, optimized, (torch.randn(3, 5, D),), {}, train=True, seed=1).within(2e-5)


@pytest.mark.parametrize(
    "cleaned",
    [
        lambda y: torch.where(y.isfinite(), y, 0.0),
        lambda y: y.masked_fill(y.isnan(), 0.25),
        lambda y: torch.where(y.abs() > 70, 70 * y.sign(), y),
        lambda y: y.masked_fill(y > 70, 0.25),
    ],
)
def test_what_outputs_are_added_onto_is_the_last_that_holds_it(cleaned: Cleaned) -> None:
    """A mask that is no choice is no routing."""
    torch.manual_seed(0)
    block = OntoCleaned(cleaned).eval()
    optimized = hexa_fx.optimize(block, (torch.randn(2, 7, D),))
    assert optimized.report.rewritten, optimized.report
    matrix, x = block.shared.down_proj.weight, torch.randn(3, 5, D)
    for number in (1e4, float("nan")):
        with torch.no_grad():
            matrix[-1, -1] = number
        torch.testing.assert_close(optimized(x), block(x), rtol=2e-5, atol=1e-5, equal_nan=True)
