"""Products with factors of a few columns (LoRA).

``hexa::esmm_low_rank`` and its relatives add a second product in the same accumulator, ``x @ W^T + u @ C^T``, plain, before an
activation or before its gradient. ``hexa::low_rank_gradients`` has the gradients of such a factor and of its rows, and
``hexa::scaled_transpose`` brings factors from the memory order of PEFT, (N, r, E), and their gradients back. Of
`hexa::moe_ffn_sources`, which has the gradients: a low-rank addition to a weight is such a product with ``u = x A^T``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table import (
    ActivateBackward,
    Esmm,
    EsmmActBackwardLowRank,
    EsmmActLowRank,
    EsmmLowRank,
    LowRankGradients,
    ScaledTranspose,
)

_OPS = torch.ops.hexa


@library.kernel("esmm_low_rank", "any")
def esmm_composed(o: EsmmLowRank) -> Tensor:
    """Kernel for any device: two products."""
    y: Tensor = _OPS.esmm(*o.to(Esmm))
    return y.add_(_OPS.esmm(o.u, o.c, None, None, o.offs, 1, o.layout))


@library.kernel("esmm_act_low_rank", "any")
def esmm_act_composed(o: EsmmActLowRank) -> tuple[Tensor, Tensor]:
    """Kernel for any device: the products, then the activation."""
    h = esmm_composed(o.to(EsmmLowRank, weight=o.w1, bias=o.b1))
    if o.w3 is not None:
        h = torch.cat((h, esmm_composed(o.to(EsmmLowRank, weight=o.w3, bias=o.b3, c=o.c3))), dim=1)
    a = _OPS.activate(h, o.activation, o.glu, o.params)
    return (h if o.keep_h else h.new_empty((0, o.width))), a


@library.kernel("esmm_act_backward_low_rank", "any")
def esmm_act_backward_composed(o: EsmmActBackwardLowRank) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device: the products, then the activation's gradient."""
    da = esmm_composed(o.to(EsmmLowRank, x=o.dy))
    out: tuple[Tensor, Tensor, Tensor] = _OPS.activate_backward(*o.to(ActivateBackward, da=da))
    return out


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


scaled_transpose = library.wrapper("scaled_transpose", scale=1.0)


@library.kernel("scaled_transpose", "any")
def scaled_transpose_any(o: ScaledTranspose) -> Tensor:
    """Kernel for any device."""
    wide = torch.promote_types(accumulate_dtype(o.x.dtype), accumulate_dtype(o.dtype))
    factor = o.x if o.scale == 1 else o.x.to(wide) * o.scale
    return factor.t().to(o.dtype, memory_format=torch.contiguous_format).contiguous()
