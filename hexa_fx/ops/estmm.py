"""``hexa::estmm``: expert-specific transposed matrix multiplication (paper, Algorithm 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library, tiles
from hexa_fx.ops.rows import flip, gather_rows, invert
from hexa_fx.ops.table import Estmm
from hexa_fx.ops.tiling import output, whole

estmm = library.wrapper("estmm")


@library.kernel("estmm", "cpu")
def estmm_cpu(o: Estmm) -> Tensor:
    """CPU kernel."""
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    tile = whole(None, o.offs, 1, x)
    tiles.estmm(tile, "dw", tile.operand(x, None), tile.operand(g, None), False, False, o.layout)
    return output(tile.tiling, "dw")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, top_k, layout = inputs
    ctx.save_for_backward(*tensors)
    ctx.static = (top_k, layout)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, g, x_index, g_index, offs = ctx.saved_tensors
    top_k, layout = ctx.static
    needs = Estmm.marks(ctx.needs_input_grad)
    dx = dg = None
    if needs.x:
        rows = torch.ops.hexa.esmm(g, grad, None, g_index, offs, top_k if g_index is not None else 1, flip(layout))
        dx = rows if x_index is None else torch.ops.hexa.combine(rows, None, invert(x_index), offs, top_k)
    if needs.g:
        rows = torch.ops.hexa.esmm(x, grad, None, x_index, offs, top_k if x_index is not None else 1, layout)
        dg = rows if g_index is None else torch.ops.hexa.combine(rows, None, invert(g_index), offs, top_k)
    return Estmm.by_argument(x=dx, g=dg)


library.register_autograd("estmm", _backward, _setup_context)
