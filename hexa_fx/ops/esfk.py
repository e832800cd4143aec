"""``hexa::esfk``: the expert-specific fused kernel, the whole backward of one projection (paper, section 3.3)."""

from __future__ import annotations

from torch import Tensor

from hexa_fx.ops import library, tiles
from hexa_fx.ops.table import Esfk
from hexa_fx.ops.tiling import output, whole

esfk = library.wrapper("esfk")


@library.kernel("esfk", "cpu")
def esfk_cpu(o: Esfk) -> tuple[Tensor, Tensor, Tensor]:
    """CPU kernel."""
    tile = whole(o.x_index, o.offs, o.top_k, o.x)
    db_key = "db" if o.has_bias else None
    rows = (tile.operand(o.x, o.x_index), tile.operand(o.g, None))
    dx = tiles.esfk(tile, "dw", db_key, *rows, o.weight, o.x_index is not None, o.layout)
    db = output(tile.tiling, "db") if o.has_bias else o.g.new_empty(0)
    return tile.padded(dx), output(tile.tiling, "dw"), db
