"""``hexa::esfk``: the expert-specific fused kernel, the whole backward of one projection (paper, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library, tiles
from hexa_fx.ops.operands import Esfk
from hexa_fx.ops.rows import row_count
from hexa_fx.ops.tiling import output, whole

library.define(
    "esfk(Tensor x, Tensor g, Tensor weight, Tensor? x_index, Tensor offs, SymInt top_k, str layout, bool has_bias) "
    "-> (Tensor dx, Tensor dw, Tensor db)"
)


def esfk(
    x: Tensor, g: Tensor, weight: Tensor, x_index: Tensor | None, offs: Tensor, top_k: int, layout: str, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients of ``y = esmm(x, W, b)`` from g = dy, in one launch (paper, "Fused Kernel in Backward").

    Args:
        x: (T, K) gathered by x_index, or (n, K) in expert order when that is None.
        g: (n, N) in expert order.
        weight: (E, N, K) for layout ``nk``, (E, K, N) for ``kn``.
        x_index: (n,) int32, the v of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 when x_index is None.
        layout: that of weight and of dW.
        has_bias: compute db.

    Returns:
        dx: (n, K) in expert order, not yet summed over slots; rows at and after ``offs[E]`` are zero.
        dW: shaped as weight, contiguous.
        db: (E, N), or shape (0,) without bias.

    Raises:
        InputError: the arguments do not fit together.
    """
    dx, dw, db = torch.ops.hexa.esfk(x, g, weight, x_index, offs, top_k, layout, has_bias)
    return dx, dw, db


def check(*args: Any) -> None:
    """Checks the arguments of esfk."""
    o = Esfk(*args)
    checks.check_floating("esfk", ("x", "g", "weight"), (o.x, o.g, o.weight))
    checks.check_index("esfk", o.x, ("x_index", "offs"), (o.x_index, o.offs))
    _, k, n = checks.check_weight("esfk", "weight", o.weight, o.layout, o.offs)
    checks.check_rows("esfk", "x", o.x, k, o.x_index, o.top_k)
    checks.check_rows("esfk", "g", o.g, n)
    rows = row_count(o.x, o.x_index)
    if rows != o.g.shape[0]:
        raise InputError(f"hexa::esfk: x gives {rows} rows and g {o.g.shape[0]}")


def esfk_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """CPU kernel."""
    o = Esfk(*args)
    tile = whole(o.x_index, o.offs, o.top_k, o.x)
    db_key = "db" if o.has_bias else None
    rows = (tile.operand(o.x, o.x_index), tile.operand(o.g, None))
    dx = tiles.esfk(tile, "dw", db_key, *rows, o.weight, o.x_index is not None, o.layout)
    db = output(tile.tiling, "db") if o.has_bias else o.g.new_empty(0)
    return tile.padded(dx), output(tile.tiling, "dw"), db


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    o = Esfk(*args)
    db = o.g.new_empty((o.experts, o.g.shape[1]) if o.has_bias else (0,))
    return o.g.new_empty((o.g.shape[0], o.x.shape[1])), o.weight.new_empty(o.weight.shape), db


library.register_fake("esfk", _fake, check)
library.register_kernel("esfk", "cpu", esfk_cpu)
library.refuse_double_backward("esfk")
library.register_autocast("esfk", cast=(0, 1, 2))
