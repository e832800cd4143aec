"""Blocks that raise on purpose, masks of nothing, arguments that are one tensor, and calls under other people's modes."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import hexa_fx
from tests.runtime.handmade import D, E, ListMoE
from tests.zoo.compare import operators_run


def tokens(count: int = 12) -> torch.Tensor:
    return torch.randn(count, D)


def optimized(block: nn.Module, *given: Any) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(block), hexa_fx.optimize(block.eval(), given)


class AtMost(ListMoE):
    """Asserts by a function of torch, which returns nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._assert(hidden.shape[0] <= 40, "too many tokens")
        torch._assert_async(hidden.isfinite().all())
        return super().forward(hidden)


def test_assertions_of_torch_still_raise() -> None:
    _, opt = optimized(AtMost(), tokens())
    assert operators_run(opt, (tokens(),))
    with pytest.raises(AssertionError, match="too many tokens"):
        opt(tokens(41))
    with pytest.raises((AssertionError, RuntimeError)):
        opt(tokens() / 0)


class Alive(nn.Module):
    """Runs the experts of a list that the mask gives; of no expert there is no weight either."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).masked_fill(~alive, -torch.inf).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in alive.nonzero().flatten().tolist():
            token, slot = torch.where(index == expert)
            y = self.out[expert](self.experts[expert](x[token]).relu())
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def test_a_mask_that_leaves_nothing() -> None:
    alive = torch.ones(E, dtype=torch.bool)
    original, opt = optimized(Alive(), tokens(), alive)
    given = tokens()
    for mask in (alive, ~alive, torch.arange(E) == 1):
        torch.testing.assert_close(opt(given, mask), original(given, mask))


class IfImported(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (2.0 if "a_library" in sys.modules else 1.0)


def test_what_no_condition_watches_is_refused() -> None:
    _, opt = optimized(IfImported(), tokens())
    assert not opt.report.rewritten
    assert "sys.modules" in opt.report.blocks[0].reason


class Halved(TorchFunctionMode):
    """Halves what silu gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is F.silu else found


def test_a_function_mode_sees_the_functions_of_the_block() -> None:
    original, opt = optimized(ListMoE(), tokens())
    given = tokens()
    assert operators_run(opt, (given,))
    with Halved():
        torch.testing.assert_close(opt(given), original(given))
        assert not operators_run(opt, (given,))


class Dense(nn.Module):
    """Runs every expert on all tokens, so that `torch.vmap` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D)) for _ in range(E)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        gates = torch.zeros(*x.shape[:-1], E).scatter(-1, index, weights)
        return torch.stack([gates[..., n, None] * e(x) for n, e in enumerate(self.experts)]).sum(0)


@pytest.mark.parametrize("batch", [3, 0])
def test_vmap_goes_through_the_original(batch: int) -> None:
    original, opt = optimized(Dense(), tokens())
    assert operators_run(opt, (tokens(),))
    given = torch.randn(batch, 5, D)
    torch.testing.assert_close(torch.vmap(opt)(given), torch.vmap(original)(given))
