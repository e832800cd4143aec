"""Products of few rows with packed weights through the family packed_gemm, which unpacks on the way to the tensor cores.

With few rows an expert a product only streams weights, and packed ones are a quarter of the bytes. With more rows the same
weights are unpacked again for each eight of them, and matrices that were unpacked once are better: see `unsupported`.
"""

from __future__ import annotations

from struct import Struct, pack, unpack
from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family_packed import (
    FAMILY,
    MOST_DEPTH,
    MOST_EXPERTS,
    PackedTile,
    columns_of_tile,
    resident_blocks,
    rows_of_tile,
)
from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.codegen.spec import Glu
from hexa_fx.cuda.calls import product
from hexa_fx.cuda.choosing import card_of
from hexa_fx.cuda.gemm_sm80 import divisor
from hexa_fx.cuda.kernel import kernel_of
from hexa_fx.cuda.key_packed import PackedKey
from hexa_fx.cuda.operands import aligned, ceil_div, constants_of, dense_rows, numbers_of
from hexa_fx.cuda.planning import Operand, planning_of
from hexa_fx.formats.four_bit import FourBit
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.rows import row_count

MOST_BUCKET = 5
"""Up to 2^5 rows an expert on average. Codes are unpacked once for every eight rows; a matrix that is unpacked to memory is written
and read at two bytes a value, which takes as long as some six passes over four bits.
"""

_SCALES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.uint8: "e8m0"}
_PLAIN: tuple[str, Glu, tuple[float, ...]] = ("none", "none", ())


class PackedWeight(NamedTuple):
    """A weight (E, N, K) in four bits.

    Args:
        codes: (E, N, K / 2), uint8.
        scales: one for each ``format.block`` values of an expert's matrix, read row by row; float32, or uint8 (E8M0).
        format: what codes mean.
    """

    codes: Tensor
    scales: Tensor
    format: FourBit

    @property
    def columns(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def inner(self) -> int:
        """K."""
        return 2 * self.codes.shape[2]


class PackedProduct(NamedTuple):
    """One product with an activation or without, as `hexa_fx.ops.operands.EsmmAct` but for its weights.

    Args:
        w1, w3: the weight; up's for glu ``split``.
    """

    x: Tensor
    w1: PackedWeight
    b1: Tensor | None
    w3: PackedWeight | None
    b3: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    activation: str = "none"
    glu: Glu = "none"
    params: tuple[float, ...] = ()
    keep_h: bool = True

    @property
    def rows(self) -> int:
        """n."""
        return row_count(self.x, self.v)

    @property
    def inner(self) -> int:
        """Columns of the result, and of one half of a gated one."""
        return inner_width(self.w1.columns, self.glu)


def unsupported(o: PackedProduct) -> str:
    """Why packed_gemm does not take these operands, or should not; empty if it does."""
    weight = o.w1
    card = planning_of(o.offs).card if isinstance(o.offs, Operand) else card_of(o.offs.device.index)
    if card.arch < 80:
        return f"sm_{card.arch}; the kernels need sm_80 or newer"
    if o.x.dtype not in (torch.bfloat16, torch.float16):
        return f"rows are {o.x.dtype}; the kernels multiply bfloat16 and float16"
    scale = _SCALES.get(weight.scales.dtype)
    if scale is None or (scale == "e8m0" and o.x.dtype != torch.bfloat16):
        return f"scales are {weight.scales.dtype} for rows of {o.x.dtype}"
    if weight.inner % weight.format.block or weight.inner > MOST_DEPTH:
        return f"lines of {weight.inner} values; the kernels take multiples of {weight.format.block} up to {MOST_DEPTH}"
    if o.offs.shape[0] - 1 > MOST_EXPERTS:
        return f"{o.offs.shape[0] - 1} experts; the kernels' tables hold {MOST_EXPERTS}"
    if row_bucket(o.rows, o.offs.shape[0] - 1) > MOST_BUCKET:
        return f"{o.rows} rows for {o.offs.shape[0] - 1} experts; matrices that are unpacked once are faster"
    weights = [w for w in (o.w1, o.w3) if w is not None]
    if not all(w.codes.is_contiguous() and w.scales.is_contiguous() and aligned(w.codes) for w in weights):
        return "packed weights do not lie contiguously at multiples of 16 bytes"
    return "" if aligned(o.x) and o.x.stride()[-1] == 1 else "rows do not lie at multiples of 16 bytes"


@product
def esmm(o: PackedProduct) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)]^T + b[e(p)]``, (n, N)."""
    y = o.x.new_empty((o.rows, o.w1.columns))
    _product(o, _PLAIN, y, None)
    return y


@product
def esmm_act(o: PackedProduct) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)`` from one launch: (n, I) or (n, 2I), empty unless it is kept, and (n, I)."""
    n, inner = o.rows, o.inner
    h = o.x.new_empty((n if o.keep_h else 0, inner if o.glu == "none" else 2 * inner))
    a = o.x.new_empty((n, inner))
    _product(o, (o.activation, o.glu, o.params), h if o.keep_h else None, a)
    return h, a


def _product(
    o: PackedProduct,
    epilogue: tuple[str, Glu, tuple[float, ...]],
    d: Tensor | None,
    act: Tensor | None,
) -> None:
    """One launch: h to d and a to act, each if it is given."""
    x, weight, (activation, glu, params) = dense_rows(o.x), o.w1, epilogue
    n, inner, experts = o.rows, inner_width(weight.columns, glu), o.offs.shape[0] - 1
    if n == 0 or inner == 0:
        return
    b1, b3 = (None if b is None else b.contiguous() for b in (o.b1, o.b3))
    planning = planning_of(x)
    key = PackedKey(
        planning.card,
        x.dtype,
        row_bucket(n, experts),
        weight.inner,
        weight.columns,
        _SCALES[weight.scales.dtype],
        weight.format.block,
        weight.format.high_first,
        o.v is not None,
        activation,
        glu,
        b1 is not None,
        d is not None,
    )
    up = (None, None) if o.w3 is None else (o.w3.codes, o.w3.scales)
    pointers = (x, weight.codes, up[0], weight.scales, up[1], b1, b3, d, act, o.v, o.offs)
    tile: PackedTile = planning.tile_of(key)
    spec = key.spec(tile)
    units = (n // rows_of_tile(spec) + min(experts, n)) * ceil_div(inner, columns_of_tile(spec))
    values = key.columns * key.inner
    strides = (x.stride()[0], values // 2, values // key.block, 0 if d is None else d.shape[1], inner)
    constants, codes = constants_of(activation, params), _values(weight.format.values, x.dtype)
    numbers = _numbers().pack(*strides, n, inner, key.inner, experts, *divisor(o.top_k), *constants, *codes)
    grid = (min(units, key.card.multiprocessors * resident_blocks(spec)), 1, 1)
    planning.launch(kernel_of(spec), grid, ((pointers, numbers),))


def _numbers() -> Struct:
    return numbers_of(get_family(FAMILY).args)


def _values(values: tuple[float, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The sixteen values as elements, two in a word."""
    elements = torch.tensor(values, dtype=torch.float32).to(dtype).view(torch.int16).tolist()
    return unpack("8I", pack("16h", *elements))
