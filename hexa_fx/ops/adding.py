"""``hexa::estmm_add``, ``hexa::ess_add`` and ``hexa::esfk_add``: gradients of weights and biases added to a buffer.

The buffer has the accumulators' type, float32 (float64 for float64), so that a gradient is not rounded to the operands' type on its
way into a sum over micro-batches. The part of an expert without rows stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.ops import library, tiles
from hexa_fx.ops.rows import gather_rows
from hexa_fx.ops.table import Esfk, EsfkAdd, Ess, EssAdd, Estmm, EstmmAdd
from hexa_fx.ops.tiling import whole

estmm_add = library.wrapper("estmm_add")
ess_add = library.wrapper("ess_add", scale=None)
esfk_add = library.wrapper("esfk_add")


@library.kernel("estmm_add", "cpu")
def estmm_add_cpu(o: EstmmAdd) -> None:
    """CPU kernel."""
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    tile = whole(None, o.offs, 1, x)
    tiles.estmm_add(tile, o.into, tile.operand(x, None), tile.operand(g, None), False, False, o.layout)


@library.kernel("ess_add", "cpu")
def ess_add_cpu(o: EssAdd) -> None:
    """CPU kernel."""
    tile = whole(o.v, o.offs, o.top_k, o.g)
    tiles.ess_add(tile, o.into, tile.operand(o.g, o.v), o.v is not None, o.scale)


@library.kernel("esfk_add", "cpu")
def esfk_add_cpu(o: EsfkAdd) -> Tensor:
    """CPU kernel."""
    tile = whole(o.x_index, o.offs, o.top_k, o.x)
    rows = (tile.operand(o.x, o.x_index), tile.operand(o.g, None))
    return tile.padded(tiles.esfk_add(tile, o.into, o.into_bias, *rows, o.weight, o.x_index is not None, o.layout))


@library.kernel("estmm_add", "any")
def estmm_add_any(o: EstmmAdd) -> None:
    """Kernel for any device: torch adds the gradient, already rounded to the operands' type."""
    o.into.add_(torch.ops.hexa.estmm(*o.to(Estmm)))


@library.kernel("ess_add", "any")
def ess_add_any(o: EssAdd) -> None:
    """As `estmm_add_any`."""
    o.into.add_(torch.ops.hexa.ess(*o.to(Ess)))


@library.kernel("esfk_add", "any")
def esfk_add_any(o: EsfkAdd) -> Tensor:
    """As `estmm_add_any`."""
    dx, dw, db = torch.ops.hexa.esfk(*o.to(Esfk, has_bias=o.into_bias is not None))
    o.into.add_(dw)
    if o.into_bias is not None:
        o.into_bias.add_(db)
    return dx  # type: ignore[no-any-return]
