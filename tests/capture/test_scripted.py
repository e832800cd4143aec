"""Blocks whose code calls what torch.jit compiled, and numbers that code makes with numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.common import TopKGate
from tests.zoo.variant import D, K


def _gating(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, index = torch.topk(scores, k, dim=-1)
    counts = torch.zeros(scores.size(1), dtype=torch.long, device=scores.device)
    counts = counts.scatter_add(0, index.flatten(), torch.ones_like(index.flatten()))
    return weights / weights.sum(-1, keepdim=True), index, counts


def _activate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


class Scripted(Mixture):
    """Gating and activation are compiled, and nothing else chooses."""

    gating, activate = torch.jit.script(_gating), torch.jit.script(_activate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index, _ = self.gating(self.gate.weight(flat).softmax(-1), K)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = weights * (index == number)
            out = out + expert.fc2(self.activate(expert.fc1(flat))) * chosen.sum(-1, keepdim=True)
        return out.view(x.shape)


class Model(nn.Module):
    """A compiled layer before one block, and a block with a compiled router."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.second = torch.jit.script(nn.Linear(D, D)), Mixture(), Mixture()
        self.second.gate = torch.jit.script(_Gate())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.before(x)))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = TopKGate().weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.weight(x).softmax(-1).topk(2, -1)
        return weights, index


def test_compiled_functions_are_read_as_python() -> None:
    rewritten(Scripted().double(), tokens(2, 7), tokens(3, 5), tokens(1, 1))
    assert isinstance(Scripted.gating, torch.jit.ScriptFunction)


def test_compiled_modules_are_named_and_the_others_rewritten() -> None:
    model = Model().double()
    optimized = hexa_fx.optimize(model, tokens(2, 7))
    assert [block.status for block in optimized.report.blocks] == ["rewritten", "refused"]
    assert "'gate' is compiled by torch.jit" in optimized.report.blocks[1].reason
    torch.testing.assert_close(optimized(tokens(3, 5)), model(tokens(3, 5)))


def test_a_function_without_python_code_is_named() -> None:
    class Compiled(Mixture):
        activate = torch.jit.CompilationUnit("def twice(x):\n  return 2 * x\n").twice

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.activate(x))

    reason = hexa_fx.explain(Compiled().double(), tokens(2, 7)).blocks[0].reason
    assert "it calls twice, which torch.jit compiled" in reason


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
