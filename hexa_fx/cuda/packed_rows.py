"""Row products with packed weights on CUDA: few rows by a kernel that unpacks on its way, others by groups of unpacked experts.

What is fused with a product (a second one, an activation, its gradient) is so on Hopper; elsewhere it is operators of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.cuda import packed as few_rows
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.gemm import esmm_segment, fused_segment, with_second
from hexa_fx.cuda.gemm_sm90 import ONLY_OTHERS
from hexa_fx.cuda.operands import Segment, contiguous, has_few_rows
from hexa_fx.cuda.planning import planning_of
from hexa_fx.cuda.rows import activate, activate_backward
from hexa_fx.cuda.unpack import parts
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.table import Activate, ActivateBackward, Esmm
from hexa_fx.ops.table_variants import EsmmActBackwardPacked, EsmmActPacked, EsmmLowRank, EsmmPacked, EsmmPackedLowRank

_NARROWEST = 128
"""Columns of the narrowest tile of an activation's gradient."""

_RANKS = 8
"""What ranks of a fused second product are multiples of."""


@cuda_kernel("esmm_packed")
def esmm_packed(o: EsmmPacked) -> Tensor:
    """See hexa_fx.ops.esmm_packed."""
    product = _of_few_rows(o)
    if product is not None:
        return few_rows.esmm(product)
    y: Tensor = o.results()
    for part in parts(o):
        esmm_segment(part.product, into=Segment(y, part.rows, part.last))
    return y


@cuda_kernel("esmm_packed_low_rank")
def esmm_packed_low_rank(o: EsmmPackedLowRank) -> Tensor:
    """See hexa_fx.ops.esmm_packed."""
    if not _fuses(o, o.u):
        return with_second(esmm_packed(*o.to(EsmmPacked)), o.u, o.c, o.offs, o.layout)
    y, c = o.results(), o.c.contiguous()
    for part in parts(o):
        fused_segment(part.product.to(EsmmLowRank, u=o.u, c=c[part.experts]), into=Segment(y, part.rows, part.last))
    return y  # type: ignore[no-any-return]


@cuda_kernel("esmm_act_packed")
def esmm_act_packed(o: EsmmActPacked) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.esmm_packed."""
    few = _of_few_rows(o)
    if few is not None and o.u is None:
        return few_rows.esmm_act(few._replace(base=o.dense(o.packed)))
    if few is not None or not _fuses(o, o.u, o.activation):
        h = _composed(o, o.u, o.c)
        return (h if o.keep_h else h.new_empty((0, h.shape[1]))), activate(*o.to(Activate, h=h))
    (h, a), o = o.results(), o._replace(c=contiguous(o.c))
    for part in parts(o):
        into = Segment(h, part.rows, part.last, a)
        fused_segment(part.of(o, b1=part.product.bias), into=into)
    return h, a


@cuda_kernel("esmm_act_backward_packed")
def esmm_act_backward_packed(o: EsmmActBackwardPacked) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.esmm_packed."""
    if _of_few_rows(o.product) is not None or not _fuses(o.product, o.u, o.activation):
        da = _composed(o.product, o.u, o.c)
        return activate_backward(*o.to(ActivateBackward, da=da))
    (dh, a, dweights), o = o.results(), o._replace(c=contiguous(o.c))
    n, inner = a.shape
    dots = o.h.new_zeros((-(-inner // _NARROWEST), n), dtype=torch.float32)
    for part in parts(o.product):
        fused_segment(part.of(o), into=Segment(dh, part.rows, part.last, a, dots))
    if o.top_k_weights is None:
        return dh, a, dweights
    return dh, a, dots.sum(0).view(o.top_k_weights.shape).to(o.top_k_weights.dtype)


def _composed(o: EsmmPacked, u: Tensor | None, c: Tensor | None) -> Tensor:
    """The product, and what is added to it, in an operator of their own each."""
    if u is None:
        return esmm_packed(*o.to(EsmmPacked))
    return with_second(esmm_packed(*o.to(EsmmPacked)), u, c, o.offs, o.layout)


def _of_few_rows(o: EsmmPacked) -> few_rows.PackedProduct | None:
    """The product as the kernels for few rows see it; None where they do not take it."""
    format = few_rows.streamed(o.format, o.scales, o.layout)
    if format is None or is_fixed():
        return None
    base = o.to(Esmm, weight=o.packed).plain
    found = few_rows.PackedProduct(base, o.scales[0], None, format)
    return None if few_rows.unsupported(found) else found


def _fuses(o: EsmmPacked, u: Tensor | None, activation: str = "none") -> bool:
    """Whether kernels of this card fuse what belongs to a product, are the ones for so many rows, and take this rank."""
    if u is not None and u.shape[1] % _RANKS:
        return False
    few = has_few_rows(o.rows, o.offs)
    return planning_of(o.offs).card.is_hopper and not few and activation not in ONLY_OTHERS
