"""Products with packed weights on CUDA: few rows by a kernel that unpacks on its way (`hexa_fx.cuda.packed`), others by groups of
unpacked experts.

A group's matrices go into a buffer of at most 256 MiB, which the next group uses again. Its offsets are a part of all, so that a
grouped product runs on the group's rows and nothing is read back. What is fused with a product (a second one, an activation, its
gradient) is so on Hopper; elsewhere it is operators of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.family_unpack import UNPACK, VALUES_A_BLOCK
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda import packed as few_rows
from hexa_fx.cuda.calls import cuda_kernel, product
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.gemm import CUDA, esmm_segment, fused_segment
from hexa_fx.cuda.gemm_sm90 import ONLY_OTHERS
from hexa_fx.cuda.operands import DTYPES, Segment, contiguous, has_few_rows
from hexa_fx.cuda.packed import PackedProduct, Streamed, streamed
from hexa_fx.cuda.planning import launch, planning_of
from hexa_fx.cuda.rows import combine, reindex
from hexa_fx.formats import format_of
from hexa_fx.formats.blocks import Blocks
from hexa_fx.formats.format import Format, ceil_div
from hexa_fx.formats.four_bit import FourBit, Nf4Double
from hexa_fx.ops import projection
from hexa_fx.ops.esmm_packed import activated, differentiated, summed
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.table import Esmm, EsmmAct, routing_of
from hexa_fx.ops.table_layers import MoeFfnSources
from hexa_fx.ops.table_variants import EsmmActBackwardPacked, EsmmActPacked, EsmmLowRank, EsmmPacked, EsmmPackedLowRank

MOST_BYTES = 256 << 20
"""Of unpacked matrices at a time; one expert's if that is more."""

_CHUNK = 8


class ExpertGroup(NamedTuple):
    """Some experts of a packed weight.

    Args:
        product: the dense one of these experts.
        experts: which.
        rows: how many they have if all experts have the same.
        last: whether the last expert is one of them.
    """

    product: Esmm
    experts: slice
    rows: int
    last: bool

    def of(self, o: EsmmActPacked | EsmmActBackwardPacked, **more: Any) -> Any:
        """The dense record of these experts, of an operator that does more with the product."""
        own = o._replace(c=None if o.c is None else o.c[self.experts])
        return own.dense(self.product.weight)._replace(offs=self.product.offs, **more)


def parts(o: EsmmPacked) -> Iterator[ExpertGroup]:
    """A packed product as dense ones of some experts each. The next one's matrices take the place of those before it.

    Raises:
        Unsupported: the unpacking kernel does not take the weight.
    """
    format, (experts, rows, columns) = format_of(o.format), format_of(o.format).shape_of(o.packed)
    reason = _why_not_unpacked(format, o.packed, rows, columns)
    if reason:
        raise Unsupported(reason)
    scales = [scale.contiguous() for scale in o.scales]
    groups = list(_groups(experts, rows * columns * o.x.element_size()))
    buffer = o.x.new_empty((groups[0][1], rows, columns))
    for first, end in groups:
        matrices = buffer[: end - first]
        unpack(format, o.packed[first:end], [scale[first:end] for scale in scales], matrices)
        bias = None if o.bias is None else o.bias[first:end]
        product = o.to(Esmm, weight=matrices, bias=bias, offs=o.offs[first : end + 1])
        yield ExpertGroup(product, slice(first, end), ceil_div(o.rows * (end - first), experts), end == experts)


def _why_not_unpacked(format: Format, packed: Tensor, rows: int, columns: int) -> str:
    """Why the unpacking kernel does not take a weight; empty if it does."""
    if not packed.is_contiguous() or packed.data_ptr() % _CHUNK:
        return "the packed weight does not lie contiguously at a multiple of 8 bytes"
    if columns % _CHUNK if isinstance(format, Blocks) else rows * columns % _CHUNK:
        return f"rows of {columns} values; eight at a time are unpacked"
    return ""


def _groups(experts: int, expert_bytes: int) -> Iterator[tuple[int, int]]:
    """First expert and end of groups of as even a size as fits; the first is the largest."""
    count = ceil_div(experts * expert_bytes, MOST_BYTES)
    step = max(1, min(ceil_div(experts, max(count, 1)), MOST_BYTES // max(expert_bytes, 1)))
    return ((first, min(first + step, experts)) for first in range(0, experts, step))


def unpack(format: Format, packed: Tensor, scales: Sequence[Tensor], out: Tensor) -> None:
    """Writes the matrices of a packed weight to ``out`` (E, R, C), contiguous, in one launch; bits as the reference reads them.

    Args:
        packed, scales: contiguous but for the experts' dimension, which follows from the shapes.
    """
    scale, nested, offset, map = scales if isinstance(format, Nf4Double) else (scales[0], None, None, None)
    _unpack(Unpacking(packed, scale, nested, offset, map, format), into=out)


class Unpacking(NamedTuple):
    """A packed weight: its codes, what scales them, and the format."""

    packed: Tensor
    scale: Tensor
    nested: Tensor | None
    offset: Tensor | None
    map: Tensor | None
    format: Format


@product
def _unpack(o: Unpacking, into: Tensor) -> None:
    experts, rows, columns = into.shape
    values = rows * columns
    blocks = ceil_div(values, VALUES_A_BLOCK)
    code = o.format.values if isinstance(o.format, FourBit) else (0.0,) * 16
    nests = 0 if o.nested is None else o.nested.shape[1]
    spec = KernelSpec(UNPACK, UNPACK, planning_of(into).card.arch, dtype=DTYPES[into.dtype])
    spec = spec.with_options(format=o.format.name)
    pointers = {"packed": o.packed, "scale": o.scale, "nested": o.nested, "offset": o.offset, "map": o.map, "out": into}
    sizes = {"values": values, "columns": columns, "scales": o.scale[0].numel(), "nests": nests, "blocks": blocks}
    launch(into, spec, (experts * blocks, 1, 1), **pointers, **sizes, code=code)


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
        return summed(o, by=CUDA)
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
        return activated(o, by=CUDA)
    (h, a), o = o.results(), o._replace(c=contiguous(o.c))
    for part in parts(o):
        into = Segment(h, part.rows, part.last, a)
        fused_segment(part.of(o, b1=part.product.bias), into=into)
    return h, a


@cuda_kernel("esmm_act_backward_packed")
def esmm_act_backward_packed(o: EsmmActBackwardPacked) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.esmm_packed."""
    if _of_few_rows(o.product) is not None or not _fuses(o.product, o.u, o.activation):
        return differentiated(o, by=CUDA)
    (dh, a, dweights), o = o.results(), o._replace(c=contiguous(o.c))
    n, inner = a.shape
    dots = o.h.new_zeros((-(-inner // _NARROWEST), n), dtype=torch.float32)
    for part in parts(o.product):
        fused_segment(part.of(o), into=Segment(dh, part.rows, part.last, a, dots))
    if o.top_k_weights is None:
        return dh, a, dweights
    return dh, a, dots.sum(0).view(o.top_k_weights.shape).to(o.top_k_weights.dtype)


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


def streams(o: MoeFfnSources) -> bool:
    """Whether a call has so few rows an expert that packed weights are only streamed, and nothing is added to the first ones."""
    few = row_bucket(o.top_k_index.numel(), o.experts) <= few_rows.MOST_BUCKET
    return few and not is_fixed() and o.a1 is None and o.a3 is None and _first_format(o) is not None


def streamed_layer(o: MoeFfnSources) -> Tensor | None:
    """The result on operands, of four launches; None where the general path has to compute it."""
    format, alike = _first_format(o), o.w3 is None or (o.b1 is None) == (o.b3 is None)
    if format is None or not streams(o) or not alike:
        return None
    top_k = o.top_k
    v, _, offs = routing_of(o.top_k_index, o.experts)
    base = o.to(EsmmAct, v=v, offs=offs, top_k=top_k, layout=o.layout1, params=tuple(o.params), keep_h=False)
    first = PackedProduct(base, o.s1[0], None if o.w3 is None else o.s3[0], format)
    if few_rows.unsupported(first):
        return None
    v, inv, offs = reindex(o.top_k_index, o.experts)
    _, a = few_rows.esmm_act(first._replace(base=base._replace(v=v, offs=offs)))
    return combine(_down(o, a, None, offs, 1), o.top_k_weights, inv, offs, top_k)  # type: ignore[no-any-return]


def _down(o: MoeFfnSources, a: Tensor, *rows: Any) -> Tensor:
    """The second projection of rows in expert order."""
    name, added = "esmm", tuple[Any, ...]()
    weight: tuple[Any, ...] = (o.w2,)
    if o.formats[2] != DENSE:
        name, weight = "esmm_packed", (o.w2, o.s2, o.formats[2])
    if o.a2 is not None:
        u = projection.narrowed.on("cuda")(a, o.a2, *rows)
        added, name = (u, projection.left.on("cuda")(u, o.c2, o.alphas[2], o.layout2)), f"{name}_low_rank"
    return getattr(CUDA, name)(a, *weight, o.b2, *rows, o.layout2, *added)  # type: ignore[no-any-return]


def _first_format(o: MoeFfnSources) -> Streamed | None:
    """The format of the first projections, if kernels know it."""
    format = streamed(o.formats[0], o.s1, o.layout1)
    up = format if o.w3 is None else streamed(o.formats[1], o.s3, o.layout1)
    return format if up is format else None
