"""esmm, esmm_act, estmm and esfk through the families gemm_sm80 and esfk_sm80: every element type, every stride, sm_80 and newer.

Arguments and results are those of the operators' own docstrings (hexa_fx.ops).
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.family_gemm_sm80 import SIZES
from hexa_fx.codegen.heuristics import Tile, row_bucket
from hexa_fx.codegen.spec import Glu, Layout
from hexa_fx.cuda.arguments import Piece
from hexa_fx.cuda.choosing import cached_choice, card_of
from hexa_fx.cuda.key_sm80 import GemmKey, kernel_for
from hexa_fx.cuda.launch import Kernel, launch
from hexa_fx.cuda.operands import Into, Segment, aligned, ceil_div, constants_of, dense_rows
from hexa_fx.cuda.tile_choice import run_with_tile
from hexa_fx.ops.operands import Esfk, Esmm, EsmmAct, Estmm
from hexa_fx.ops.rows import flip

_SIZES = Struct(SIZES)
_PLAIN: tuple[str, Glu, tuple[float, ...]] = ("none", "none", ())
_KEEP_H = ((("keep_h", False),), (("keep_h", True),))
_GROUP = 8
"""Row tiles that share the column tiles of a weight while they are in L2; as in gemm_sm80.cuh."""


class _Weight(NamedTuple):
    """A stacked weight as the kernel reads it: lines of `stride` elements, an expert every `expert` elements."""

    tensor: Tensor
    layout: Layout
    stride: int
    expert: int


def esmm(o: Esmm, segment: Segment | None = None) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    y = o.x.new_empty((o.rows, o.columns)) if segment is None else segment.out
    _product(o, (o.weight, None), (o.bias, None), _PLAIN, y, None, segment)
    return y


def esmm_act(o: EsmmAct) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)`` from one launch: (n, I) or (n, 2I), and (n, I)."""
    n, inner = o.rows, o.inner
    h = o.x.new_empty((n if o.keep_h else 0, inner if o.glu == "none" else 2 * inner))
    if o.glu == "none" and o.activation == "none":
        y = esmm(Esmm(o.x, o.w1, o.b1, o.v, o.offs, o.top_k, o.layout))
        return (y.clone() if o.keep_h else h), y
    a = o.x.new_empty((n, inner))
    _product(o, (o.w1, o.w3), (o.b1, o.b3), (o.activation, o.glu, o.params), h if o.keep_h else None, a)
    return h, a


def estmm(o: Estmm, into: Tensor | None = None) -> Tensor:
    """``dW[e]``, the sum of ``x[row]^T g[row]``: (E, N, K) for ``nk``, (E, K, N) for ``kn``.

    Args:
        into: what the result is added to, in its shape and the accumulators' type; it is returned.
    """
    o = _by_rows(o)
    x, g = o.x, o.g
    experts, m, n, device = o.experts, x.shape[1], g.shape[1], x.device.index
    d = x.new_empty((experts, m, n)) if into is None else into
    if not (experts and m and n):
        return d
    key = GemmKey(
        "estmm",
        card_of(device),
        x.dtype,
        math_of(x.dtype),
        row_bucket(o.rows, experts),
        m,
        n,
        "nk",
        o.x_index is not None,
        aligned(x, g),
        accumulate=into is not None,
        options=(("gather_b", o.g_index is not None),),
    )
    args = (_weight_piece(o, d),)

    def run(tile: Tile | None) -> None:
        kernel, bm, bn = kernel_for(key, tile)
        launch(kernel, device, (experts * ceil_div(m, bm) * ceil_div(n, bn), 1, 1), args)

    run_with_tile(key, device, run)
    return d


def esfk(o: Esfk, into: Into | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """dX, dW and db of one projection in one launch. No width may be zero.

    Args:
        into: what dW, and db if there is a bias, are added to; it is returned instead.
    """
    x, g, layout = dense_rows(o.x), dense_rows(o.g), o.layout if into is None else into.layout
    stored = _weight(o.weight, flip(o.layout))
    n, columns, k, experts, device = g.shape[0], g.shape[1], x.shape[1], o.experts, g.device.index
    dx = g.new_empty((n, k))
    if into is not None:
        dw, db = into.weight, into.bias
    else:
        dw = torch.empty_like(o.weight, memory_format=torch.contiguous_format)
        db = g.new_empty((experts, columns)) if o.has_bias else None
    fit = aligned(x, g) and not (stored.tensor.data_ptr() | (stored.stride | stored.expert) * g.element_size()) & 15
    key = GemmKey(
        "esfk",
        card_of(device),
        g.dtype,
        math_of(g.dtype),
        row_bucket(n, experts),
        k,
        columns,
        stored.layout,
        o.x_index is not None,
        fit,
        bias=o.has_bias,
        accumulate=into is not None,
        options=(("transpose", layout == "nk"),),
    )
    pointers = (g, stored.tensor, None, None, None, dx, None, None, None, o.offs)
    strides = (g.stride()[0], stored.stride, stored.expert, k, 0, 0)
    rows = (pointers, _SIZES.pack(*strides, n, 0, k, columns, experts, *divisor(1), 0.0, 0.0))
    of_weight = _by_rows(Estmm(x, g, o.x_index, None, o.offs, o.top_k, layout))
    args = (rows, _weight_piece(of_weight, dw), ((db,), b""))

    def run(tile: Tile | None) -> None:
        kernel, bm, bn = kernel_for(key, tile)
        weight_tiles = experts * ceil_div(dw.shape[1], bm) * ceil_div(dw.shape[2], bn)
        row_tiles = (n // bm + min(experts, n)) * ceil_div(k, bn)
        launch(kernel, device, (row_tiles + weight_tiles, 1, 1), args)

    run_with_tile(key, device, run)
    return dx, dw, db


def _product(
    o: Esmm | EsmmAct,
    weights: tuple[Tensor, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
    epilogue: tuple[str, Glu, tuple[float, ...]],
    d: Tensor | None,
    act: Tensor | None,
    segment: Segment | None = None,
) -> None:
    """One launch of esmm: h to d and a to act, each if it is given."""
    x, v, offs, (activation, glu, params) = dense_rows(o.x), o.v, o.offs, epilogue
    first, second = _weights(*weights, o.layout)
    bias, bias_up = biases
    if bias is not None:
        bias, bias_up = bias.contiguous(), None if bias_up is None else bias_up.contiguous()
    result = d if act is None else act
    assert result is not None
    (n, inner), k, experts, device = result.shape, x.shape[1], offs.shape[0] - 1, x.device.index
    if n == 0 or inner == 0:
        return
    strides = (x.stride()[0], first.stride, first.expert)
    steps = strides[0] | strides[1] | strides[2] | (inner if glu == "concat" and first.layout == "kn" else 0)
    starts = x.data_ptr() | first.tensor.data_ptr() | (0 if second is None else second.data_ptr())
    key = GemmKey(
        "esmm",
        card_of(device),
        x.dtype,
        math_of(x.dtype),
        row_bucket(n if segment is None else segment.rows, experts),
        k,
        inner if glu == "none" else 2 * inner,
        first.layout,
        v is not None,
        not (starts | steps * x.element_size()) & 15,
        activation,
        glu,
        bias is not None,
        False,
        () if act is None else _KEEP_H[d is not None],
    )
    pointers = (x, first.tensor, second, bias, bias_up, d, act, v, None, offs)
    written = n if segment is None or segment.last else 0
    sizes = (n, written, experts, *strides, 0 if d is None else d.shape[1], inner, o.top_k, tuple(params))

    def run(tile: Tile | None) -> None:
        kernel, grid, numbers = _esmm_launch(key, tile, *sizes)
        launch(kernel, device, grid, ((pointers, numbers),))

    run_with_tile(key, device, run)


@cached_choice
def _esmm_launch(
    key: GemmKey,
    tile: Tile | None,
    rows: int,
    written: int,
    experts: int,
    x_stride: int,
    w_stride: int,
    w_expert: int,
    width: int,
    inner: int,
    top_k: int,
    params: tuple[float, ...],
) -> tuple[Kernel, tuple[int, int, int], bytes]:
    """Kernel, grid and all arguments but the pointers. Of the rows those before `written` that belong to no expert are zeroed."""
    kernel, bm, step = kernel_for(key, tile)
    row_tiles = ceil_div(rows // bm + min(experts, rows), _GROUP) * _GROUP
    strides, sizes = (x_stride, w_stride, w_expert, width, 0, inner), (written, 0, inner, key.inner, experts)
    numbers = _SIZES.pack(*strides, *sizes, *divisor(top_k), *constants_of(key.activation, params))
    return kernel, (row_tiles * ceil_div(inner, step), 1, 1), numbers


def _by_rows(o: Estmm) -> Estmm:
    """The same gradient with the operand first that gives the rows of dW, both with contiguous rows."""
    x, g, x_index, g_index, offs, top_k, layout = o
    if layout == "nk":
        x, g, x_index, g_index = g, x, g_index, x_index
    return Estmm(dense_rows(x), dense_rows(g), x_index, g_index, offs, top_k, "kn")


def _weight_piece(o: Estmm, d: Tensor) -> Piece:
    """hexa::GemmParams of ``d[e]``, the sum of ``x[row]^T g[row]``."""
    experts, m, n = d.shape
    pointers = (o.x, o.g, None, None, None, d, None, o.x_index, o.g_index, o.offs)
    strides, sizes = (o.x.stride()[0], o.g.stride()[0], 0, d.stride()[1], d.stride()[0], 0), (o.rows, m, n, 0, experts)
    return pointers, _SIZES.pack(*strides, *sizes, *divisor(o.top_k), 0.0, 0.0)


def _weights(first: Tensor, second: Tensor | None, layout: Layout) -> tuple[_Weight, Tensor | None]:
    """Both weights in one layout and with the same strides, without a copy wherever the strides allow."""
    one = _weight(first, layout)
    if second is None:
        return one, None
    other = _weight(second, layout)
    if one[1:] != other[1:]:
        one, other = _weight(first.contiguous(), layout), _weight(second.contiguous(), layout)
    return one, other.tensor


def _weight(weight: Tensor, layout: Layout) -> _Weight:
    expert, row, column = weight.stride()
    if column == 1 or weight.shape[2] == 1:
        return _Weight(weight, layout, row, expert)
    if row == 1 or weight.shape[1] == 1:  # stored transposed: the other layout, as it lies
        return _Weight(weight, flip(layout), column, expert)
    weight = weight.contiguous()
    return _Weight(weight, layout, weight.stride()[1], weight.stride()[0])


def math_of(dtype: torch.dtype) -> str:
    """How elements of this type are multiplied: on tensor cores, as three products of TF32, or by plain instructions."""
    if dtype == torch.float64:
        return "simt"
    if dtype != torch.float32:
        return "tensor"
    return "tensor" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fast_f32"


@cached_choice
def divisor(value: int) -> tuple[int, int, int]:
    """hexa::Divisor of a number from 1 to 2^31 - 1: (value, magic, shift)."""
    if value == 1:
        return 1, 0, 0
    log = 31 + (value - 1).bit_length()
    return value, ceil_div(1 << log, value), log - 32
