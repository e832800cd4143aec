"""Projections and activations: ``hexa::esmm`` (paper, Algorithm 2), with the activation or its gradient in its epilogue
(``hexa::esmm_act``, ``hexa::esmm_act_backward``), and between two of them (``hexa::activate``, ``hexa::activate_backward``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import library, tiles
from hexa_fx.ops.activations import activation_backward, activation_forward
from hexa_fx.ops.listed import Listed, readable
from hexa_fx.ops.rows import accumulate_dtype, flip, invert, routed_rows
from hexa_fx.ops.table import Activate, ActivateBackward, Esmm, EsmmAct
from hexa_fx.ops.tiling import whole

esmm = library.wrapper("esmm")


@library.kernel("esmm", "cpu")
def esmm_cpu(o: Esmm) -> Tensor:
    """CPU kernel."""
    tile = whole(o.v, o.offs, o.top_k, o.x)
    return tile.padded(tiles.esmm(tile, o._replace(x=tile.operand(o.x, o.v))))


def keep_for_esmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None = None) -> None:
    """What backward needs."""
    o, needs = Esmm._make(inputs), Esmm.marks(ctx.needs_input_grad)
    ctx.save_for_backward(o.x if needs.weight else None, o.weight, o.v, o.offs)
    ctx.static = (o.top_k, o.layout)


def esmm_backward(ctx: Any, g: Tensor, saved: tuple[Any, ...] | None = None) -> tuple[Tensor | None, ...]:
    """Gradients of every argument. saved: what was kept, if it was asked for before."""
    x, weight, v, offs = saved or ctx.saved_tensors
    needs = Esmm.marks(ctx.needs_input_grad)
    wanted = needs.x, needs.weight, needs.bias
    dx, dw, db = projection_backward(wanted, x, g, weight, v, offs, *ctx.static)
    return Esmm.by_argument(x=dx, weight=dw, bias=db)


def projection_backward(
    needs: tuple[Any, Any, Any],
    x: Tensor | None,
    g: Tensor,
    weight: Any,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients (dx, dW, db) of one esmm, in the operators; each where ``needs`` asks for it. x is read for dW only.

    Where they are to be derived again they come from one operator each, since ``esfk`` is not derived. Kernels read listed weights.
    """
    ops: Any = torch.ops.hexa
    if type(weight) is Listed:
        ops, (weight,) = library.Kernels(g.device.type), readable((weight,), g.device.type)
    dx = dw = db = None
    of_x, of_weight, of_bias = needs
    if of_x and of_weight and not torch.is_grad_enabled():
        dx, dw, db = ops.esfk(x, g, weight, v, offs, top_k, layout, of_bias)
    else:
        if of_x:
            dx = ops.esmm(g, weight, None, None, offs, 1, flip(layout))
        if of_weight:
            dw = ops.estmm(x, g, v, None, offs, top_k, layout)
        if of_bias:
            db = ops.ess(g, None, offs, 1, None)
    if dx is not None and v is not None:
        dx = ops.combine(dx, None, invert(v), offs, top_k)
    return dx, dw, db if of_bias else None


library.register_autograd("esmm", esmm_backward, keep_for_esmm)


activate = library.wrapper("activate", params=())
activate_backward = library.wrapper("activate_backward", params=())


@library.kernel("activate", "cpu", "any")
def activate_generic(o: Activate) -> Tensor:
    """Kernel for any device, made of torch's own operators."""
    wide = o.h.to(accumulate_dtype(o.h.dtype))
    return activation_forward(wide, o.activation, o.glu, o.params).to(o.h.dtype)


@library.kernel("activate_backward", "cpu", "any")
def activate_backward_generic(o: ActivateBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device, made of torch's own operators."""
    da, h, top_k_weights, v, offs, activation, glu, params = o
    wide, da_wide = h.to(accumulate_dtype(h.dtype)), da.to(accumulate_dtype(h.dtype))
    a = activation_forward(wide, activation, glu, params)
    if top_k_weights is None:
        dh = activation_backward(da_wide, wide, activation, glu, params)
        return dh.to(h.dtype), a.to(h.dtype), h.new_empty(0)
    assert v is not None
    assert offs is not None
    routed = routed_rows(offs, h.shape[0])
    w = top_k_weights.reshape(-1).index_select(0, v).to(a.dtype).unsqueeze(1)
    w = torch.where(routed, w, 0)
    dots = (da_wide * a).sum(1, keepdim=True)
    dweights = torch.where(routed, dots, 0).index_select(0, invert(v)).view(top_k_weights.shape)
    dh = activation_backward(da_wide * w, wide, activation, glu, params)
    return dh.to(h.dtype), (a * w).to(h.dtype), dweights.to(top_k_weights.dtype)


def _keep_for_activate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, *ctx.static = inputs
    ctx.save_for_backward(h)


def _backward_of_activate(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
    (h,) = ctx.saved_tensors
    dh, _, _ = torch.ops.hexa.activate_backward(da, h, None, None, None, *ctx.static)
    return Activate.by_argument(h=dh)


library.register_autograd("activate", _backward_of_activate, _keep_for_activate)


esmm_act = library.wrapper("esmm_act", params=(), keep_h=True)


library.kernel("esmm_act", "cpu")(partial(tiles.at_once, "esmm_act"))


def _keep_for_esmm_act(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o = EsmmAct._make(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(o.x, o.w1, o.w3, o.v, o.offs, output[0])
    ctx.rows, ctx.steps = (o.top_k, o.layout), (o.activation, o.glu, o.params)
    if not o.keep_h:
        raise InputError("hexa::esmm_act: keep_h=False computes no gradient; use it under torch.no_grad()")


def _backward_of_esmm_act(ctx: Any, dh: Tensor | None, da: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w1, w3, v, offs, h = ctx.saved_tensors
    if da is not None:
        from_a, _, _ = torch.ops.hexa.activate_backward(da, h, None, None, None, *ctx.steps)
        dh = from_a if dh is None else dh + from_a
    if dh is None:
        return EsmmAct.by_argument()
    needs, rows = EsmmAct.marks(ctx.needs_input_grad), (v, offs, *ctx.rows)
    if w3 is None:
        dx, dw1, db1 = projection_backward((needs.x, needs.w1, needs.b1), x, dh, w1, *rows)
        return EsmmAct.by_argument(x=dx, w1=dw1, b1=db1)
    dgate, dup = dh.chunk(2, dim=1)
    dx, dw1, db1 = projection_backward((needs.x, needs.w1, needs.b1), x, dgate, w1, *rows)
    dx3, dw3, db3 = projection_backward((needs.x, needs.w3, needs.b3), x, dup, w3, *rows)
    dx = None if dx is None or dx3 is None else dx + dx3
    return EsmmAct.by_argument(x=dx, w1=dw1, b1=db1, w3=dw3, b3=db3)


library.register_autograd("esmm_act", _backward_of_esmm_act, _keep_for_esmm_act)


esmm_act_backward = library.wrapper("esmm_act_backward", params=())
