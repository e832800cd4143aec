"""What lies in a result beside the experts' outputs is found at any scale of weights and tokens, and on small examples."""

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.common import MLP, Mixture, SwiGLU
from tests.zoo.compare import compare
from tests.zoo.variant import D


class OntoShared(Mixture):
    """Experts' outputs are added onto that of a shared expert."""

    def __init__(self, kind: type[nn.Module], std: float | None) -> None:
        super().__init__(kind)
        self.shared = SwiGLU()
        for parameter in self.parameters() if std else ():
            nn.init.normal_(parameter, std=std)

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return self.shared(flat)


@pytest.mark.parametrize("kind", [SwiGLU, MLP])
@pytest.mark.parametrize(("std", "size"), [(1e-4, 1e-3), (1e-4, 1.0), (None, 1e4)])
def test_a_shared_expert_of_any_scale(std: float | None, size: float, kind: type[nn.Module]) -> None:
    """Small weights of small tokens give less than any fixed number, and rounding of large ones is more."""
    torch.manual_seed(0)
    block = OntoShared(kind, std).eval()
    optimized = hexa_fx.optimize(block, (size * torch.randn(2, 7, D),))
    assert optimized.report.rewritten, optimized.report
    assert compare(block, optimized, (size * torch.randn(3, 5, D),), {}, train=True, seed=1).within(2e-5)
