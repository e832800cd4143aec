"""``hexa::esfk``: the expert-specific fused kernel, the whole backward of one projection (paper, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library, tiles
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


def check(
    x: Tensor, g: Tensor, weight: Tensor, x_index: Tensor | None, offs: Tensor, top_k: int, layout: str, has_bias: bool
) -> None:
    """Checks the arguments of esfk."""
    checks.check_floating("esfk", ("x", "g", "weight"), (x, g, weight))
    checks.check_index("esfk", x, ("x_index", "offs"), (x_index, offs))
    _, k, n = checks.check_weight("esfk", "weight", weight, layout, offs)
    checks.check_rows("esfk", "x", x, k, x_index, top_k)
    checks.check_rows("esfk", "g", g, n)
    rows = (x if x_index is None else x_index).shape[0]
    if rows != g.shape[0]:
        raise InputError(f"hexa::esfk: x gives {rows} rows and g {g.shape[0]}")


def esfk_cpu(
    x: Tensor, g: Tensor, weight: Tensor, x_index: Tensor | None, offs: Tensor, top_k: int, layout: str, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """CPU kernel."""
    tile = whole(x_index, offs, top_k, x)
    db_key = "db" if has_bias else None
    g_rows = tile.operand(g, None)
    dx = tiles.esfk(tile, "dw", db_key, tile.operand(x, x_index), g_rows, weight, x_index is not None, layout)
    db = output(tile.tiling, "db") if has_bias else g.new_empty(0)
    return tile.padded(dx), output(tile.tiling, "dw"), db


def _fake(
    x: Tensor, g: Tensor, weight: Tensor, x_index: Tensor | None, offs: Tensor, top_k: int, layout: str, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    db = g.new_empty((weight.shape[0], g.shape[1]) if has_bias else (0,))
    return g.new_empty((g.shape[0], x.shape[1])), weight.new_empty(weight.shape), db


library.register_fake("esfk", _fake, check)
library.register_kernel("esfk", "cpu", esfk_cpu)
library.refuse_double_backward("esfk")
library.register_autocast("esfk", cast=(0, 1, 2))
