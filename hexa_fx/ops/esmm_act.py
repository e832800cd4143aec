"""``hexa::esmm_act`` and ``hexa::esmm_act_backward``: projections with the activation, or its gradient, in their epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import library, tiles
from hexa_fx.ops.esmm import projection_backward
from hexa_fx.ops.table import EsmmAct, EsmmActBackward
from hexa_fx.ops.tiling import output, whole

esmm_act = library.wrapper("esmm_act", params=(), keep_h=True)


@library.kernel("esmm_act", "cpu")
def esmm_act_cpu(o: EsmmAct) -> tuple[Tensor, Tensor]:
    """CPU kernel."""
    tile = whole(o.v, o.offs, o.top_k, o.x)
    a = tiles.esmm_act(tile, o._replace(x=tile.operand(o.x, o.v)), "h" if o.keep_h else None)
    return output(tile.tiling, "h") if o.keep_h else o.x.new_empty((0, o.width)), tile.padded(a)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o = EsmmAct._make(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(o.x, o.w1, o.w3, o.v, o.offs, output[0])
    ctx.rows, ctx.steps = (o.top_k, o.layout), (o.activation, o.glu, o.params)
    if not o.keep_h:
        raise InputError("hexa::esmm_act: keep_h=False computes no gradient; use it under torch.no_grad()")


def _backward(ctx: Any, dh: Tensor | None, da: Tensor | None) -> tuple[Tensor | None, ...]:
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


library.register_autograd("esmm_act", _backward, _setup_context)


esmm_act_backward = library.wrapper("esmm_act_backward", params=())


@library.kernel("esmm_act_backward", "cpu", "any")
def _composed(o: EsmmActBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel of every device: the two operators it stands for."""
    device = o.dy.device.type
    da = library.kernel_for("esmm", device)(o.dy, o.weight, None, o.v, o.offs, o.top_k, o.layout)
    out: tuple[Tensor, Tensor, Tensor] = library.kernel_for("activate_backward", device)(
        da, o.h, o.top_k_weights, o.v, o.offs, o.activation, o.glu, o.params
    )
    return out
