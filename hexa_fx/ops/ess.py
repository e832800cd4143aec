"""``hexa::ess``: expert-specific summation (paper, Algorithm 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library, tiles
from hexa_fx.ops.rows import accumulate_dtype, expert_rows, invert, row_count
from hexa_fx.ops.table import Ess
from hexa_fx.ops.tiling import output, whole

ess = library.wrapper("ess", scale=None)


@library.kernel("ess", "cpu")
def ess_cpu(o: Ess) -> Tensor:
    """CPU kernel."""
    tile = whole(o.v, o.offs, o.top_k, o.g)
    tiles.ess(tile, "db", tile.operand(o.g, o.v), o.v is not None, o.scale)
    return output(tile.tiling, "db")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    o, needs = Ess._make(inputs), Ess.marks(ctx.needs_input_grad)
    ctx.save_for_backward(o.g if needs.scale else None, o.v, o.offs, o.scale)
    ctx.static = (o.top_k, row_count(o.g, o.v))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    g, v, offs, scale = ctx.saved_tensors
    top_k, n = ctx.static
    rows = expert_rows(grad, offs, n)
    if v is None:
        return Ess.by_argument(g=rows)
    inv = invert(v)
    weights = None if scale is None else scale.reshape(-1, top_k)
    dg = torch.ops.hexa.combine(rows, weights, inv, offs, top_k) if Ess.marks(ctx.needs_input_grad).g else None
    if g is None:
        return Ess.by_argument(g=dg)
    wide = accumulate_dtype(grad.dtype)
    dots = (g.repeat_interleave(top_k, 0).to(wide) * rows.index_select(0, inv).to(wide)).sum(1)
    return Ess.by_argument(g=dg, scale=dots.view(scale.shape).to(scale.dtype))


library.register_autograd("ess", _backward, _setup_context)
