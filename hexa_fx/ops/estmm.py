"""``hexa::estmm``: expert-specific transposed matrix multiplication (paper, Algorithm 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library, tiles
from hexa_fx.ops.operands import Estmm
from hexa_fx.ops.rows import flip, gather_rows, invert, row_count
from hexa_fx.ops.tiling import output, whole

library.define(
    "estmm(Tensor x, Tensor g, Tensor? x_index, Tensor? g_index, Tensor offs, SymInt top_k, str layout) -> Tensor"
)


def estmm(
    x: Tensor, g: Tensor, x_index: Tensor | None, g_index: Tensor | None, offs: Tensor, top_k: int, layout: str
) -> Tensor:
    """``dW[e]``, the sum of ``x[row]^T g[row]`` over the rows of expert e: a weight's gradient (paper, Algorithm 4).

    Args:
        x: (T, K) gathered by x_index, or (n, K) in expert order when that is None.
        g: (T, N) gathered by g_index, or (n, N) in expert order when that is None.
        x_index, g_index: (n,) int32, the v of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token, for the gathered operands.
        layout: of the result, that of the weight.

    Returns:
        (E, N, K) for ``nk``, (E, K, N) for ``kn``, contiguous, in x's dtype; zero for an expert without rows.

    Raises:
        InputError: the arguments do not fit together.
    """
    y: Tensor = torch.ops.hexa.estmm(x, g, x_index, g_index, offs, top_k, layout)
    return y


def check(*args: Any) -> None:
    """Checks the arguments of estmm."""
    o = Estmm(*args)
    checks.check_floating("estmm", ("x", "g"), (o.x, o.g))
    checks.check_index("estmm", o.x, ("x_index", "g_index", "offs"), (o.x_index, o.g_index, o.offs))
    checks.check_layout("estmm", o.layout)
    for name, t, index in (("x", o.x, o.x_index), ("g", o.g, o.g_index)):
        checks.check_matrix("estmm", name, t)
        checks.check_rows("estmm", name, t, t.shape[1], index, o.top_k)
    of_g = row_count(o.g, o.g_index)
    if o.rows != of_g:
        raise InputError(f"hexa::estmm: x gives {o.rows} rows and g {of_g}")


def estmm_cpu(*args: Any) -> Tensor:
    """CPU kernel."""
    o = Estmm(*args)
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    tile = whole(None, o.offs, 1, x)
    tiles.estmm(tile, "dw", tile.operand(x, None), tile.operand(g, None), False, False, o.layout)
    return output(tile.tiling, "dw")


def _fake(*args: Any) -> Tensor:
    o = Estmm(*args)
    size = (o.g.shape[1], o.x.shape[1]) if o.layout == "nk" else (o.x.shape[1], o.g.shape[1])
    return o.x.new_empty((o.experts, *size))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.static = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, g, x_index, g_index, offs = ctx.saved_tensors
    top_k, layout = ctx.static
    dx = dg = None
    if ctx.needs_input_grad[0]:
        rows = torch.ops.hexa.esmm(g, grad, None, g_index, offs, top_k if g_index is not None else 1, flip(layout))
        dx = rows if x_index is None else torch.ops.hexa.combine(rows, None, invert(x_index), offs, top_k)
    if ctx.needs_input_grad[1]:
        rows = torch.ops.hexa.esmm(x, grad, None, x_index, offs, top_k if x_index is not None else 1, layout)
        dg = rows if g_index is None else torch.ops.hexa.combine(rows, None, invert(g_index), offs, top_k)
    return dx, dg, None, None, None, None, None


library.register_fake("estmm", _fake, check)
library.register_kernel("estmm", "cpu", estmm_cpu)
library.register_autograd("estmm", _backward, _setup_context)
library.register_autocast("estmm", cast=(0, 1))
