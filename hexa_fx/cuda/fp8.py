"""The operators of FP8 block compute: products by block_gemm_sm90, and bandwidth-bound ones, which read every operand once:
quantisation of rows, columns and weights, sums over quantised rows, and the activation's gradient.

Arguments and results are those of `hexa_fx.ops.table_fp8`. Quantised operands are contiguous and their widths multiples of 128, so
that a launch follows from sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family_block_sm90 import FAMILY, PART, SCALES, TILE_K, TILE_M, TILE_N
from hexa_fx.codegen.family_gemm_sm90 import CLUSTER_ROWS, MAX_EXPERTS, TABLES
from hexa_fx.codegen.family_rows import ACTIVATE, COMBINE, QUANTIZE, THREADS, combining_blocks
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.choosing import Card, card_of
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.gemm_sm90 import FLOATS, Maps, chunk_map, launch_persistent, rows_map, weight_map
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES, aligned, constants_of, contiguous, dense_rows, divided_by
from hexa_fx.cuda.places import listed, parts_of, places_of
from hexa_fx.cuda.planning import Operand, Piece, launch, planning_of
from hexa_fx.cuda.rows import combine_spec
from hexa_fx.formats.format import ceil_div
from hexa_fx.formats.fp8_scaling import BLOCK, group_count
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import table_fp8 as table
from hexa_fx.ops.table_layers import parameters

_CHUNK = 8
"""Numbers that a thread reads at a time."""

_THREADS_A_BLOCK = 16
"""Threads that share 128 numbers of a row."""

_COLUMNS_A_THREAD = 16
"""Of a row of bytes that is summed."""

TILES_A_BLOCK = 4
"""Tiles of 128 x 128 that a block of a group takes, one after the other."""


@cuda_kernel("quantize_rows_fp8")
def quantize_rows_fp8(o: table.QuantizeRowsFp8) -> tuple[Tensor, Tensor]:
    x, (q, s) = dense_rows(o.x), o.results()
    grid, sizes = (ceil_div(s.numel() * _THREADS_A_BLOCK, THREADS), 1, 1), _sizes(x, by_line=x.stride()[0])
    op, fit = "quantize_rows_binary" if o.binary else "quantize_rows", _fits(x)
    _quantize(op, x, grid, {"x": x, "q": q, "s": s}, sizes, fit)
    return q, s


@cuda_kernel("quantize_columns_fp8")
def quantize_columns_fp8(o: table.QuantizeColumnsFp8) -> tuple[Tensor, Tensor]:
    """A block has a group and a few tiles of columns. Blocks of the same columns follow one another: experts
    read the same rows, of which these columns stay in L2 meanwhile.
    """
    x, (q, s) = dense_rows(o.x), o.results()
    grid, sizes = _tiles(s), _sizes(x, x.stride()[0], o.offs.shape[0] - 1, o.top_k)
    _quantize("quantize_columns", x, grid, {"x": x, "v": o.v, "offs": o.offs, "q": q, "s": s}, sizes, _fits(x))
    return q, s


@cuda_kernel("group_rows_fp8")
def group_rows_fp8(o: table.GroupRowsFp8) -> tuple[Tensor, Tensor]:
    """As `quantize_columns_fp8`, of half the bytes."""
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


@cuda_kernel("quantize_weight_fp8")
def quantize_weight_fp8(o: table.QuantizeWeightFp8) -> None:
    """Both orientations from one read, in the one that the weight lies in: as an expert's matrix, or turned. Gate and up are halves
    of its lines or of its columns, of which the second may be a matrix of its own.
    """
    w, up = o.w, o.w3
    if not w.numel():
        return
    if o.layout == "kn":  # (E, N, K) as a view
        w, up = w.transpose(1, 2), None if up is None else up.transpose(1, 2)
    if up is not None and up.stride() != w.stride():
        w, up = w.contiguous(), up.contiguous()
    assert isinstance(w, Operand)
    (experts, n, k), (by_expert, by_n, by_k) = w.shape, w.stride()
    halves, step = 1 if o.glu == "none" else 2, 2 if o.glu == "interleaved" else 1
    half = n // 2 if o.glu in ("concat", "interleaved") else n
    ahead = 0 if halves == 1 or parts_of(w) > 1 else by_n * (1 if step == 2 else half)
    second = up if up is not None else w.view_of((experts, half, k), w.strides, w.offset + ahead)
    lines, columns, by_line, by_column, of_lines, of_columns = half, k, step * by_n, by_k, halves, 1
    made = dict(zip(("q", "s", "q_t", "s_t"), (o.q, o.s, o.q_t, o.s_t)))
    if by_k != 1 and by_n == 1:  # turned
        lines, columns, by_line, by_column, of_lines, of_columns = k, half, by_k, step * by_n, 1, halves
        made = dict(zip(("q_t", "s_t", "q", "s"), (o.q, o.s, o.q_t, o.s_t)))
    sizes = {"by_expert": by_expert, "by_line": by_line, "by_column": by_column, "lines": lines, "columns": columns}
    sizes |= {"experts": experts, "top_k": 1, "line_halves": of_lines, "column_halves": of_columns}
    grid = (ceil_div(columns, BLOCK) * of_columns, ceil_div(lines, BLOCK) * of_lines, experts)
    low = w.data_ptr() | second.data_ptr() | (by_expert | by_line) * w.element_size()
    fit = by_column == 1 and columns % _CHUNK == 0 and not low & 15  # of every line of both halves
    _quantize("quantize_weight", w, grid, {"x": w, "x3": second, **made}, sizes, fit, *places_of(w, up))


@cuda_kernel("combine_fp8")
def combine_fp8(o: table.CombineFp8) -> Tensor:
    """A block for each token, of many as many as the card holds at a time."""
    out, weights = o.results(), contiguous(o.top_k_weights)
    spec = combine_spec(COMBINE, out, weights, o.top_k, ceil_div(o.columns, _COLUMNS_A_THREAD), aligned(out))
    pointers = {"y": o.y, "scales": o.ys, "weights": weights, "inv": o.inv, "routed": o.offs[-1:], "out": out}
    tokens = out.shape[0]
    blocks = min(tokens, combining_blocks(spec) * planning_of(out).card.multiprocessors)
    sizes = {"width": o.columns, "padded": o.y.shape[1], "top_k": o.top_k, "tokens": tokens}
    launch(o.y, spec, (blocks, 1, 1), **pointers, **sizes)
    return out


@cuda_kernel("ess_fp8")
def ess_fp8(o: table.EssFp8) -> Tensor:
    """A warp has a column of an expert."""
    y, g, gs, offs = o.results(), o.g.contiguous(), o.gs.contiguous(), o.offs
    experts, width = y.shape
    sizes = {"by_column": 1, "columns": width, "experts": experts, "top_k": 1}
    _quantize(
        "ess", gs, (width // (THREADS // 32), experts, 1), {"offs": offs, "q": g, "s": gs, "sum": y}, sizes | _WHOLE
    )
    return y


_RESULTS = ("dh", "dhs", "dh_t", "dhs_t", "a_t", "at_scales", "dots")
"""Of `hexa_fx.ops.table_fp8.EsmmActBackwardFp8`."""


def activation_gradient(o: table.EsmmActBackwardFp8, into: list[Tensor | None]) -> None:
    """One launch: every group of 128 rows of an expert x 128 columns is read once.

    Of the operands dy is the gradient of a, (n, I') in bfloat16, and routing weights are float32 by slot; of the results those that
    are not wanted are None.
    """
    da, (n, width), experts = o.dy, o.dy.shape, o.offs.shape[0] - 1
    static: dict[str, Any] = {"activation": o.activation, "glu": table.glu_of(o.gated)}
    spec = KernelSpec(ACTIVATE, "activate_backward", _converting(da), **static)
    grid = (group_count(n, experts), ceil_div(width // BLOCK, TILES_A_BLOCK), 1)
    given = {"da": da, "h": o.h, "hs": o.hs, "weights": o.top_k_weights, "v": o.v, "offs": o.offs}
    given |= dict(zip(_RESULTS, into, strict=True))
    constants = constants_of(o.activation, o.params)
    launch(da, spec, grid, **given, experts=experts, columns=width, act_params=constants)


def _quantize(
    op: str,
    x: Tensor,
    grid: tuple[int, int, int],
    pointers: dict[str, Any],
    sizes: dict[str, int],
    fit: bool = True,
    *more: Piece,
) -> None:
    """One launch for numbers of x's type. fit: whether chunks of it can be loaded at once. more: what its arguments end with."""
    spec = KernelSpec(QUANTIZE, op, _converting(x), dtype=DTYPES[x.dtype], aligned=fit)
    launch(x, spec.with_options(**dict(listed(x))), grid, *more, **pointers, **sizes)


def _fits(x: Tensor) -> bool:
    return aligned(x) and x.shape[1] % _CHUNK == 0


def _converting(x: Tensor) -> int:
    """The architecture of a call's card, which has to convert to e4m3."""
    arch = planning_of(x).card.arch
    if arch < 89:
        raise Unsupported(f"sm_{arch}; conversion to e4m3 needs an sm_89 or newer")
    return arch


STAGES, STAGES_OF_BYTES = 3, 4
"""Of shared memory, 48 KiB each. With three there is room for a tile's results of 16 bits, which leave while the next one is
multiplied; results in bytes need less.
"""

GROUP_M = 8
"""Tiles along M that share a weight tile in L2, as the bf16 kernels' rule has it."""

_ROW_BOX = 64


def cluster_of(rows: int, experts: int) -> int:
    """Blocks that share a weight tile: fewer reads from L2, less power."""
    return 2 if rows > CLUSTER_ROWS * experts else 1


def why_not(o: table.MoeFfnFp8Forward) -> str:
    """Why these kernels cannot take a call of ``hexa::moe_ffn_fp8``; empty if they can."""
    odd = next((size for size in (o.input_size, o.output_size) if size * o.x.element_size() % 16), 0)
    rows = f"rows of {odd} numbers; kernels write them in whole 16 bytes" if odd else ""
    return _no_products(card_of(o.x.device.index), o.w1.shape[0]) or rows


_SAVED = 128 << 20
"""Bytes of weights that FP8 has to save reading: its launches take about 31 us more than those of few tokens in 16 bits."""
_WORK = 1 << 36
"""Multiply-adds that keep a device busy for longer than a host takes for a layer of an eager model. Its host takes 30 to 60 us
longer for a layer in FP8; replays of a CUDA graph take none.
"""


def is_few(o: table.MoeFfnFp8Forward, captured: bool) -> bool:
    """Whether a call of ``hexa::moe_ffn_fp8`` without gradients is faster in the dtype of its tokens.

    Packed weights are read in as many bytes either way, which takes as long with up to a row an expert. Of others FP8 saves half of
    the bytes, of each expert that a slot may reach.

    Args:
        captured: whether a CUDA graph has the call, so that no host is waited for. Of listed experts it would quantise all in every
            replay.
    """
    slots, w1, w3, dtype = o.top_k_index.numel(), o.w1, o.w3, o.x.dtype
    if isinstance(w1, QuantizedWeight):
        return slots <= w1.shape[0]
    if dtype not in FLOATS:
        return False
    for each in parameters(o):
        if each is not None and each.dtype != dtype:
            return False
    numbers = w1.numel() + o.w2.numel() + (0 if w3 is None else w3.numel())
    return slots * numbers < (_SAVED if captured and isinstance(w1, Tensor) else _WORK) * w1.shape[0]


def _no_products(card: Card, experts: int) -> str:
    """Why a card has no products in FP8 of so many experts; empty if it has."""
    if not card.is_hopper:
        return f"FP8 products need an sm_90, this card is an sm_{card.family_arch}"
    return f"{experts} experts; the kernels' tables hold {MAX_EXPERTS}" if experts > MAX_EXPERTS else ""


@cuda_kernel("esmm_act_fp8")
def esmm_act_fp8(o: table.EsmmActFp8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch: the epilogue quantises."""
    h, hs, a, a_scales = results = o.results()
    out, scales = (h, hs) if o.keep_h else (None, None)
    _rows(o, out, scales, (a, a_scales))
    return results


@cuda_kernel("esmm_fp8")
def esmm_fp8(o: table.EsmmFp8) -> tuple[Tensor, Tensor]:
    """One launch."""
    y, ys = o.results()
    _rows(o.to(table.EsmmActFp8, top_k=1, **_PLAIN), y, ys)
    return y, ys


_PLAIN = {"activation": "none", "gated": False, "params": ()}


def _rows(
    o: table.EsmmActFp8, out: Tensor | None, scales: Tensor | None, activated: tuple[Tensor, Tensor] | None = None
) -> None:
    """One launch of a row product: to ``out`` if it is wanted, with the scales of results in bytes, and what is ``activated``."""
    act, act_scales = activated or (None, None)
    result = out if act is None else act
    assert result is not None
    (n, columns), (width, depth) = result.shape, o.w.shape[1:]
    if not n:
        return
    gather = o.v is not None
    fields = {"activation": o.activation, "glu": table.glu_of(o.gated), "bias": o.bias is not None, "gather": gather}
    if act is None:
        kernel = _kernel(o.x, o.w, n, "esmm", DTYPES[result.dtype], fields)
    else:
        kernel = _kernel(o.x, o.w, n, "esmm_act", None, fields, ("store_h", out is not None))
    maps = Maps(
        rows=None if gather else rows_map(o.x, _ROW_BOX),
        weight=weight_map(o.w, "nk", PART),
        out=None if out is None else chunk_map(out),
        act=None if act is None else chunk_map(act),
    )
    sizes = {"n": n, "a_ld": depth, "out_ld": width, "act_ld": 0 if act is None else columns}
    sizes |= {"K": depth, "N": columns, "bias_ld": width}
    tensors = {"a": o.x, "out": out, "act": act, "bias": contiguous(o.bias), "v": o.v}
    given = {"a_scale": o.xs, "w_scale": o.ws, "h_scale": scales, "act_scale": act_scales}
    more = {**divided_by(o.top_k), "act_params": constants_of(o.activation, o.params)}
    launch_persistent(kernel, o.offs, maps, SCALES.piece(**given), group_m=GROUP_M, **sizes, **tensors, **more)


@cuda_kernel("esmm_act_backward_fp8")
def esmm_act_backward_fp8(o: table.EsmmActBackwardFp8) -> tuple[Tensor, ...]:
    """Two launches: da is written as bf16, whose rounding is finer than e4m3's by five bits, since an epilogue
    that turned a tile round would keep the tensor cores waiting for as long as they multiply.
    """
    results, (n, inner) = o.results(), (o.v.shape[0], o.w.shape[1])
    if n and any(o.needs):
        da = o.dy.new_empty((n, inner), dtype=torch.bfloat16)
        _rows(o.to(table.EsmmActFp8, x=o.dy, xs=o.dys, **_PLAIN), da, None)
        weights = None if o.top_k_weights is None else o.top_k_weights.reshape(-1).float()
        if o.needs[-1]:
            planning_of(da).run(Tensor.zero_, results[-1])
        given = o._replace(dy=da, top_k_weights=weights)
        activation_gradient(given, into=[t if t.numel() else None for t in results])
    return results


@cuda_kernel("estmm_fp8")
def estmm_fp8(o: table.EstmmFp8) -> None:
    """One launch, and a second pass where the copy engine cannot write to ``out``."""
    out, held, (p, ps, q, qs) = o.out, o.out, (o.x, o.xs, o.g, o.gs)
    turned = out.stride()[2] != 1 and out.stride()[1] == 1
    if turned:
        held, (p, ps, q, qs) = out.transpose(1, 2), (o.g, o.gs, o.x, o.xs)
    beside = held.stride()[2] != 1 or not aligned(held)
    experts, rows, columns = held.shape
    if beside:
        lines = 16 // out.element_size()
        held = out.new_empty((experts, rows, ceil_div(columns, lines) * lines))
        held = held.view_of((experts, rows, columns), held.strides, held.offset)  # type: ignore[attr-defined]
    if not o.x.shape[0] or not out.numel():
        if not o.add:
            planning_of(out).run(Tensor.zero_, out)
        return
    option = "shared", o.shared and not turned
    kernel = _kernel(o.x, out, 0, "estmm", DTYPES[out.dtype], {}, option, adds=o.add and not beside)
    maps = Maps(p=weight_map(p, "nk", TILE_M), q=weight_map(q, "nk", PART), grad=weight_map(held, "nk", 16))
    sizes = {"n": o.x.shape[0] * BLOCK, "R": rows, "C": columns}
    scales = {"p_scale": ps, "q_scale": qs, "p_scale_ld": ps.stride()[0], "q_scale_ld": qs.stride()[0]}
    launch_persistent(kernel, o.offs, maps, SCALES.piece(**scales), group_m=GROUP_M, dw=held, **sizes)
    if beside:
        planning_of(out).run(Tensor.add_ if o.add else Tensor.copy_, out, held.transpose(1, 2) if turned else held)


def _kernel(
    x: Tensor,
    w: Tensor,
    rows: int,
    op: str,
    out: DataType | None,
    fields: dict[str, Any],
    *options: tuple[str, bool],
    adds: bool = False,
) -> Kernel:
    """The kernel of a product whose experts are those of ``w``."""
    if reason := _no_products(planning_of(x).card, w.shape[0]):
        raise Unsupported(reason)
    tables = next(size for size in TABLES if w.shape[0] <= size)
    cluster, stages = cluster_of(rows, w.shape[0]), STAGES_OF_BYTES if out is DataType.u8 else STAGES
    spec = KernelSpec(FAMILY, op, 90, DataType.e4m3, out, bm=TILE_M, bn=TILE_N, bk=TILE_K, stages=stages, **fields)
    shared: dict[str, Option] = {"cluster": cluster} if cluster > 1 else {}
    spec = spec.with_options(experts=tables, **shared, **dict(options))
    return kernel_of(spec.adding(out) if adds else spec)
