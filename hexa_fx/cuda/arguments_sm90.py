"""What a Hopper launch hands over: the argument struct, and a tensor map for each operand that the copy engine moves boxes of."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hexa_fx.codegen.family_gemm_sm90 import INNER, LINE_BYTES
from hexa_fx.codegen.tiles_sm90 import TileSm90
from hexa_fx.cuda.operands import DTYPES, Added
from hexa_fx.cuda.planning import TensorMap
from hexa_fx.ir import Layout


class Maps(NamedTuple):
    """Tensor maps of a launch, in the kernel's order; see enum Map of kernels/config_sm90.cuh."""

    rows: TensorMap | None = None
    weight: TensorMap | None = None
    up: TensorMap | None = None
    p: TensorMap | None = None
    q: TensorMap | None = None
    h: TensorMap | None = None
    out: TensorMap | None = None
    act: TensorMap | None = None
    grad: TensorMap | None = None


def line(t: Tensor) -> int:
    """Elements of a line of shared memory, which is as wide as a box is."""
    return LINE_BYTES // t.element_size()


def rows_map(x: Tensor, rows: int, columns: int | None = None) -> TensorMap:
    """Boxes of `rows` rows x `columns` columns of a (., C) operand: a line or half of one."""
    count, width = x.shape
    columns = columns or line(x)
    args = (DTYPES[x.dtype], (width, count), (x.stride()[0],), (columns, rows), columns * x.element_size())
    return TensorMap(x, args)


def chunk_map(x: Tensor) -> TensorMap:
    """The boxes that a warp writes, or h's that it reads."""
    return rows_map(x, 16)


def result_map(x: Tensor, tile: TileSm90, halves: int = 1) -> TensorMap:
    """The boxes that a row product's results leave in. A swapped tile's warpgroup has half of its columns, which are gate and up in
    `halves`.
    """
    return rows_map(x, 32, tile.bn // 2 // halves) if tile.swapped else chunk_map(x)


def added_maps(
    added: Added | None, layout: Layout, tile: TileSm90, mixed: bool = False, in_staging: bool = False
) -> dict[str, TensorMap | None]:
    """What a second product is read through, in the places of maps that row products have no use for. Zeros follow its columns,
    up to a step of the contraction, or to one wgmma's part of it `in_staging`.
    """
    if added is None:
        return {}
    inner = INNER if in_staging else line(added.u)
    c = mixed_map(added.c, tile.fetch) if mixed else weight_map(added.c, layout, tile.bn // 2, tile.fetch, inner)
    up = None if added.c3 is None else weight_map(added.c3, layout, tile.bn // 2, inner=inner)
    return {"p": rows_map(added.u, tile.row_box, inner), "q": c, "grad": up}


def mixed_map(weight: Tensor, fetch: int) -> TensorMap:
    """(E, 2 I, K) in boxes of 8 gate columns, their 8 up columns, the next 8 gate columns, ... : 128 x a line."""
    experts, columns, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    shape, strides = (inner, 8, 2, columns // 16, experts), (by_row, columns // 2 * by_row, 8 * by_row, by_expert)
    box = (line(weight), 8, 2, 8, 1)
    return TensorMap(weight, (DTYPES[weight.dtype], shape, strides, box, LINE_BYTES, fetch))


def weight_map(weight: Tensor, layout: Layout, columns: int, fetch: int = 128, inner: int | None = None) -> TensorMap:
    """(E, N, K) in boxes of `columns` lines; (E, K, N) in boxes of 64 lines. `fetch`: bytes that come to L2 at a time. `inner`: of
    the contraction that a box holds, a line's elements or fewer.
    """
    inner = inner or line(weight)
    experts, rows, width = weight.shape
    by_expert, by_row, _ = weight.stride()
    box = (inner, columns, 1) if layout == "nk" else (line(weight), inner, 1)
    swizzle = box[0] * weight.element_size()
    args = (DTYPES[weight.dtype], (width, rows, experts), (by_row, by_expert), box, swizzle, fetch)
    return TensorMap(weight, args)


def added_map(dw: Tensor, turned: bool) -> TensorMap:
    """The boxes of floats that a warp adds to dW: 16 rows x a line of P^T Q, of which half a line is `turned`."""
    experts, rows, columns = dw.shape
    by_expert, by_row, _ = dw.stride()
    box, swizzle = ((16, line(dw), 1), LINE_BYTES // 2) if turned else ((line(dw), 16, 1), LINE_BYTES)
    return TensorMap(dw, (DTYPES[dw.dtype], (columns, rows, experts), (by_row, by_expert), box, swizzle))
