"""``hexa::low_rank_gradients``: the gradients of ``y = u F^T``, F a factor of a few columns, of one reading of dy's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.table import LowRankGradients

low_rank_gradients = library.wrapper("low_rank_gradients", scale=1.0, experts_last=False)


@library.kernel("low_rank_gradients", "any")
def composed(o: LowRankGradients, by: Any = torch.ops.hexa) -> tuple[Tensor, Tensor]:
    """Kernel for any device, by other operators: one reading of rows that are in order, two of gathered ones."""
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
