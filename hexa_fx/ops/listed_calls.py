"""Operators on listed weights (`hexa_fx.ops.listed`), called past torch's dispatcher, to which these are no tensors.

Where something else has to see the operators (a mode, a tracer, a tensor subclass), they get stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library, main_grad, moe_ffn_autograd
from hexa_fx.ops.library import DirectFunction
from hexa_fx.ops.listed import Listed, dense, readable, tensors_of
from hexa_fx.ops.main_grad import ListedGradients
from hexa_fx.ops.products import esmm_cpu, estmm_add_cpu, projection_backward
from hexa_fx.ops.table import Esmm, EssAdd, EstmmAdd
from hexa_fx.ops.table_layers import MoeFfn
from hexa_fx.ops.tiles import at_once
from hexa_fx.torch_private import (
    DisableTorchFunction,
    _AutoDispatchBelowAutograd,
    _get_current_function_mode_stack,
    _len_torch_function_stack,
    without_autocast,
)

_LAYERS = {name: partial(moe_ffn_autograd.listed, layer) for name, layer in moe_ffn_autograd.LAYERS.items()}


def layer(name: str, *args: Any) -> Any:
    """A layer's operator, of which some weights and biases are listed."""
    return run(name, _LAYERS[name], *args)


def esmm(*args: Any) -> Any:
    """`hexa::esmm` with a weight that is listed, and a bias, if any, that may be."""
    return run("esmm", _esmm, *args)


def _esmm(*args: Any) -> Any:
    o = Esmm._make(args)
    o.check("esmm")
    return _Esmm.apply(*o, *tensors_of(o))


TAKE_PARTS = frozenset({"moe_ffn", "moe_ffn_fixed"})
"""Layers that take gate and up as two weights, so that the stack of each may be no copy."""


def _apart(args: tuple[Any, ...]) -> Any:
    o: Any = MoeFfn._make(args)
    if type(o.w1) is not Listed or len(o.w1.sizes) == 1:
        return o
    (w1, w3), (b1, b3) = o.w1.pieces(), (None, None) if o.b1 is None else o.b1.pieces()
    return o._replace(w1=w1, b1=b1, w3=w3, b3=b3, glu="split")


def _is_watched() -> bool:
    """Whether a mode is to see functions of torch. A default device is one that need not see ours."""
    return _len_torch_function_stack() > 0 and any(
        type(mode).__module__ != "torch.utils._device" for mode in _get_current_function_mode_stack()
    )


def run(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function`` where nothing has to see the operator, else this on stacks."""
    first, *_ = args
    if Listed not in map(type, args):
        return library.overload(name)(*args)
    eager = all(value.eager for value in args if type(value) is Listed)
    others = [value for value in args if type(value) is not Listed]
    if eager and library.is_eager(others, cuda=True):
        return function(*args)
    if not eager or _is_watched():
        return library.overload(name)(*map(dense, _apart(args) if name in TAKE_PARTS else args))
    if torch.is_autocast_enabled(device := first.device.type):
        return library.under_autocast(name, device, partial(run, name, function), args)
    with DisableTorchFunction(), without_autocast():
        return function(*args) if library.is_unseen(others, cuda=True) else library.overload(name)(*map(dense, args))


class _Esmm(DirectFunction):
    """esmm by its kernels. Behind the operands come the tensors of those that are listed: of the weight, and of a bias perhaps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        o: Any = Esmm.split(args)[0]
        tensors, (needs, of_tensors) = o.weight.tensors, Esmm.split(ctx.needs_input_grad)
        ctx.needs, ctx.rows, ctx.layout = needs, o.top_k, o.layout
        ctx.of_weight, ctx.of_bias = of_tensors[: len(tensors)], of_tensors[len(tensors) :]
        ctx.weight, ctx.bias = o.weight.of([]), o.bias.of([]) if ctx.of_bias else None
        ctx.save_for_backward(o.x if any(ctx.of_weight) else None, o.v, o.offs, *tensors)
        with _AutoDispatchBelowAutograd():
            return library.kernel_for("esmm", "cuda")(*readable(o, "cuda")) if o.x.is_cuda else esmm_cpu(o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, v, offs, *tensors) = grads, ctx.saved_tensors
        weight, rows = ctx.weight.of(tensors), (v, offs, ctx.rows)
        needs = ctx.needs.x, any(ctx.of_weight), ctx.needs.bias or any(ctx.of_bias)
        if g.is_cuda or not library.is_plain_tensor(g):
            dx, dw, db = _from_stacks(needs, x, g, weight, *rows, ctx.layout)
            given = [
                *main_grad.shares("weight", weight, ctx.of_weight, dw),
                *main_grad.shares("bias", ctx.bias, ctx.of_bias, db),
            ]
            return *Esmm.by_argument(x=dx, bias=None if ctx.of_bias else db), *given
        into: Any = ListedGradients("weight", weight, ctx.of_weight)
        into_bias: Any = ListedGradients("bias", ctx.bias, ctx.of_bias) if ctx.of_bias else None
        with _AutoDispatchBelowAutograd():
            needs = needs[0], False, needs[2] and into_bias is None
            dx, _, db = projection_backward(needs, x, g, weight, *rows, ctx.layout)
            if any(ctx.of_weight):
                estmm_add_cpu(
                    EstmmAdd(into=into, x=x, g=g, x_index=v, g_index=None, offs=offs, top_k=ctx.rows, layout=ctx.layout)
                )
            if any(ctx.of_bias):
                at_once("ess_add", EssAdd(into=into_bias, g=g, v=None, offs=offs, top_k=1, scale=None))
        given = [*into.results(), *([] if into_bias is None else into_bias.results())]
        return *Esmm.by_argument(x=dx, bias=db), *given


def _from_stacks(
    needs: tuple[bool, bool, bool], x: Tensor, g: Tensor, weight: Listed, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of one esmm, those of weight and bias as stacks."""
    if not library.is_plain_tensor(g):
        return projection_backward(needs, x, g, weight.stack(), *rest)
    with _AutoDispatchBelowAutograd():
        return projection_backward(needs, x, g, weight, *rest)
