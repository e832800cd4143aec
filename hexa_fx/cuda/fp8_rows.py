"""Quantisation of rows, columns and weights on CUDA, sums over quantised rows, and the activation's gradient of FP8 block compute.

Arguments and results are those of `hexa_fx.ops.fp8`. Bandwidth-bound: every operand is read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family_rows import COMBINE_THREADS, UNROLLED_TOP_K
from hexa_fx.codegen.family_rows_fp8 import ACTIVATE, COMBINE, QUANTIZE, THREADS
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.calls import cuda_kernel, product
from hexa_fx.cuda.choosing import cached_choice
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES, aligned, ceil_div, constants_of, dense_rows, numbers_of
from hexa_fx.cuda.planning import Operand, planning_of
from hexa_fx.formats.fp8_scaling import BLOCK, group_count
from hexa_fx.ops.fp8 import CombineFp8, EssFp8, glu_of
from hexa_fx.ops.fp8_quantizing import QuantizeColumnsFp8, QuantizeRowsFp8, QuantizeWeightFp8

_QUANTIZE, _ACTIVATE, _COMBINE = (numbers_of(get_family(name).args) for name in (QUANTIZE, ACTIVATE, COMBINE))
_CHUNK = 8
"""Numbers that a thread reads at a time."""

_THREADS_A_BLOCK = 16
"""Threads that share 128 numbers of a row."""

_COLUMNS_A_THREAD = 16
"""Of a row of bytes that is summed."""

TILES_A_BLOCK = 4
"""Tiles of 128 x 128 that a block of a group takes, one after the other."""


@cuda_kernel("quantize_rows_fp8")
def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.fp8."""
    x = dense_rows(x)
    q, s = QuantizeRowsFp8(x).results()
    numbers = _QUANTIZE.pack(0, x.stride()[0], 1, *x.shape, 0, 1, 1, 1)
    grid = (ceil_div(s.numel() * _THREADS_A_BLOCK, THREADS), 1, 1)
    _quantize("quantize_rows", x, grid, (x, None, None, None, q, s, None, None, None), numbers)
    return q, s


@cuda_kernel("quantize_columns_fp8")
def quantize_columns_fp8(*args: Any) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.fp8. A block has a group and a few tiles of columns. Blocks of the same columns follow one another: experts
    read the same rows, of which these columns stay in L2 meanwhile.
    """
    o = QuantizeColumnsFp8(*args)
    x, (q, s) = dense_rows(o.x), o.results()
    (groups, width), experts = s.shape, o.offs.shape[0] - 1
    numbers = _QUANTIZE.pack(0, x.stride()[0], 1, *x.shape, experts, o.top_k, 1, 1)
    grid = (groups, ceil_div(width // BLOCK, TILES_A_BLOCK), 1)
    op = "quantize_columns_shared" if o.shared else "quantize_columns"
    _quantize(op, x, grid, (x, None, o.v, o.offs, q, s, None, None, None), numbers)
    return q, s


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
def quantize_weight_fp8(*args: Any) -> None:
    """See hexa_fx.ops.fp8. Both orientations from one read, in the one that the weight lies in."""
    o = QuantizeWeightFp8(*args)
    w, w3 = o.w, o.w3
    if not w.numel():
        return
    if o.layout == "kn":  # (E, N, K) as a view
        w, w3 = w.transpose(1, 2), None if w3 is None else w3.transpose(1, 2)
    if w3 is not None and w3.stride() != w.stride():
        w, w3 = w.contiguous(), w3.contiguous()
    turned = w.stride()[2] != 1 and w.stride()[1] == 1
    m = _matrices(w, w3, o.glu, turned)
    made = (o.q_t, o.s_t, o.q, o.s) if turned else o[:4]
    numbers = _QUANTIZE.pack(w.stride()[0], m.by_line, m.by_column, m.lines, m.columns, w.shape[0], 1, *m.halves)
    grid = (ceil_div(m.columns, BLOCK) * m.halves[1], ceil_div(m.lines, BLOCK) * m.halves[0], w.shape[0])
    _quantize("quantize_weight", w, grid, (m.first, m.second, None, None, *made, None), numbers, m)


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
def combine_fp8(*args: Any) -> Tensor:
    """See hexa_fx.ops.fp8. One block a token."""
    o = CombineFp8(*args)
    out, planning = o.results(), planning_of(o.y)
    weights = None if o.top_k_weights is None else o.top_k_weights.contiguous()
    kernel = _combine_kernel(
        planning.card.arch, o.dtype, None if weights is None else weights.dtype, o.columns, o.top_k, aligned(out)
    )
    numbers = _COMBINE.pack(o.columns, o.y.shape[1], o.top_k)
    planning.launch(kernel, (out.shape[0], 1, 1), (((o.y, o.ys, weights, o.inv, o.offs[-1:], out), numbers),))
    return out


@cached_choice
def _combine_kernel(
    arch: int, dtype: torch.dtype, weights: torch.dtype | None, columns: int, top_k: int, fit: bool
) -> Kernel:
    # The block that wastes the fewest threads, and the largest of equals.
    lines = ceil_div(columns, _COLUMNS_A_THREAD)
    threads = min(COMBINE_THREADS, key=lambda t: (ceil_div(lines, t) * t, -t))
    spec = KernelSpec(COMBINE, "combine", arch, dtype=DTYPES[dtype], scale=weights is not None, aligned=fit)
    unrolled = top_k if top_k in UNROLLED_TOP_K else 0
    name = "f32" if weights is None else DTYPES[weights].name
    return kernel_of(spec.with_options(top_k=unrolled, threads=threads, weights=name))


@cuda_kernel("ess_fp8")
def ess_fp8(g: Tensor, gs: Tensor, offs: Tensor) -> Tensor:
    """See hexa_fx.ops.fp8. A warp has a column of an expert."""
    y = EssFp8(g, gs, offs).results()
    experts, width = y.shape
    g, gs = g.contiguous(), gs.contiguous()
    numbers = _QUANTIZE.pack(0, 0, 1, 0, width, experts, 1, 1, 1)
    grid = (width // (THREADS // 32), experts, 1)
    _quantize("ess", gs, grid, (None, None, None, offs, g, gs, None, None, y), numbers)
    return y


class Gradient(NamedTuple):
    """What an activation's gradient is computed from, of the operands of `hexa_fx.ops.fp8.EsmmActBackwardFp8`.

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
    planning, (n, width) = planning_of(o.da), o.da.shape
    experts = o.offs.shape[0] - 1
    kernel = _activate_kernel(planning.card.arch, o.activation, o.gated)
    numbers = _ACTIVATE.pack(experts, width, *constants_of(o.activation, tuple(o.params)))
    grid = (group_count(n, experts), ceil_div(width // BLOCK, TILES_A_BLOCK), 1)
    planning.launch(kernel, grid, (((*o[:6], *into), numbers),))


def _quantize(
    op: str,
    x: Tensor,
    grid: tuple[int, int, int],
    pointers: tuple[Any, ...],
    numbers: bytes,
    m: _Matrices | None = None,
) -> None:
    """One launch for numbers of x's type."""
    planning = planning_of(x)
    fit = aligned(x) and x.shape[1] % _CHUNK == 0 if m is None else _fit(x, m)
    planning.launch(_quantize_kernel(op, planning.card.arch, x.dtype, fit), grid, ((pointers, numbers),))


def _fit(x: Tensor, m: _Matrices) -> bool:
    """Whether every line of both halves begins at a multiple of 16 bytes and is whole chunks."""
    low = m.first.data_ptr() | m.second.data_ptr() | (x.stride()[0] | m.by_line) * x.element_size()
    return m.by_column == 1 and m.columns % _CHUNK == 0 and not low & 15


@cached_choice
def _quantize_kernel(op: str, arch: int, dtype: torch.dtype, fit: bool) -> Kernel:
    _check_arch(arch)
    return kernel_of(KernelSpec(QUANTIZE, op, arch, dtype=DTYPES[dtype], aligned=fit))


@cached_choice
def _activate_kernel(arch: int, activation: str, gated: bool) -> Kernel:
    _check_arch(arch)
    return kernel_of(KernelSpec(ACTIVATE, "activate_backward", arch, activation=activation, glu=glu_of(gated)))


def _check_arch(arch: int) -> None:
    if arch < 89:
        raise Unsupported(f"sm_{arch}; conversion to e4m3 needs an sm_89 or newer")
