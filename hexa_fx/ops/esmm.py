"""``hexa::esmm``: expert-specific matrix multiplication (paper, Algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library, tiles
from hexa_fx.ops.rows import flip, invert
from hexa_fx.ops.table import Esmm
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


def esmm_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of every argument."""
    x, weight, v, offs = ctx.saved_tensors
    needs = Esmm.marks(ctx.needs_input_grad)
    wanted = needs.x, needs.weight, needs.bias
    dx, dw, db = projection_backward(wanted, x, g, weight, v, offs, *ctx.static)
    return Esmm.by_argument(x=dx, weight=dw, bias=db)


def projection_backward(
    needs: tuple[Any, Any, Any],
    x: Tensor | None,
    g: Tensor,
    weight: Tensor,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients (dx, dW, db) of one esmm, in the operators; each where ``needs`` asks for it. x is read for dW only."""
    ops = torch.ops.hexa
    dx = dw = db = None
    of_x, of_weight, of_bias = needs
    if of_x and of_weight:
        dx, dw, db = ops.esfk(x, g, weight, v, offs, top_k, layout, of_bias)
    elif of_x:
        dx = ops.esmm(g, weight, None, None, offs, 1, flip(layout))
    elif of_weight:
        dw = ops.estmm(x, g, v, None, offs, top_k, layout)
    if of_bias and not (of_x and of_weight):
        db = ops.ess(g, None, offs, 1, None)
    if dx is not None and v is not None:
        dx = ops.combine(dx, None, invert(v), offs, top_k)
    return dx, dw, db if of_bias else None


library.register_autograd("esmm", esmm_backward, keep_for_esmm)
