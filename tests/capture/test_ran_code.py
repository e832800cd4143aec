"""Whether code that may decide on a dtype came to it, and that a block follows what it decides in another dtype."""

from __future__ import annotations

import copy

import pytest
import torch

import hexa_fx
from hexa_fx.capture import capture
from tests.inspect.models import Block

HALF = False


def _short(x: torch.Tensor) -> bool:
    return HALF and x.dtype == torch.bfloat16


def _long(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and not HALF


def _caught_nothing_of_torch(x: torch.Tensor) -> bool:
    try:
        return int("x") == 0
    except Exception:
        return False


def _caught(x: torch.Tensor) -> bool:
    try:
        x.view(torch.int32)
    except Exception:
        return True
    return False


def _caught_in_what_it_calls(x: torch.Tensor) -> bool:
    try:
        return _caught(x)
    except ValueError:
        return False


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _caught_of_an_autograd_function(x: torch.Tensor) -> bool:
    try:
        _Doubling.apply(x)
    except Exception:
        return True
    return False


CASES = {
    _short: True,
    _caught_nothing_of_torch: True,
    _long: False,
    _caught: False,
    _caught_in_what_it_calls: False,
    _caught_of_an_autograd_function: False,
}


@pytest.mark.parametrize("asks", CASES, ids=lambda f: f.__name__)
def test_only_code_that_came_to_it_asks_for_a_dtype(asks, monkeypatch):
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")

    class Inside(Block):
        def forward(self, x):
            return super().forward(x * (2 if asks(x) else 1))

    torch.manual_seed(0)
    model = Inside().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), torch.randn(24, 8))
    assert len(optimized.report.rewritten) == 1, optimized.report
    assert bool(capture(model, (torch.randn(24, 8),), {}).asks.get("dtype")) is not CASES[asks]
    x = torch.randn(24, 8).bfloat16()
    result, expected = optimized.bfloat16()(x), model.bfloat16()(x)
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
    (block,) = optimized.report.blocks
    assert block.calls.kinds == 2 or block.calls.own, "another dtype is another kind of call"
