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
from hexa_fx.cuda.launch import Kernel, launch
from hexa_fx.cuda.operands import (
    Into,
    aligned,
    ceil_div,
    constants_of,
    dense_rows,
)
from hexa_fx.cuda.select_sm80 import EsfkKey, EsmmKey, EstmmKey, kernel_for, run_built, tune_key
from hexa_fx.cuda.tune import autotuning
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.rows import columns_of, flip, row_count

_SIZES = Struct(SIZES)
_GROUP = 8
"""Row tiles that share the column tiles of a weight while they are in L2; as in gemm_sm80.cuh."""


class _Weight(NamedTuple):
    """A stacked weight as the kernel reads it: lines of `stride` elements, an expert every `expert` elements."""

    tensor: Tensor
    layout: Layout
    stride: int
    expert: int


def esmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: Layout
) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    columns = columns_of(weight, layout)
    y = x.new_empty((row_count(x, v), columns))
    _product(x, (weight, None), (bias, None), v, offs, top_k, layout, y, None, columns, "none", "none", ())
    return y


def esmm_act(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    activation: str,
    glu: Glu,
    params: tuple[float, ...] = (),
    keep_h: bool = True,
) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)`` from one launch: (n, I) or (n, 2I), and (n, I)."""
    n, inner = row_count(x, v), inner_width(columns_of(w1, layout), glu)
    h = x.new_empty((n if keep_h else 0, inner if glu == "none" else 2 * inner))
    if glu == "none" and activation == "none":
        y = esmm(x, w1, b1, v, offs, top_k, layout)
        return (y.clone() if keep_h else h), y
    a = x.new_empty((n, inner))
    kept = h if keep_h else None
    _product(x, (w1, w3), (b1, b3), v, offs, top_k, layout, kept, a, inner, activation, glu, params)
    return h, a


def estmm(
    x: Tensor,
    g: Tensor,
    x_index: Tensor | None,
    g_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    into: Tensor | None = None,
) -> Tensor:
    """``dW[e]``, the sum of ``x[row]^T g[row]``: (E, N, K) for ``nk``, (E, K, N) for ``kn``.

    Args:
        into: what the result is added to, in its shape and the accumulators' type; it is returned.
    """
    a, a_index, b, b_index = (x, x_index, g, g_index) if layout == "kn" else (g, g_index, x, x_index)
    a, b = dense_rows(a), dense_rows(b)
    experts, m, n, device = offs.shape[0] - 1, a.shape[1], b.shape[1], a.device.index
    d = a.new_empty((experts, m, n)) if into is None else into
    if not (experts and m and n):
        return d
    bucket = row_bucket(row_count(a, a_index), experts)
    gathered = (a_index is not None, b_index is not None)
    key = EstmmKey(card_of(device), a.dtype, math_of(a.dtype), bucket, m, n, *gathered, aligned(a, b), into is not None)
    args = (_weight_piece(a, a_index, b, b_index, offs, top_k, d),)

    def run(tile: Tile | None) -> None:
        kernel, bm, bn = kernel_for(key, tile)
        launch(kernel, device, (experts * ceil_div(m, bm) * ceil_div(n, bn), 1, 1), args)

    if autotuning() and into is None:  # every timed run of a kernel that adds would add
        tune_key(key, device, run)
    run_built(key, run)
    return d


def esfk(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    x_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    has_bias: bool,
    into: Into | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dX, dW and db of one projection in one launch. No width may be zero.

    Args:
        into: what dW, and db if there is a bias, are added to; it is returned instead.
    """
    x, g, transpose = dense_rows(x), dense_rows(g), (layout if into is None else into.layout) == "nk"
    stored = _weight(weight, flip(layout))
    n, columns, k, experts, device = g.shape[0], g.shape[1], x.shape[1], offs.shape[0] - 1, g.device.index
    dx = g.new_empty((n, k))
    if into is not None:
        dw, db = into.weight, into.bias
    else:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        db = g.new_empty((experts, columns)) if has_bias else None
    fit = aligned(x, g) and not (stored.tensor.data_ptr() | (stored.stride | stored.expert) * g.element_size()) & 15
    static = (card_of(device), g.dtype, math_of(g.dtype), row_bucket(n, experts), k, columns)
    key = EsfkKey(*static, stored.layout, x_index is not None, transpose, has_bias, fit, into is not None)
    pointers = (g, stored.tensor, None, None, None, dx, None, None, None, offs)
    strides = (g.stride(0), stored.stride, stored.expert, k, 0, 0)
    rows = (pointers, _SIZES.pack(*strides, n, 0, k, columns, experts, *divisor(1), 0.0, 0.0))
    a, a_index, b, b_index = (g, None, x, x_index) if transpose else (x, x_index, g, None)
    args = (rows, _weight_piece(a, a_index, b, b_index, offs, top_k, dw), ((db,), b""))

    def run(tile: Tile | None) -> None:
        kernel, bm, bn = kernel_for(key, tile)
        weight_tiles = experts * ceil_div(dw.shape[1], bm) * ceil_div(dw.shape[2], bn)
        row_tiles = (n // bm + min(experts, n)) * ceil_div(k, bn)
        launch(kernel, device, (row_tiles + weight_tiles, 1, 1), args)

    if autotuning() and into is None:
        tune_key(key, device, run)
    run_built(key, run)
    return dx, dw, db


def _product(
    x: Tensor,
    weights: tuple[Tensor, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    d: Tensor | None,
    act: Tensor | None,
    inner: int,
    activation: str,
    glu: Glu,
    params: tuple[float, ...],
) -> None:
    """One launch of esmm. `inner` is the width of one glu half."""
    x = dense_rows(x)
    first, second = _weights(weights, layout)
    bias, bias_up = biases
    if bias is not None:
        bias, bias_up = bias.contiguous(), None if bias_up is None else bias_up.contiguous()
    n, k, experts, device = row_count(x, v), x.shape[1], offs.shape[0] - 1, x.device.index
    if n == 0 or inner == 0:
        return
    x_at, w_at, up_at = x.data_ptr(), first.tensor.data_ptr(), 0 if second is None else second.tensor.data_ptr()
    strides = (x.stride(0), first.stride, first.expert)
    steps = strides[0] | strides[1] | strides[2] | (inner if glu == "concat" and first.layout == "kn" else 0)
    key = EsmmKey(
        card_of(device),
        x.dtype,
        math_of(x.dtype),
        row_bucket(n, experts),
        k,
        inner,
        first.layout,
        v is not None,
        not (x_at | w_at | up_at | steps * x.element_size()) & 15,
        activation,
        glu,
        bias is not None,
        d is not None,
    )
    up = None if second is None else second.tensor
    pointers = (x, first.tensor, up, bias, bias_up, d, act, v, None, offs)
    sizes = (n, experts, *strides, 0 if d is None else d.shape[1], top_k, tuple(params))

    def run(tile: Tile | None) -> None:
        kernel, grid, shape = _esmm_launch(key, tile, *sizes)
        launch(kernel, device, grid, ((pointers, shape),))

    if autotuning():
        tune_key(key, device, run)
    run_built(key, run)


@cached_choice
def _esmm_launch(
    key: EsmmKey,
    tile: Tile | None,
    rows: int,
    experts: int,
    x_stride: int,
    w_stride: int,
    w_expert: int,
    width: int,
    top_k: int,
    params: tuple[float, ...],
) -> tuple[Kernel, tuple[int, int, int], bytes]:
    """Kernel, grid and all arguments but the pointers."""
    kernel, bm, step = kernel_for(key, tile)
    row_tiles = ceil_div(rows // bm + min(experts, rows), _GROUP) * _GROUP
    strides, sizes = (x_stride, w_stride, w_expert, width, 0, key.inner), (rows, 0, key.inner, key.depth, experts)
    shape = _SIZES.pack(*strides, *sizes, *divisor(top_k), *constants_of(key.activation, params))
    return kernel, (row_tiles * ceil_div(key.inner, step), 1, 1), shape


def _weight_piece(
    a: Tensor, a_index: Tensor | None, b: Tensor, b_index: Tensor | None, offs: Tensor, top_k: int, d: Tensor
) -> Piece:
    """hexa::GemmParams of ``d[e]``, the sum of ``a[row]^T b[row]``."""
    rows, (experts, m, n) = row_count(a, a_index), d.shape
    pointers = (a, b, None, None, None, d, None, a_index, b_index, offs)
    strides, sizes = (a.stride(0), b.stride(0), 0, d.stride(1), d.stride(0), 0), (rows, m, n, 0, experts)
    return pointers, _SIZES.pack(*strides, *sizes, *divisor(top_k), 0.0, 0.0)


def _weights(weights: tuple[Tensor, Tensor | None], layout: Layout) -> tuple[_Weight, _Weight | None]:
    """Both weights in one layout and with the same strides, without a copy wherever the strides allow."""
    first = _weight(weights[0], layout)
    if weights[1] is None:
        return first, None
    second = _weight(weights[1], layout)
    if first[1:] != second[1:]:
        first, second = _weight(weights[0].contiguous(), layout), _weight(weights[1].contiguous(), layout)
    return first, second


def _weight(weight: Tensor, layout: Layout) -> _Weight:
    expert, row, column = weight.stride()
    if column == 1 or weight.shape[2] == 1:
        return _Weight(weight, layout, row, expert)
    if row == 1 or weight.shape[1] == 1:  # stored transposed: the other layout, as it lies
        return _Weight(weight, flip(layout), column, expert)
    weight = weight.contiguous()
    return _Weight(weight, layout, weight.stride(1), weight.stride(0))


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
