"""Products with packed weights on CUDA: few rows by the family packed_gemm, which unpacks on the way to the tensor cores, others by
groups of unpacked experts.

With few rows an expert a product only streams weights, and packed ones are a quarter or half of the bytes. With more rows the
same weights would be unpacked again for each eight of them (`unsupported`). Then a group's matrices go into a buffer of at most
256 MiB, which the next group uses again. Its offsets are a part of all, so that a grouped product runs on the group's rows and
nothing is read back. What is fused with a product (a second one, an activation, its gradient) is so on Hopper; elsewhere it is
operators of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen import family_packed as family
from hexa_fx.codegen.family import get_family
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.family_unpack import UNPACK, VALUES_A_BLOCK
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.choosing import card_of
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.gemm import CUDA, esmm_segment, fused_segment
from hexa_fx.cuda.gemm_sm80 import divisor
from hexa_fx.cuda.gemm_sm90 import ONLY_OTHERS
from hexa_fx.cuda.operands import DTYPES, Segment, aligned, constants_of, contiguous, dense_rows, has_few_rows
from hexa_fx.cuda.planning import Operand, launch, planning_of
from hexa_fx.cuda.product import ProductKey, Tiles
from hexa_fx.cuda.rows import combine, reindex
from hexa_fx.formats import FORMATS, format_of
from hexa_fx.formats.blocks import Blocks
from hexa_fx.formats.format import Format, ceil_div
from hexa_fx.formats.four_bit import FourBit, Nf4Double
from hexa_fx.ops import projection
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.products import activated, differentiated, summed
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.table import Esmm, EsmmAct, routing_of
from hexa_fx.ops.table_layers import MoeFfnSources
from hexa_fx.ops.table_variants import EsmmActBackwardPacked, EsmmActPacked, EsmmLowRank, EsmmPacked, EsmmPackedLowRank


class PackedTiles(Tiles):
    """Of packed_gemm."""

    kind = family.PackedTile

    def rule(self, key: ProductKey) -> family.PackedTile:
        converted = family.converts(key.kernel.arch, key.kernel.option("element"))
        return family.choose_tile(key.inner, int(key.kernel.option("block")), key.bucket, converted)

    def candidates(self, key: ProductKey) -> list[family.PackedTile]:
        return family.candidates(key.inner, int(key.kernel.option("block")))

    def complete(self, key: ProductKey, tile: family.PackedTile) -> KernelSpec:
        spec = key.kernel.with_options(**asdict(tile), passes=tile.passes(key.inner))
        lines = key.columns // 2 if spec.glu in ("concat", "interleaved") else key.columns
        return spec.with_options(full=lines % family.columns_of_tile(spec) == 0)


TILES = PackedTiles()

MOST_BUCKET = 5
"""Up to 2^5 rows an expert on average. Codes are unpacked once for every eight rows; a matrix that is unpacked to memory is written
and read at two bytes a value, which takes as long as some six passes over four bits.
"""

Streamed = FourBit | Blocks
"""Formats that the kernels know, where they have one tensor of scales."""

_SCALES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.uint8: "e8m0"}


class PackedProduct(NamedTuple):
    """One product with packed weights (E, N, K), with an activation or without.

    Args:
        base: its w1 and w3 are codes (E, N, K), two in a byte where they have four bits, in layout ``nk``.
        scales, scales_up: of w1 and w3, as ``format`` has them; float32, or uint8 (E8M0).
        format: what codes mean.
    """

    base: EsmmAct
    scales: Tensor
    scales_up: Tensor | None
    format: Streamed

    @property
    def depth(self) -> int:
        """K."""
        return self.format.per_item * self.base.w1.shape[2]


def codes_of(format: Streamed) -> dict[str, Option]:
    """What a packed weight is made of beside the element type of its scales, as options of the kernel: so many values along K
    (``block``), and lines, share a scale; the first of a byte's two codes is its high half, or the low one.
    """
    if isinstance(format, FourBit):
        return {"element": "code4", "block": format.block, "scale_rows": 1, "high_first": format.high_first}
    element, (rows, columns) = "int8" if format.dtype == torch.int8 else "e4m3", format.block
    return {"element": element, "block": columns or family.MOST_DEPTH, "scale_rows": rows, "high_first": False}


def streamed(format: str, scales: Sequence[Tensor], layout: str) -> Streamed | None:
    """The format of a packed weight that the kernels know; None for one that they do not, and for another layout."""
    found = FORMATS.get(format)
    return found if isinstance(found, Streamed) and len(scales) == 1 and layout == "nk" else None


def unsupported(o: PackedProduct) -> str:
    """Why packed_gemm does not take these operands, or should not; empty if it does."""
    x, experts = o.base.x, o.base.offs.shape[0] - 1
    together = o.format.block if isinstance(o.format, FourBit) else family.LANE
    card = planning_of(x).card if isinstance(x, Operand) else card_of(x.device.index)
    if reason := get_family(family.FAMILY).why_not_on(card.arch):
        return reason
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"rows are {x.dtype}; the kernels multiply bfloat16 and float16"
    scale = _SCALES.get(o.scales.dtype)
    if scale is None or (scale == "e8m0" and x.dtype != torch.bfloat16):
        return f"scales are {o.scales.dtype} for rows of {x.dtype}"
    if o.depth % together or o.depth > family.MOST_DEPTH:
        return f"lines of {o.depth} values; the kernels take multiples of {together} up to {family.MOST_DEPTH}"
    if experts > family.MOST_EXPERTS:
        return f"{experts} experts; the kernels' tables hold {family.MOST_EXPERTS}"
    if row_bucket(o.base.rows, experts) > MOST_BUCKET:
        return f"{o.base.rows} rows for {experts} experts; matrices that are unpacked once are faster"
    codes, scales = ([t for t in both if t is not None] for both in ((o.base.w1, o.base.w3), (o.scales, o.scales_up)))
    if not all(t.is_contiguous() for t in (*codes, *scales)) or not aligned(*codes):
        return "packed weights do not lie contiguously at multiples of 16 bytes"
    return "" if aligned(x) and x.stride()[-1] == 1 else "rows do not lie at multiples of 16 bytes"


def streamed_esmm(o: PackedProduct) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)]^T + b[e(p)]``, (n, N), of a product without an activation."""
    y = o.base.x.new_empty((o.base.rows, o.base.inner))
    _product(o, y, None)
    return y


def streamed_esmm_act(o: PackedProduct) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)`` from one launch: (n, I) or (n, 2I), empty unless it is kept, and (n, I)."""
    h, a = o.base.results()
    _product(o, h if o.base.keep_h else None, a)
    return h, a


def _product(o: PackedProduct, d: Tensor | None, act: Tensor | None) -> None:
    """One launch: h to d and a to act, each if it is given."""
    base, x = o.base, dense_rows(o.base.x)
    n, inner, experts = base.rows, base.inner, base.offs.shape[0] - 1
    if n == 0 or inner == 0:
        return
    b1, b3 = contiguous(base.b1), contiguous(base.b3)
    planning, depth, lines = planning_of(x), o.depth, base.w1.shape[1]
    static: dict[str, Any] = {"activation": base.activation, "glu": base.glu, "bias": b1 is not None}
    spec = KernelSpec(
        family.FAMILY, "esmm", planning.card.arch, DTYPES[x.dtype], bk=family.DEPTH, gather=base.v is not None, **static
    )
    keep: dict[str, Option] = {} if (base.activation, base.glu) == ("none", "none") else {"keep_h": d is not None}
    spec = spec.with_options(scale=_SCALES[o.scales.dtype], **codes_of(o.format), **keep)
    rows = experts << row_bucket(n, experts)  # which is all that tiles go by
    key = ProductKey(TILES, spec, planning.card, rows, experts, depth, lines)
    pointers = {"x": x, "code": base.w1, "code2": base.w3, "scale": o.scales, "scale2": o.scales_up, "bias": b1}
    pointers |= {"bias2": b3, "d": d, "act": act, "v": base.v, "offs": base.offs}
    tile: family.PackedTile = planning.tile_of(key)
    spec = key.spec(tile)
    units = (n // family.rows_of_tile(spec) + min(experts, n)) * ceil_div(inner, family.columns_of_tile(spec))
    codes, scales = base.w1.stride()[0], o.scales[0].numel()  # of an expert: they lie contiguously
    strides = {"x_stride": x.stride()[0], "code_expert": codes, "scale_expert": scales, "act_stride": inner}
    strides |= {"d_stride": 0 if d is None else d.shape[1]}
    numbers = {"rows": n, "n": inner, "k": depth, "experts": experts, "top_k": divisor(base.top_k)}
    constants, values = constants_of(base.activation, base.params), _values(o.format, x.dtype)
    grid = (min(units, planning.card.multiprocessors * family.resident_blocks(spec)), 1, 1)
    launch(x, spec, grid, **pointers, **strides, **numbers, act_params=constants, values=values)


def _values(format: Streamed, dtype: torch.dtype) -> tuple[int, ...]:
    """The sixteen values of codes of four bits as elements, two in a word."""
    values = format.values if isinstance(format, FourBit) else (0.0,) * 16
    elements = torch.tensor(values, dtype=torch.float32, device="cpu").to(dtype).view(torch.int16).tolist()
    return struct.unpack("8I", struct.pack("16h", *elements))


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
    experts, rows, columns = out.shape
    values = rows * columns
    blocks = ceil_div(values, VALUES_A_BLOCK)
    code = format.values if isinstance(format, FourBit) else (0.0,) * 16
    nests = 0 if nested is None else nested.shape[1]
    spec = KernelSpec(UNPACK, UNPACK, planning_of(out).card.arch, dtype=DTYPES[out.dtype])
    spec = spec.with_options(format=format.name)
    pointers = {"packed": packed, "scale": scale, "nested": nested, "offset": offset, "map": map, "out": out}
    sizes = {"values": values, "columns": columns, "scales": scale[0].numel(), "nests": nests, "blocks": blocks}
    launch(out, spec, (experts * blocks, 1, 1), **pointers, **sizes, code=code)


_NARROWEST = 128
"""Columns of the narrowest tile of an activation's gradient."""

_RANKS = 8
"""What ranks of a fused second product are multiples of."""


@cuda_kernel("esmm_packed")
def esmm_packed(o: EsmmPacked) -> Tensor:
    product = _of_few_rows(o)
    if product is not None:
        return streamed_esmm(product)
    y: Tensor = o.results()
    for part in parts(o):
        esmm_segment(part.product, into=Segment(y, part.rows, part.last))
    return y


@cuda_kernel("esmm_packed_low_rank")
def esmm_packed_low_rank(o: EsmmPackedLowRank) -> Tensor:
    if not _fuses(o, o.u):
        return summed(o, by=CUDA)
    y, c = o.results(), o.c.contiguous()
    for part in parts(o):
        fused_segment(part.product.to(EsmmLowRank, u=o.u, c=c[part.experts]), into=Segment(y, part.rows, part.last))
    return y  # type: ignore[no-any-return]


@cuda_kernel("esmm_act_packed")
def esmm_act_packed(o: EsmmActPacked) -> tuple[Tensor, Tensor]:
    few = _of_few_rows(o)
    if few is not None and o.u is None:
        return streamed_esmm_act(few._replace(base=o.dense(o.packed)))
    if few is not None or not _fuses(o, o.u, o.activation):
        return activated(o, by=CUDA)
    (h, a), o = o.results(), o._replace(c=contiguous(o.c))
    for part in parts(o):
        into = Segment(h, part.rows, part.last, a)
        fused_segment(part.of(o, b1=part.product.bias), into=into)
    return h, a


@cuda_kernel("esmm_act_backward_packed")
def esmm_act_backward_packed(o: EsmmActBackwardPacked) -> tuple[Tensor, Tensor, Tensor]:
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


def _of_few_rows(o: EsmmPacked) -> PackedProduct | None:
    """The product as the kernels for few rows see it; None where they do not take it."""
    format = streamed(o.format, o.scales, o.layout)
    if format is None or is_fixed():
        return None
    base = o.to(Esmm, weight=o.packed).plain
    found = PackedProduct(base, o.scales[0], None, format)
    return None if unsupported(found) else found


def _fuses(o: EsmmPacked, u: Tensor | None, activation: str = "none") -> bool:
    """Whether kernels of this card fuse what belongs to a product, are the ones for so many rows, and take this rank."""
    if u is not None and u.shape[1] % _RANKS:
        return False
    few = has_few_rows(o.rows, o.offs)
    return planning_of(o.offs).card.is_hopper and not few and activation not in ONLY_OTHERS


def streams(o: MoeFfnSources) -> bool:
    """Whether a call has so few rows an expert that packed weights are only streamed, and nothing is added to the first ones."""
    few = row_bucket(o.top_k_index.numel(), o.experts) <= MOST_BUCKET
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
    if unsupported(first):
        return None
    v, inv, offs = reindex(o.top_k_index, o.experts)
    _, a = streamed_esmm_act(first._replace(base=base._replace(v=v, offs=offs)))
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
