"""Row products with packed weights on CUDA: few rows by a kernel that unpacks on its way, others by groups of unpacked experts.

What is fused with a product (a second one, an activation, its gradient) is so on Hopper; elsewhere it is operators of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.cuda import packed as few_rows
from hexa_fx.cuda.calls import falls_back
from hexa_fx.cuda.choosing import card_of
from hexa_fx.cuda.fallback import generic
from hexa_fx.cuda.gemm import DECODE_BUCKET, SM80_ONLY, esmm_segment, fused_segment
from hexa_fx.cuda.operands import Segment, contiguous
from hexa_fx.cuda.unpack import parts
from hexa_fx.ops.esmm_packed import EsmmPacked
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.low_rank import EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank
from hexa_fx.ops.operands import Esmm
from hexa_fx.ops.packed_products import EsmmActBackwardPacked, EsmmActPacked, EsmmPackedLowRank

_NARROWEST = 128
"""Columns of the narrowest tile of an activation's gradient."""

_RANKS = 8
"""What ranks of a fused second product are multiples of."""


@falls_back("esmm_packed")
def esmm_packed(*args: Any) -> Tensor:
    """See hexa_fx.ops.esmm_packed."""
    o = EsmmPacked(*args)
    product = _of_few_rows(o)
    if product is not None:
        return few_rows.esmm(product)
    y = o.x.new_empty((o.rows, o.columns))
    for part in parts(o):
        esmm_segment(part.product, into=Segment(y, part.rows, part.last))
    return y


@falls_back("esmm_packed_low_rank")
def esmm_packed_low_rank(*args: Any) -> Tensor:
    """See hexa_fx.ops.packed_products."""
    o, u, c = EsmmPackedLowRank.of(*args)
    if not _fuses(o, u):
        return generic("esmm_packed_low_rank")(*args)  # type: ignore[no-any-return]
    y, c = o.x.new_empty((o.rows, o.columns)), c.contiguous()
    for part in parts(o):
        fused_segment(EsmmLowRank(part.product, u, c[part.experts]), into=Segment(y, part.rows, part.last))
    return y


@falls_back("esmm_act_packed")
def esmm_act_packed(*args: Any) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.packed_products."""
    o = EsmmActPacked.of(*args)
    few = _of_few_rows(o.base)
    if few is not None and o.u is None:
        return few_rows.esmm_act(few._replace(base=o.with_weight(o.base.packed)))
    if few is not None or not _fuses(o.base, o.u, o.activation):
        return generic("esmm_act_packed")(*args)  # type: ignore[no-any-return]
    n, c = o.base.rows, contiguous(o.c)
    a = o.base.x.new_empty((n, o.inner))
    h = a.new_empty((n if o.keep_h else 0, o.base.columns))
    for part in parts(o.base):
        base = o.with_weight(part.product.weight)._replace(b1=part.product.bias, offs=part.product.offs)
        second = EsmmActLowRank(base, o.u, None if c is None else c[part.experts], None)  # type: ignore[arg-type]
        fused_segment(second, into=Segment(h, part.rows, part.last, a))
    return h, a


@falls_back("esmm_act_backward_packed")
def esmm_act_backward_packed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.packed_products."""
    o = EsmmActBackwardPacked(*args)
    if _of_few_rows(o.product) is not None or not _fuses(o.product, o.u, o.activation):
        return generic("esmm_act_backward_packed")(*args)  # type: ignore[no-any-return]
    n, inner, c = o.v.shape[0], o.product.columns, contiguous(o.c)
    dh, a = o.h.new_empty(o.h.shape), o.h.new_empty((n, inner))
    dots = o.h.new_zeros((-(-inner // _NARROWEST), n), dtype=torch.float32)
    for part in parts(o.product):
        base = o.with_weight(part.product.weight)._replace(offs=part.product.offs)
        second = EsmmActBackwardLowRank(base, o.u, None if c is None else c[part.experts])  # type: ignore[arg-type]
        fused_segment(second, into=Segment(dh, part.rows, part.last, a, dots))
    if o.top_k_weights is None:
        return dh, a, o.h.new_empty((0,))
    return dh, a, dots.sum(0).view(o.top_k_weights.shape).to(o.top_k_weights.dtype)


def _of_few_rows(o: EsmmPacked) -> few_rows.PackedProduct | None:
    """The product as the kernels for few rows see it; None where they do not take it."""
    format = few_rows.streamed(o.format, o.scales, o.layout)
    if format is None or is_fixed():
        return None
    base = Esmm(o.x, o.packed, o.bias, o.v, o.offs, o.top_k, "nk").plain
    found = few_rows.PackedProduct(base, o.scales[0], None, format)
    return None if few_rows.unsupported(found) else found


def _fuses(o: EsmmPacked, u: Tensor | None, activation: str = "none") -> bool:
    """Whether kernels of this card fuse what belongs to a product, are the ones for so many rows, and take this rank."""
    if u is not None and u.shape[1] % _RANKS:
        return False
    few = not is_fixed() and row_bucket(o.rows, o.offs.shape[0] - 1) <= DECODE_BUCKET
    return card_of(o.offs.device.index).is_hopper and not few and activation not in SM80_ONLY
