"""``hexa::esmm``: expert-specific matrix multiplication (paper, Algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import checks, library, tiles
from hexa_fx.ops.operands import Esmm
from hexa_fx.ops.rows import flip, invert
from hexa_fx.ops.tiling import whole

library.define(
    "esmm(Tensor x, Tensor weight, Tensor? bias, Tensor? v, Tensor offs, SymInt top_k, str layout) -> Tensor"
)


def esmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: str
) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]`` for every row p in expert order (paper, Algorithm 2).

    Args:
        x: (T, K) gathered by v, row p reads ``x[v[p] // top_k]``; or (n, K) in expert order when v is None.
        weight: (E, N, K) for layout ``nk``, (E, K, N) for ``kn``; any strides.
        bias: (E, N) or None.
        v: (n,) int32 of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 when v is None.
        layout: ``nk`` or ``kn``.

    Returns:
        (n, N) in x's dtype, accumulated in float32 (float64 for float64). Rows at and after ``offs[E]`` are zero.

    Raises:
        InputError: shapes, dtypes or devices do not fit together.
    """
    y: Tensor = torch.ops.hexa.esmm(x, weight, bias, v, offs, top_k, layout)
    return y


def check(*args: Any) -> None:
    """Checks shapes, dtypes and devices of the arguments."""
    o = Esmm(*args)
    checks.check_floating("esmm", ("x", "weight", "bias"), (o.x, o.weight, o.bias))
    checks.check_index("esmm", o.x, ("v", "offs"), (o.v, o.offs))
    experts, k, n = checks.check_weight("esmm", "weight", o.weight, o.layout, o.offs)
    checks.check_rows("esmm", "x", o.x, k, o.v, o.top_k)
    checks.check_bias("esmm", "bias", o.bias, experts, n)


def esmm_cpu(*args: Any) -> Tensor:
    """CPU kernel."""
    o = Esmm(*args)
    tile = whole(o.v, o.offs, o.top_k, o.x)
    return tile.padded(tiles.esmm(tile, tile.operand(o.x, o.v), o.weight, o.bias, o.v is not None, o.layout))


def fake(*args: Any) -> Tensor:
    """Empty results."""
    o = Esmm(*args)
    return o.x.new_empty((o.rows, o.columns))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, v, offs, top_k, layout = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, v, offs)
    ctx.static = (top_k, layout, bias is not None)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, v, offs = ctx.saved_tensors
    top_k, layout, _ = ctx.static
    dx, dw, db = projection_backward(x, g, weight, v, offs, top_k, layout, ctx.needs_input_grad[:3])
    return dx, dw, db, None, None, None, None


def projection_backward(
    x: Tensor | None,
    g: Tensor,
    weight: Tensor,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: str,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients (dx, dW, db) of one esmm, in the operators; each where ``needs`` asks for it. x is read for dW only."""
    ops = torch.ops.hexa
    dx = dw = db = None
    if needs[0] and needs[1]:
        dx, dw, db = ops.esfk(x, g, weight, v, offs, top_k, layout, needs[2])
    elif needs[0]:
        dx = ops.esmm(g, weight, None, None, offs, 1, flip(layout))
    elif needs[1]:
        dw = ops.estmm(x, g, v, None, offs, top_k, layout)
    if needs[2] and not (needs[0] and needs[1]):
        db = ops.ess(g, None, offs, 1, None)
    if dx is not None and v is not None:
        dx = ops.combine(dx, None, invert(v), offs, top_k)
    return dx, dw, db if needs[2] else None


library.register_fake("esmm", fake, check)
library.register_kernel("esmm", "cpu", esmm_cpu)
library.register_autograd("esmm", _backward, _setup_context)
library.register_autocast("esmm", cast=(0, 1, 2))
