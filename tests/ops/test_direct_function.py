"""Autograd functions that skip torch's preparations for torch.func do what others do, and refuse transforms in torch's words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops.library import DirectFunction


class Doubled(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def test_it_is_an_autograd_function() -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = Doubled.apply(x, 2.0)
    assert type(y.grad_fn).__name__ == "DoubledBackward"
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        assert Doubled.apply(x, 2.0).grad_fn is None


def test_transforms_are_refused() -> None:
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.vmap(lambda x: Doubled.apply(x, 2.0))(torch.ones(2, 3))


def test_what_a_transform_left_over_has_the_same_values() -> None:
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.arange(3.0))
    assert torch.equal(Doubled.apply(kept[0], 2.0) + 0, torch.arange(3.0) * 2)
