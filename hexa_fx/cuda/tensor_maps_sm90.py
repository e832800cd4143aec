"""The tensor maps of the Hopper launches: which box of which operand the copy engine moves at a time."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hexa_fx.codegen.spec import Layout
from hexa_fx.codegen.tiles_sm90 import TileChoice
from hexa_fx.cuda.arguments import TensorMap
from hexa_fx.cuda.operands import DTYPES


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


def row_maps(x: Tensor, weight: Tensor, v: Tensor | None, layout: Layout, tile: TileChoice) -> Maps:
    """The maps that a row product reads through; gathered rows need none."""
    return Maps(
        None if v is not None else rows_map(x, tile.row_box), weight_map(weight, layout, tile.bn // 2, tile.fetch)
    )


def weight_maps(
    p: Tensor, q: Tensor, v: Tensor | None, dw: Tensor, turned: bool = False
) -> dict[str, TensorMap | None]:
    """The maps of a weight's gradient: P (unless it is gathered), Q, and dW as it lies in memory: (C, R) if it is `turned`."""
    p_map = None if v is not None else rows_map(p, 64)
    grad = weight_map(dw, "nk", 16) if dw.dtype == p.dtype else added_map(dw, turned)
    return {"p": p_map, "q": rows_map(q, 64), "grad": grad}


def rows_map(x: Tensor, rows: int, columns: int = 64) -> TensorMap:
    """Boxes of `rows` rows x `columns` columns of a (., C) operand; 64 or 32 columns."""
    rows_of_x, width = x.shape
    return x, (DTYPES[x.dtype], (width, rows_of_x), (x.stride(0),), (columns, rows), 2 * columns)


def chunk_map(x: Tensor) -> TensorMap:
    """The boxes that a warp writes, or h's that it reads."""
    return rows_map(x, 16)


def result_map(x: Tensor, tile: TileChoice, halves: int = 1) -> TensorMap:
    """The boxes that a row product's results leave in. A swapped tile's warpgroup has half of its columns, which are gate and up in
    `halves`.
    """
    return rows_map(x, 32, tile.bn // 2 // halves) if tile.swapped else rows_map(x, 16)


def mixed_map(weight: Tensor, fetch: int) -> TensorMap:
    """(E, 2 I, K) in boxes of 8 gate columns, their 8 up columns, the next 8 gate columns, ... : 128 x 64."""
    experts, columns, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    shape, strides = (inner, 8, 2, columns // 16, experts), (by_row, columns // 2 * by_row, 8 * by_row, by_expert)
    return weight, (DTYPES[weight.dtype], shape, strides, (64, 8, 2, 8, 1), 128, fetch)


def weight_map(weight: Tensor, layout: Layout, columns: int, fetch: int = 128) -> TensorMap:
    """(E, N, K) in boxes of `columns` x 64; (E, K, N) in boxes of 64 x 64. `fetch`: bytes that come to L2 at a time."""
    experts, rows, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    box = (64, columns, 1) if layout == "nk" else (64, 64, 1)
    return weight, (DTYPES[weight.dtype], (inner, rows, experts), (by_row, by_expert), box, 128, fetch)


def added_map(dw: Tensor, turned: bool) -> TensorMap:
    """The boxes of floats that a warp adds to dW: 16 rows x 32 columns of P^T Q."""
    experts, rows, columns = dw.shape
    by_expert, by_row, _ = dw.stride()
    box, swizzle = ((16, 32, 1), 64) if turned else ((32, 16, 1), 128)
    return dw, (DTYPES[dw.dtype], (columns, rows, experts), (by_row, by_expert), box, swizzle)
