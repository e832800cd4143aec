"""Operators that others write in Python: read like the code that they are, and calls where they stay, with their own backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.torch_private import DisableTorchFunction
from tests.detect.test_functions import around
from tests.zoo.agree import agree, tokens
from tests.zoo.library_styles import AddedByOperator
from tests.zoo.variant import D


def operator(name: str, code: Callable[..., torch.Tensor], backward: Callable[..., Any] | None, **options: Any) -> Any:
    """An operator of one tensor."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        return code(x)

    made = torch.library.custom_op(f"hexa_fx_tests::{name}", compute, mutates_args=(), **options)
    if backward is not None:
        made.register_autograd(backward)
    return made


DOUBLE = operator("double", lambda x: 2 * x, lambda ctx, gradient: 2 * gradient)
TRIPLED = operator("tripled_backward", lambda x: 2 * x, lambda ctx, gradient: 3 * gradient)
STRAIGHT = operator("straight", lambda x: (x * 8).round() / 8, lambda ctx, gradient: gradient)
WITHOUT = operator("without_backward", lambda x: 2 * x, None)
BY_NUMPY = operator("by_numpy", lambda x: torch.from_numpy(2 * x.numpy()), lambda ctx, gradient: 2 * gradient)
ON_CPU = operator("on_cpu", lambda x: 2 * x, lambda ctx, gradient: 2 * gradient, device_types="cpu")


def _unseen(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    with DisableTorchFunction():  # as a kernel that is launched
        out.copy_(2 * x)
    return out


DECIDES = operator("decides", lambda x: 2 * x if bool((x > 0).any()) else x + x, lambda ctx, gradient: 2 * gradient)
UNSEEN = operator("unseen", _unseen, lambda ctx, gradient: 2 * gradient)


@torch.library.custom_op("hexa_fx_tests::halve_", mutates_args={"x"})
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("hexa_fx_tests::parts", mutates_args=())
def parts(x: torch.Tensor, by: float = 0.25, *, also: bool = True) -> list[torch.Tensor]:
    return [x * by, x * (1 - by) if also else torch.zeros_like(x)]


def _of_parts(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.by = inputs[1], 1 - inputs[1] if keyword_only_inputs["also"] else 0.0


def _from_parts(ctx: Any, gradients: Any) -> Any:
    return gradients[0] * ctx.by[0] + gradients[1] * ctx.by[1], None


parts.register_autograd(_from_parts, setup_context=_of_parts)


def _optimized(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = kind().to(dtype)
    return block, hexa_fx.optimize(block, tokens(2, 7).to(dtype), hexa_fx.HexaConfig(own_code_when_small=False))


READ = {
    "its code is read": around(one_output=lambda self, y: DOUBLE(y)),
    "by its packet": around(one_output=lambda self, y: torch.ops.hexa_fx_tests.double(y)),
    "of one kind of device": around(one_output=lambda self, y: ON_CPU(y)),
    "several results": around(one_output=lambda self, y: sum(parts(y, 0.75, also=True))),
    "in the weights": around(weights=lambda self, weights: DOUBLE(weights)),
    "in the weights, straight": around(weights=lambda self, weights: STRAIGHT(weights)),
    "on tokens, its own backward": around(tokens=lambda self, x: TRIPLED(x)),
    "on the output, its own backward": around(output=lambda self, y, loss: TRIPLED(y)),
    "on one expert's output, what nobody reads": around(one_output=lambda self, y: BY_NUMPY(y)),
    "on the output, what nobody reads": around(output=lambda self, y, loss: BY_NUMPY(y)),
    "on the output, which it decides on": around(output=lambda self, y, loss: DECIDES(y)),
    "written where nobody sees it": around(tokens=lambda self, x: UNSEEN(x)),
}


@pytest.mark.parametrize("kind", READ.values(), ids=READ)
def test_rewritten_and_equal(kind: type[nn.Module]) -> None:
    block, optimized = _optimized(kind)
    assert optimized.report.rewritten, optimized.report
    agree(block, optimized, tokens(2, 7), tokens(3, 5))
    agree(block, copy.deepcopy(optimized), tokens(3, 5))
    assert optimized.report.blocks[0].calls.rewritten


REFUSED = {
    "another backward than its code's": (around(one_output=lambda self, y: TRIPLED(y)), "differs"),
    "a backward straight through": (around(one_output=lambda self, y: STRAIGHT(y)), "differs"),
}


@pytest.mark.parametrize(("kind", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(kind: type[nn.Module], sentence: str) -> None:
    report = _optimized(kind)[1].report
    assert not report.rewritten
    assert sentence in str(report), report


def test_where_its_backward_is_missing_results_are_equal() -> None:
    block, optimized = _optimized(around(one_output=lambda self, y: WITHOUT(y)))
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


def test_writing_operators() -> None:
    def halved(self: nn.Module, y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        halve_(y)
        return y

    block, optimized = _optimized(around(output=lambda self, y, loss: halved(self, y)))
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_other_types_and_under_autocast(dtype: torch.dtype) -> None:
    block, optimized = _optimized(AddedByOperator, dtype)
    assert optimized.report.rewritten, optimized.report
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for x in (torch.randn(3, 5, D).to(dtype), torch.randn(1, 1, D).to(dtype)):
        results = []
        for model in (block, optimized):
            own = x.clone().requires_grad_()
            loss = model(own).double().square().sum()
            results.append([loss.detach(), *torch.autograd.grad(loss, [own, *model.parameters()], allow_unused=True)])
        for one, other in zip(*results):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(
                    other.double(), one.double(), rtol=bound, atol=bound * float(one.abs().max())
                )
    assert optimized.report.blocks[0].calls.rewritten == 2
