"""``hexa::low_rank_gradients``: both gradients of ``y = u C^T``, of one reading of the rows of dy.

It is `hexa_fx.ops.esfk` of a weight with a few columns (paper, "Fused Kernel in Backward"), with rows that may be gathered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library
from hexa_fx.ops.rows import row_count

_OPS = torch.ops.hexa

library.define(
    "low_rank_gradients(Tensor dy, Tensor u, Tensor c, Tensor? v, Tensor offs, SymInt top_k) -> (Tensor du, Tensor dc)"
)


class LowRankGradients(NamedTuple):
    """Of `low_rank_gradients`."""

    dy: Tensor
    u: Tensor
    c: Tensor
    v: Tensor | None
    offs: Tensor
    top_k: int


def low_rank_gradients(
    dy: Tensor, u: Tensor, c: Tensor, v: Tensor | None, offs: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """``du[p] = dy[row(p)] @ C[e(p)]`` and ``dC[e] = sum over its rows p of dy[row(p)]^T u[p]``.

    Args:
        dy: (T, N) gathered by v, or (n, N) in expert order when that is None.
        u: (n, r), rows in expert order, r few.
        c: (E, N, r).
        v: (n,) int32 of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 when v is None.

    Returns:
        du: (n, r); rows at and after ``offs[E]`` are zero.
        dC: (E, N, r), contiguous.

    Raises:
        InputError: the arguments do not fit together.
    """
    du, dc = _OPS.low_rank_gradients(dy, u, c, v, offs, top_k)
    return du, dc


def check(*args: Any) -> None:
    """Checks the arguments of low_rank_gradients."""
    o, name = LowRankGradients(*args), "low_rank_gradients"
    checks.check_floating(name, ("dy", "u", "c"), (o.dy, o.u, o.c))
    checks.check_index(name, o.dy, ("v", "offs"), (o.v, o.offs))
    _, rank, columns = checks.check_weight(name, "c", o.c, "nk", o.offs)
    checks.check_rows(name, "dy", o.dy, columns, o.v, o.top_k)
    checks.check_rows(name, "u", o.u, rank)
    rows = row_count(o.dy, o.v)
    if rows != o.u.shape[0]:
        raise InputError(f"hexa::{name}: dy gives {rows} rows and u {o.u.shape[0]}")


def composed(*args: Any) -> tuple[Tensor, Tensor]:
    """Kernel for any device: one reading of rows that are in order, two of gathered ones."""
    o = LowRankGradients(*args)
    if o.v is None:
        du, dc, _ = _OPS.esfk(o.u, o.dy, o.c, None, o.offs, 1, "nk", False)
        return du, dc
    rows = (o.v, o.offs, o.top_k)
    return _OPS.esmm(o.dy, o.c, None, *rows, "kn"), _OPS.estmm(o.u, o.dy, None, *rows, "nk")


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    o = LowRankGradients(*args)
    return o.u.new_empty(o.u.shape), o.c.new_empty(o.c.shape)


library.register_fake("low_rank_gradients", _fake, check)
library.register_kernel("low_rank_gradients", "any", composed)
library.refuse_double_backward("low_rank_gradients")
library.register_autocast("low_rank_gradients", cast=(0, 1, 2))
