"""Blocks follow what code decides on a dtype, in another dtype."""

import copy

import pytest
import torch

import hexa_fx
from hexa_fx.capture import capture
from tests.inspect.models import Block


def _compared(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _caught(x: torch.Tensor) -> bool:
    try:
        x.view(torch.int32)
    except Exception:
        return True
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


def _asked_whether_it_iterates(x: torch.Tensor) -> bool:
    """As transformers' `ModelOutput` does with what it is given."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def test_how_tensors_lie_in_memory_counts_where_what_views_raise_is_caught(monkeypatch):
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")
    for asks, expected in ((_asked_whether_it_iterates, True), (_caught, False)):

        class Inside(Block):
            def forward(self, x, asks=asks):
                return super().forward(x * (2 if asks(x) else 1))

        optimized = hexa_fx.optimize(Inside().eval(), torch.randn(24, 8))
        optimized(torch.randn(24, 9)[:, :8])
        (block,) = optimized.report.blocks
        assert bool(block.calls.rewritten) is expected, block.calls


@pytest.mark.parametrize("asks", [_compared, _caught, _caught_of_an_autograd_function], ids=lambda f: f.__name__)
def test_code_that_compares_a_dtype_or_catches_errors_asks_for_the_dtype(asks, monkeypatch):
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")

    class Inside(Block):
        def forward(self, x):
            return super().forward(x * (2 if asks(x) else 1))

    torch.manual_seed(0)
    model = Inside().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), torch.randn(24, 8))
    assert len(optimized.report.rewritten) == 1, optimized.report
    assert capture(model, (torch.randn(24, 8),), {}).asks["dtype"]
    x = torch.randn(24, 8).bfloat16()
    result, expected = optimized.bfloat16()(x), model.bfloat16()(x)
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
    (block,) = optimized.report.blocks
    assert block.calls.kinds == 2 or block.calls.own, "another dtype is another kind of call"
