"""``hexa::low_rank_gradients``: the gradients of ``y = u F^T``, F a factor of a few columns, of one reading of dy's rows.

It is `hexa_fx.ops.esfk` of such a weight (paper, "Fused Kernel in Backward"), with rows that may be gathered, and with the factor's
gradient as the factor is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ir import Layout
from hexa_fx.ops import checks, library
from hexa_fx.ops.rows import row_count

_OPS = torch.ops.hexa

library.define(
    "low_rank_gradients(Tensor rows, Tensor u, Tensor? factor, Tensor? top_k_weights, Tensor? v, Tensor offs, SymInt top_k, "
    "str layout, ScalarType dtype, float scale, bool experts_last) -> (Tensor du, Tensor dfactor)"
)


class LowRankGradients(NamedTuple):
    """Of `low_rank_gradients`."""

    rows: Tensor
    u: Tensor
    factor: Tensor | None
    top_k_weights: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout
    dtype: torch.dtype
    scale: float
    experts_last: bool


def low_rank_gradients(
    rows: Tensor,
    u: Tensor,
    factor: Tensor | None,
    top_k_weights: Tensor | None,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    dtype: torch.dtype,
    scale: float = 1.0,
    experts_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """``du[p] = rows[row(p)] @ F[e(p)]``, and ``dF[e] = scale * sum over its rows p of rows[row(p)]^T w_p u[p]``.

    Args:
        rows: (T, N) gathered by v, or (n, N) in expert order when that is None.
        u: (n, r), rows in expert order, r few.
        factor: F, (E, N, r) for layout ``kn``, (E, r, N) for ``nk``; None where du is not wanted.
        top_k_weights: w by slot, (T, k), that u's rows are multiplied by, and rounded; None for 1. Goes with v.
        v: (n,) int32 of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 when v is None.
        layout: of the factor and its gradient.
        dtype: of the gradient.
        scale: what the gradient is multiplied by.
        experts_last: the gradient of layout ``kn`` lies as (N, r, E), which is how PEFT stores some factors.

    Returns:
        du: (n, r); rows at and after ``offs[E]`` are zero. Shape (0,) without a factor.
        dF: as its layout says, or (N, r, E); contiguous.

    Raises:
        InputError: the arguments do not fit together.
    """
    du, df = _OPS.low_rank_gradients(rows, u, factor, top_k_weights, v, offs, top_k, layout, dtype, scale, experts_last)
    return du, df


def check(*args: Any) -> None:
    """Checks the arguments of low_rank_gradients."""
    o, name = LowRankGradients(*args), "low_rank_gradients"
    checks.check_floating(name, ("rows", "u", "factor"), (o.rows, o.u, o.factor))
    checks.check_index(name, o.rows, ("v", "offs"), (o.v, o.offs))
    checks.check_layout(name, o.layout)
    if o.rows.ndim != 2 or o.u.ndim != 2:
        raise InputError(f"hexa::{name}: rows are {checks.shape(o.rows)} and u {checks.shape(o.u)}; expected matrices")
    columns, rank = o.rows.shape[1], o.u.shape[1]
    checks.check_rows(name, "rows", o.rows, columns, o.v, o.top_k)
    if o.factor is not None and checks.check_weight(name, "factor", o.factor, o.layout, o.offs)[1:] != (columns, rank):
        raise InputError(
            f"hexa::{name}: factor {o.layout} is {checks.shape(o.factor)} for rows of {columns} columns and u of {rank}"
        )
    count = row_count(o.rows, o.v)
    if count != o.u.shape[0]:
        raise InputError(f"hexa::{name}: rows gives {count} rows and u {o.u.shape[0]}")
    if o.top_k_weights is not None and (o.v is None or o.top_k_weights.numel() != count):
        raise InputError(
            f"hexa::{name}: top_k_weights are {checks.shape(o.top_k_weights)}; expected {count} numbers, and v beside them"
        )
    if o.dtype not in checks.FLOATING or (o.experts_last and o.layout != "kn"):
        raise InputError(
            f"hexa::{name}: a gradient {o.layout} of {o.dtype}; expected one of {checks.FLOATING}, and kn to have experts last"
        )


def composed(*args: Any, by: Any = _OPS) -> tuple[Tensor, Tensor]:
    """Kernel for any device, by other operators: one reading of rows that are in order, two of gathered ones."""
    o = LowRankGradients(*args)
    rows, u = (o.v, o.offs, o.top_k), o.u
    if o.top_k_weights is not None and o.v is not None:
        u = torch.mul(u, o.top_k_weights.reshape(-1, 1).index_select(0, o.v)).to(u.dtype)
    if o.factor is not None and o.v is None and o.layout == "kn":
        du, df, _ = by.esfk(u, o.rows, o.factor, None, o.offs, 1, "nk", False)
    else:
        du = o.rows.new_empty((0,)) if o.factor is None else by.esmm(o.rows, o.factor, None, *rows, o.layout)
        sides = (o.rows, u, o.v, None) if o.layout == "nk" else (u, o.rows, None, o.v)
        df = by.estmm(*sides, o.offs, o.top_k, "nk")
    if not o.experts_last:
        cast = df.to(o.dtype)
        return du, cast if o.scale == 1 else torch.mul(cast, o.scale)
    experts, columns, rank = df.shape
    turned: Tensor = by.scaled_transpose(df.contiguous().view(experts, columns * rank), o.dtype, o.scale)
    return du, turned.view(columns, rank, experts)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    o = LowRankGradients(*args)
    experts, columns, rank = o.offs.shape[0] - 1, o.rows.shape[1], o.u.shape[1]
    shape = (experts, columns, rank) if o.layout == "kn" else (experts, rank, columns)
    du = o.u.new_empty((0,) if o.factor is None else o.u.shape)
    return du, o.rows.new_empty((*shape[1:], experts) if o.experts_last else shape, dtype=o.dtype)


library.register_fake("low_rank_gradients", _fake, check)
library.register_kernel("low_rank_gradients", "any", composed)
library.refuse_double_backward("low_rank_gradients")
library.register_autocast("low_rank_gradients", cast=(0, 1, 2))
