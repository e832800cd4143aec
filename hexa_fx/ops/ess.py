"""``hexa::ess``: expert-specific summation (paper, Algorithm 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library, tiles
from hexa_fx.ops.rows import accumulate_dtype, expert_rows, invert, row_count
from hexa_fx.ops.tiling import output, whole

library.define("ess(Tensor g, Tensor? v, Tensor offs, SymInt top_k, Tensor? scale) -> Tensor")


def ess(g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None = None) -> Tensor:
    """Sum of the rows of each expert: the gradient of its bias (paper, Algorithm 3).

    Args:
        g: (T, C) gathered by v, or (n, C) in expert order when v is None.
        v: (n,) int32 of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 when v is None.
        scale: (T, k) or (n,) by slot: row p counts ``scale[v[p]]`` times. Needs v.

    Returns:
        (E, C) in g's dtype, summed in float32 (float64 for float64); zero for an expert without rows.

    Raises:
        InputError: the arguments do not fit together.
    """
    y: Tensor = torch.ops.hexa.ess(g, v, offs, top_k, scale)
    return y


def check(g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> None:
    """Checks the arguments of ess."""
    checks.check_floating("ess", ("g",), (g,))
    checks.check_index("ess", g, ("v", "offs"), (v, offs))
    checks.check_matrix("ess", "g", g)
    checks.check_rows("ess", "g", g, g.shape[1], v, top_k)
    if scale is None:
        return
    if v is None:
        raise InputError("hexa::ess: scale is by slot, so it needs v")
    if scale.numel() != v.shape[0] or scale.dtype not in checks.FLOATING:
        raise InputError(
            f"hexa::ess: scale is {checks.shape(scale)}; expected {v.shape[0]} floating-point numbers, one per slot"
        )
    if scale.device != g.device:
        raise InputError(f"hexa::ess: scale is on {scale.device}, g on {g.device}")


def ess_cpu(g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> Tensor:
    """CPU kernel."""
    tile = whole(v, offs, top_k, g)
    tiles.ess(tile, "db", tile.operand(g, v), v is not None, scale)
    return output(tile.tiling, "db")


def _fake(g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> Tensor:
    return g.new_empty((offs.shape[0] - 1, g.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, v, offs, top_k, scale = inputs
    ctx.save_for_backward(g if ctx.needs_input_grad[4] else None, v, offs, scale)
    ctx.static = (top_k, row_count(g, v))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    g, v, offs, scale = ctx.saved_tensors
    top_k, n = ctx.static
    rows = expert_rows(grad, offs, n)
    if v is None:
        return rows, None, None, None, None
    inv = invert(v)
    weights = None if scale is None else scale.reshape(-1, top_k)
    dg = torch.ops.hexa.combine(rows, weights, inv, offs, top_k) if ctx.needs_input_grad[0] else None
    if g is None:
        return dg, None, None, None, None
    wide = accumulate_dtype(grad.dtype)
    dots = (g.repeat_interleave(top_k, 0).to(wide) * rows.index_select(0, inv).to(wide)).sum(1)
    return dg, None, None, None, dots.view(scale.shape).to(scale.dtype)


library.register_fake("ess", _fake, check)
library.register_kernel("ess", "cpu", ess_cpu)
library.register_autograd("ess", _backward, _setup_context)
