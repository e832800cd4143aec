"""Products of few rows with packed weights through the family packed_gemm, which unpacks on the way to the tensor cores.

With few rows an expert a product only streams weights, and packed ones are a quarter or half of the bytes. With more rows the
same weights are unpacked again for each eight of them, and matrices that were unpacked once are better: see `unsupported`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.family import get_family
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.family_packed import (
    DEPTH,
    FAMILY,
    LANE,
    MOST_DEPTH,
    MOST_EXPERTS,
    PackedTile,
    candidates,
    choose_tile,
    columns_of_tile,
    resident_blocks,
    rows_of_tile,
)
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.cuda.calls import product
from hexa_fx.cuda.choosing import card_of
from hexa_fx.cuda.gemm_sm80 import divisor
from hexa_fx.cuda.operands import DTYPES, aligned, constants_of, contiguous, dense_rows
from hexa_fx.cuda.planning import Operand, launch, planning_of
from hexa_fx.cuda.product import ProductKey, Tiles
from hexa_fx.formats import FORMATS
from hexa_fx.formats.blocks import Blocks
from hexa_fx.formats.format import ceil_div
from hexa_fx.formats.four_bit import FourBit
from hexa_fx.ops.table import EsmmAct


class Codes(NamedTuple):
    """What a packed weight is made of, beside the element type of its scales.

    Args:
        element: one of `hexa_fx.codegen.family_packed.ELEMENTS`.
        block, scale_rows: values along K, and lines, that share a scale.
        high_first: the first of a byte's two codes is its high half.
    """

    element: str
    block: int
    scale_rows: int
    high_first: bool

    @property
    def per_byte(self) -> int:
        """Values in a byte."""
        return 2 if self.element == "code4" else 1

    @property
    def together(self) -> int:
        """What K is a multiple of."""
        return self.block if self.element == "code4" else LANE

    def scales(self, lines: int, depth: int) -> int:
        """Of an expert."""
        return ceil_div(lines, self.scale_rows) * ceil_div(depth, self.block)


class PackedTiles(Tiles):
    """Of packed_gemm."""

    kind = PackedTile

    def rule(self, key: ProductKey) -> PackedTile:
        return choose_tile(key.inner, int(key.kernel.option("block")), key.bucket)

    def candidates(self, key: ProductKey) -> list[PackedTile]:
        return candidates(key.inner, int(key.kernel.option("block")))

    def complete(self, key: ProductKey, tile: PackedTile) -> KernelSpec:
        spec = key.kernel.with_options(**asdict(tile), passes=tile.passes(key.inner))
        lines = key.columns // 2 if spec.glu in ("concat", "interleaved") else key.columns
        return spec.with_options(full=lines % columns_of_tile(spec) == 0)


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


def codes_of(format: Streamed) -> Codes:
    """What the kernels are told of a format."""
    if isinstance(format, FourBit):
        return Codes("code4", format.block, 1, format.high_first)
    rows, columns = format.block
    return Codes("int8" if format.dtype == torch.int8 else "e4m3", columns or MOST_DEPTH, rows, False)


def streamed(format: str, scales: Sequence[Tensor], layout: str) -> Streamed | None:
    """The format of a packed weight that the kernels know; None for one that they do not, and for another layout."""
    found = FORMATS.get(format)
    return found if isinstance(found, Streamed) and len(scales) == 1 and layout == "nk" else None


def unsupported(o: PackedProduct) -> str:
    """Why packed_gemm does not take these operands, or should not; empty if it does."""
    x, experts, together = o.base.x, o.base.offs.shape[0] - 1, codes_of(o.format).together
    card = planning_of(x).card if isinstance(x, Operand) else card_of(x.device.index)
    if reason := get_family(FAMILY).why_not_on(card.arch):
        return reason
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"rows are {x.dtype}; the kernels multiply bfloat16 and float16"
    scale = _SCALES.get(o.scales.dtype)
    if scale is None or (scale == "e8m0" and x.dtype != torch.bfloat16):
        return f"scales are {o.scales.dtype} for rows of {x.dtype}"
    if o.depth % together or o.depth > MOST_DEPTH:
        return f"lines of {o.depth} values; the kernels take multiples of {together} up to {MOST_DEPTH}"
    if experts > MOST_EXPERTS:
        return f"{experts} experts; the kernels' tables hold {MOST_EXPERTS}"
    if row_bucket(o.base.rows, experts) > MOST_BUCKET:
        return f"{o.base.rows} rows for {experts} experts; matrices that are unpacked once are faster"
    codes, scales = ([t for t in both if t is not None] for both in ((o.base.w1, o.base.w3), (o.scales, o.scales_up)))
    if not all(t.is_contiguous() for t in (*codes, *scales)) or not aligned(*codes):
        return "packed weights do not lie contiguously at multiples of 16 bytes"
    return "" if aligned(x) and x.stride()[-1] == 1 else "rows do not lie at multiples of 16 bytes"


@product
def esmm(o: PackedProduct) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)]^T + b[e(p)]``, (n, N), of a product without an activation."""
    y = o.base.x.new_empty((o.base.rows, o.base.inner))
    _product(o, y, None)
    return y


@product
def esmm_act(o: PackedProduct) -> tuple[Tensor, Tensor]:
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
    planning, of_format, depth, lines = planning_of(x), codes_of(o.format), o.depth, base.w1.shape[1]
    static: dict[str, Any] = {"activation": base.activation, "glu": base.glu, "bias": b1 is not None}
    spec = KernelSpec(
        FAMILY, "esmm", planning.card.arch, DTYPES[x.dtype], bk=DEPTH, gather=base.v is not None, **static
    )
    keep: dict[str, Option] = {} if (base.activation, base.glu) == ("none", "none") else {"keep_h": d is not None}
    spec = spec.with_options(scale=_SCALES[o.scales.dtype], **of_format._asdict(), **keep)
    rows = experts << row_bucket(n, experts)  # which is all that tiles go by
    key = ProductKey(TILES, spec, planning.card, rows, experts, depth, lines)
    pointers = {"x": x, "code": base.w1, "code2": base.w3, "scale": o.scales, "scale2": o.scales_up, "bias": b1}
    pointers |= {"bias2": b3, "d": d, "act": act, "v": base.v, "offs": base.offs}
    tile: PackedTile = planning.tile_of(key)
    spec = key.spec(tile)
    units = (n // rows_of_tile(spec) + min(experts, n)) * ceil_div(inner, columns_of_tile(spec))
    codes, scales = lines * depth // of_format.per_byte, of_format.scales(lines, depth)
    strides = {"x_stride": x.stride()[0], "code_expert": codes, "scale_expert": scales, "act_stride": inner}
    strides |= {"d_stride": 0 if d is None else d.shape[1]}
    numbers = {"rows": n, "n": inner, "k": depth, "experts": experts, "top_k": divisor(base.top_k)}
    constants, values = constants_of(base.activation, base.params), _values(o.format, x.dtype)
    grid = (min(units, planning.card.multiprocessors * resident_blocks(spec)), 1, 1)
    launch(x, spec, grid, **pointers, **strides, **numbers, act_params=constants, values=values)


def _values(format: Streamed, dtype: torch.dtype) -> tuple[int, ...]:
    """The sixteen values of codes of four bits as elements, two in a word."""
    values = format.values if isinstance(format, FourBit) else (0.0,) * 16
    elements = torch.tensor(values, dtype=torch.float32, device="cpu").to(dtype).view(torch.int16).tolist()
    return unpack("8I", pack("16h", *elements))
