"""Numbers that code makes with numpy, as in ``x / np.sqrt(d)``."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.variant import D


class Scaled(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / np.sqrt(D)) * np.float32(0.5)


class ScaledBySize(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / np.sqrt(x.shape[-1])) / np.sqrt(x.shape[1]) * np.prod(x.shape[:2])


class Clamped(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(min=-np.float64(1), max=np.inf) + np.pi * np.bool_(True)


class Kept(Mixture):
    """Its constants are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.eps = np.float64(0.5), np.finfo(np.float64).eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) + self.eps) * self.scale


class Returned(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), np.float64(0.5), {"tokens": np.int64(3)}


@pytest.mark.parametrize("kind", [Scaled, ScaledBySize, Clamped, Kept, Returned], ids=lambda kind: kind.__name__)
def test_they_count_as_numbers(kind: type[nn.Module]) -> None:
    rewritten(kind().double().eval(), tokens(2, 7), tokens(2, 7), tokens(3, 5), train=False)


def test_logarithms_of_sizes_are_conditions() -> None:
    class Logarithm(Mixture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * np.log2(x.shape[1])

    model = Logarithm().double().eval()
    optimized = hexa_fx.optimize(model, tokens(2, 7))
    (block,) = optimized.report.blocks
    for sizes, kinds in (((3, 7), 1), ((3, 5), 2)):
        agree(model, optimized, tokens(*sizes), train=False)
        assert block.calls.kinds == kinds
    assert not hasattr(torch.SymInt, "log2")
