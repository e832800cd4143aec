"""Quantisation of rows, columns and weights on CUDA, sums over quantised rows, and the activation's gradient of FP8 block compute.

Arguments and results are those of `hexa_fx.ops.table_fp8`. Bandwidth-bound: every operand is read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hexa_fx.codegen.family_rows_fp8 import ACTIVATE, COMBINE, QUANTIZE, THREADS, combining_blocks
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.calls import cuda_kernel, product
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.operands import DTYPES, aligned, constants_of, contiguous, dense_rows
from hexa_fx.cuda.planning import Operand, launch, planning_of
from hexa_fx.cuda.rows import combine_spec
from hexa_fx.formats.format import ceil_div
from hexa_fx.formats.fp8_scaling import BLOCK, group_count
from hexa_fx.ops.table_fp8 import (
    CombineFp8,
    EssFp8,
    GroupRowsFp8,
    QuantizeColumnsFp8,
    QuantizeRowsFp8,
    QuantizeWeightFp8,
    glu_of,
)

_CHUNK = 8
"""Numbers that a thread reads at a time."""

_THREADS_A_BLOCK = 16
"""Threads that share 128 numbers of a row."""

_COLUMNS_A_THREAD = 16
"""Of a row of bytes that is summed."""

TILES_A_BLOCK = 4
"""Tiles of 128 x 128 that a block of a group takes, one after the other."""


@cuda_kernel("quantize_rows_fp8")
def quantize_rows_fp8(o: QuantizeRowsFp8) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.table_fp8."""
    x, (q, s) = dense_rows(o.x), o.results()
    grid, sizes = (ceil_div(s.numel() * _THREADS_A_BLOCK, THREADS), 1, 1), _sizes(x, by_line=x.stride()[0])
    op, fit = "quantize_rows_binary" if o.binary else "quantize_rows", _fits(x)
    _quantize(op, x, grid, {"x": x, "q": q, "s": s}, sizes, fit)
    return q, s


@cuda_kernel("quantize_columns_fp8")
def quantize_columns_fp8(o: QuantizeColumnsFp8) -> tuple[Tensor, Tensor]:
    """A block has a group and a few tiles of columns. Blocks of the same columns follow one another: experts
    read the same rows, of which these columns stay in L2 meanwhile.
    """
    x, (q, s) = dense_rows(o.x), o.results()
    grid, sizes = _tiles(s), _sizes(x, x.stride()[0], o.offs.shape[0] - 1, o.top_k)
    _quantize("quantize_columns", x, grid, {"x": x, "v": o.v, "offs": o.offs, "q": q, "s": s}, sizes, _fits(x))
    return q, s


@cuda_kernel("group_rows_fp8")
def group_rows_fp8(o: GroupRowsFp8) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.table_fp8. As `quantize_columns_fp8`, of half the bytes."""
    x, xs, (q, s) = o.x.contiguous(), o.xs.contiguous(), o.results()
    grid, sizes = _tiles(s), _sizes(x, x.shape[1], o.offs.shape[0] - 1, o.top_k)
    _quantize("group_rows", s, grid, {"x": x, "x3": xs, "v": o.v, "offs": o.offs, "q": q, "s": s}, sizes)
    return q, s


def _sizes(x: Tensor, by_line: int, experts: int = 0, top_k: int = 1) -> dict[str, int]:
    """Of rows."""
    lines, columns = x.shape
    given = {"by_line": by_line, "by_column": 1, "lines": lines, "columns": columns, "experts": experts, "top_k": top_k}
    return given | _WHOLE


_WHOLE = {"line_halves": 1, "column_halves": 1}


def _tiles(s: Tensor) -> tuple[int, int, int]:
    """Blocks for groups with scales s, which take a few tiles each."""
    return s.shape[0], ceil_div(s.shape[1] // BLOCK, TILES_A_BLOCK), 1


class _Matrices(NamedTuple):
    """A weight as the kernel reads it: halves (lines, columns) of an expert's matrix, of strides in elements.

    Args:
        first, second: views that begin where the halves do; the second is the first of a weight that is whole.
        lines, columns: of a half. Columns lie next to each other if anything does.
        halves: how many, in lines and in columns: one of them is 1.
    """

    first: Tensor
    second: Tensor
    lines: int
    columns: int
    by_line: int
    by_column: int
    halves: tuple[int, int]


@cuda_kernel("quantize_weight_fp8")
def quantize_weight_fp8(o: QuantizeWeightFp8) -> None:
    """See hexa_fx.ops.table_fp8. Both orientations from one read, in the one that the weight lies in."""
    w, w3 = o.w, o.w3
    if not w.numel():
        return
    if o.layout == "kn":  # (E, N, K) as a view
        w, w3 = w.transpose(1, 2), None if w3 is None else w3.transpose(1, 2)
    if w3 is not None and w3.stride() != w.stride():
        w, w3 = w.contiguous(), w3.contiguous()
    turned = w.stride()[2] != 1 and w.stride()[1] == 1
    m = _matrices(w, w3, o.glu, turned)
    made = (o.q_t, o.s_t, o.q, o.s) if turned else (o.q, o.s, o.q_t, o.s_t)
    pointers = {"x": m.first, "x3": m.second, **dict(zip(("q", "s", "q_t", "s_t"), made))}
    sizes = {"by_expert": w.stride()[0], "by_line": m.by_line, "by_column": m.by_column, "lines": m.lines}
    sizes |= {"columns": m.columns, "experts": w.shape[0], "top_k": 1}
    sizes |= dict(zip(("line_halves", "column_halves"), m.halves))
    grid = (ceil_div(m.columns, BLOCK) * m.halves[1], ceil_div(m.lines, BLOCK) * m.halves[0], w.shape[0])
    _quantize("quantize_weight", w, grid, pointers, sizes, _fit(w, m))


def _matrices(w: Tensor, w3: Tensor | None, glu: str, turned: bool) -> _Matrices:
    """Of a weight (E, N, K). Columns of the matrices are those of the weight's K, or of its N if it is `turned`."""
    _, by_n, by_k = w.stride()
    n, k = w.shape[1:]
    whole, step = glu == "none", 2 if glu == "interleaved" else 1
    half = n if whole or glu == "split" else n // 2
    ahead = 0 if whole or w3 is not None else by_n * (1 if glu == "interleaved" else half)
    assert isinstance(w, Operand)
    second = w3 if w3 is not None else w.view_of((*w.shape[:1], half, k), w.strides, w.offset + ahead)
    count = 1 if whole else 2
    if turned:
        return _Matrices(w, second, k, half, by_k, step * by_n, (1, count))
    return _Matrices(w, second, half, k, step * by_n, by_k, (count, 1))


@cuda_kernel("combine_fp8")
def combine_fp8(o: CombineFp8) -> Tensor:
    """See hexa_fx.ops.table_fp8. A block for each token, of many as many as the card holds at a time."""
    out, weights = o.results(), contiguous(o.top_k_weights)
    spec = combine_spec(COMBINE, out, weights, o.top_k, ceil_div(o.columns, _COLUMNS_A_THREAD), aligned(out))
    pointers = {"y": o.y, "scales": o.ys, "weights": weights, "inv": o.inv, "routed": o.offs[-1:], "out": out}
    tokens = out.shape[0]
    blocks = min(tokens, combining_blocks(spec) * planning_of(out).card.multiprocessors)
    sizes = {"width": o.columns, "padded": o.y.shape[1], "top_k": o.top_k, "tokens": tokens}
    launch(o.y, spec, (blocks, 1, 1), **pointers, **sizes)
    return out


@cuda_kernel("ess_fp8")
def ess_fp8(o: EssFp8) -> Tensor:
    """See hexa_fx.ops.table_fp8. A warp has a column of an expert."""
    y, g, gs, offs = o.results(), o.g.contiguous(), o.gs.contiguous(), o.offs
    experts, width = y.shape
    grid, sizes = (
        (width // (THREADS // 32), experts, 1),
        {"by_column": 1, "columns": width, "experts": experts, "top_k": 1},
    )
    _quantize("ess", gs, grid, {"offs": offs, "q": g, "s": gs, "sum": y}, sizes | _WHOLE)
    return y


class Gradient(NamedTuple):
    """What an activation's gradient is computed from, of the operands of `hexa_fx.ops.table_fp8.EsmmActBackwardFp8`.

    Args:
        da: (n, I') in bfloat16.
        weights: float32 by slot, or None for 1.
    """

    da: Tensor
    h: Tensor
    hs: Tensor
    weights: Tensor | None
    v: Tensor
    offs: Tensor
    activation: str
    gated: bool
    params: tuple[float, ...]


class Results(NamedTuple):
    """That operator's results; None for those that are not wanted."""

    dh: Tensor | None
    dhs: Tensor | None
    dh_t: Tensor | None
    dhs_t: Tensor | None
    a_t: Tensor | None
    at_scales: Tensor | None
    dots: Tensor | None


@product
def activation_gradient(o: Gradient, into: Results) -> None:
    """One launch: every group of 128 rows of an expert x 128 columns is read once."""
    (n, width), experts = o.da.shape, o.offs.shape[0] - 1
    static: dict[str, Any] = {"activation": o.activation, "glu": glu_of(o.gated)}
    spec = KernelSpec(ACTIVATE, "activate_backward", _converting(o.da), **static)
    grid = (group_count(n, experts), ceil_div(width // BLOCK, TILES_A_BLOCK), 1)
    given = {"da": o.da, "h": o.h, "hs": o.hs, "weights": o.weights, "v": o.v, "offs": o.offs, **into._asdict()}
    constants = constants_of(o.activation, o.params)
    launch(o.da, spec, grid, **given, experts=experts, columns=width, act_params=constants)


def _quantize(
    op: str,
    x: Tensor,
    grid: tuple[int, int, int],
    pointers: dict[str, Any],
    sizes: dict[str, int],
    fit: bool = True,
) -> None:
    """One launch for numbers of x's type. fit: whether chunks of it can be loaded at once."""
    spec = KernelSpec(QUANTIZE, op, _converting(x), dtype=DTYPES[x.dtype], aligned=fit)
    launch(x, spec, grid, **pointers, **sizes)


def _fits(x: Tensor) -> bool:
    return aligned(x) and x.shape[1] % _CHUNK == 0


def _fit(x: Tensor, m: _Matrices) -> bool:
    """Whether every line of both halves begins at a multiple of 16 bytes and is whole chunks."""
    low = m.first.data_ptr() | m.second.data_ptr() | (x.stride()[0] | m.by_line) * x.element_size()
    return m.by_column == 1 and m.columns % _CHUNK == 0 and not low & 15


def _converting(x: Tensor) -> int:
    """The architecture of a call's card, which has to convert to e4m3."""
    arch = planning_of(x).card.arch
    if arch < 89:
        raise Unsupported(f"sm_{arch}; conversion to e4m3 needs an sm_89 or newer")
    return arch
