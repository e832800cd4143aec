"""What a Hopper launch hands over: the argument struct, and a tensor map for each operand that the copy engine moves boxes of."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hexa_fx.codegen.family_gemm_sm90 import ARGS, LINE_BYTES
from hexa_fx.codegen.spec import Layout
from hexa_fx.codegen.tiles_sm90 import TileChoice
from hexa_fx.cuda.arguments import Piece, Pointer, TensorMap, numbers_of
from hexa_fx.cuda.choosing import cached_choice
from hexa_fx.cuda.operands import DTYPES, ceil_div
from hexa_fx.cuda.tile_queue import TileQueue

_NUMBERS = numbers_of(ARGS)


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


def pack(
    *,
    v: Pointer | None = None,
    offs: Pointer | None = None,
    queue: Pointer | None = None,
    a: Pointer | None = None,
    out: Pointer | None = None,
    act: Pointer | None = None,
    bias: Pointer | None = None,
    bias_up: Pointer | None = None,
    h: Pointer | None = None,
    slot_scale: Pointer | None = None,
    row_dot: Pointer | None = None,
    p: Pointer | None = None,
    dw: Pointer | None = None,
    db: Pointer | None = None,
    n: int = 0,
    experts: int = 0,
    division: tuple[int, int] = (0, 0),
    a_ld: int = 0,
    out_ld: int = 0,
    act_ld: int = 0,
    h_ld: int = 0,
    K: int = 0,
    N: int = 0,
    bias_ld: int = 0,
    p_ld: int = 0,
    R: int = 0,
    C: int = 0,
    group_m: int = 0,
    constants: tuple[float, float] = (0.0, 0.0),
) -> Piece:
    """hexa::sm90::GroupedParams. Fields that an operator does not use stay zero."""
    pointers = (v, offs, queue, a, out, act, bias, bias_up, h, slot_scale, row_dot, p, dw, db)
    sizes = (a_ld, out_ld, act_ld, h_ld, K, N, bias_ld, p_ld, R, C, group_m)
    return pointers, _NUMBERS.pack(n, experts, *division, *sizes, *constants)


def shared_args(v: Tensor | None, offs: Tensor, top_k: int, n: int, tile: TileChoice) -> dict[str, Any]:
    """Arguments of every launch: rows, experts, and the queue of tiles."""
    return {
        "v": v,
        "offs": offs,
        "queue": TileQueue(offs.device),
        "n": n,
        "experts": offs.shape[0] - 1,
        "division": _division(top_k),
        "group_m": tile.group_m,
    }


@cached_choice
def _division(top_k: int) -> tuple[int, int]:
    shift = (top_k - 1).bit_length()
    return ceil_div(1 << (31 + shift), top_k), shift


def line(t: Tensor) -> int:
    """Elements of a line of shared memory, which is as wide as a box is."""
    return LINE_BYTES // t.element_size()


def rows_map(x: Tensor, rows: int, columns: int | None = None) -> TensorMap:
    """Boxes of `rows` rows x `columns` columns of a (., C) operand: a line or half of one."""
    count, width = x.shape
    columns = columns or line(x)
    return x, (DTYPES[x.dtype], (width, count), (x.stride()[0],), (columns, rows), columns * x.element_size())


def chunk_map(x: Tensor) -> TensorMap:
    """The boxes that a warp writes, or h's that it reads."""
    return rows_map(x, 16)


def result_map(x: Tensor, tile: TileChoice, halves: int = 1) -> TensorMap:
    """The boxes that a row product's results leave in. A swapped tile's warpgroup has half of its columns, which are gate and up in
    `halves`.
    """
    return rows_map(x, 32, tile.bn // 2 // halves) if tile.swapped else chunk_map(x)


def mixed_map(weight: Tensor, fetch: int) -> TensorMap:
    """(E, 2 I, K) in boxes of 8 gate columns, their 8 up columns, the next 8 gate columns, ... : 128 x a line."""
    experts, columns, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    shape, strides = (inner, 8, 2, columns // 16, experts), (by_row, columns // 2 * by_row, 8 * by_row, by_expert)
    return weight, (DTYPES[weight.dtype], shape, strides, (line(weight), 8, 2, 8, 1), LINE_BYTES, fetch)


def weight_map(weight: Tensor, layout: Layout, columns: int, fetch: int = 128) -> TensorMap:
    """(E, N, K) in boxes of `columns` lines; (E, K, N) in boxes of 64 lines. `fetch`: bytes that come to L2 at a time."""
    experts, rows, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    box = (line(weight), columns if layout == "nk" else 64, 1)
    return weight, (DTYPES[weight.dtype], (inner, rows, experts), (by_row, by_expert), box, LINE_BYTES, fetch)


def added_map(dw: Tensor, turned: bool) -> TensorMap:
    """The boxes of floats that a warp adds to dW: 16 rows x a line of P^T Q, of which half a line is `turned`."""
    experts, rows, columns = dw.shape
    by_expert, by_row, _ = dw.stride()
    box, swizzle = ((16, line(dw), 1), LINE_BYTES // 2) if turned else ((line(dw), 16, 1), LINE_BYTES)
    return dw, (DTYPES[dw.dtype], (columns, rows, experts), (by_row, by_expert), box, swizzle)
