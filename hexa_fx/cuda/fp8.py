"""The operators of FP8 block compute on Hopper: products by block_gemm_sm90, the rest in `fp8_rows`.

Arguments and results are those of `hexa_fx.ops.table_fp8`. Quantised operands are contiguous and their widths multiples of 128, so
that a launch follows from sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family_block_sm90 import FAMILY, PART, SCALES, TILE_K, TILE_M, TILE_N
from hexa_fx.codegen.family_gemm_sm90 import ARGS, MAX_EXPERTS, TABLES
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.codegen.tiles_sm90 import CLUSTER_ROWS
from hexa_fx.cuda.arguments_sm90 import Maps, chunk_map, rows_map, weight_map
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.choosing import Card, card_of
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.fp8_rows import Gradient, Results, activation_gradient
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES, aligned, constants_of, contiguous, divided_by
from hexa_fx.cuda.planning import TileQueue, planning_of
from hexa_fx.formats.format import ceil_div
from hexa_fx.formats.fp8_scaling import BLOCK
from hexa_fx.ops.table_fp8 import EsmmActBackwardFp8, EsmmActFp8, EsmmFp8, EstmmFp8, MoeFfnFp8Forward, glu_of

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


def why_not(o: MoeFfnFp8Forward) -> str:
    """Why these kernels cannot take a call of ``hexa::moe_ffn_fp8``; empty if they can."""
    odd = next((size for size in (o.input_size, o.output_size) if size * o.x.element_size() % 16), 0)
    rows = f"rows of {odd} numbers; kernels write them in whole 16 bytes" if odd else ""
    return _no_products(card_of(o.x.device.index), o.w1.shape[0]) or rows


def _no_products(card: Card, experts: int) -> str:
    """Why a card has no products in FP8 of so many experts; empty if it has."""
    if not card.is_hopper:
        return f"FP8 products need an sm_90, this card is an sm_{card.family_arch}"
    return f"{experts} experts; the kernels' tables hold {MAX_EXPERTS}" if experts > MAX_EXPERTS else ""


class _Activated(NamedTuple):
    """What becomes of a first projection: the activation, and where its values and their scales go."""

    act: Tensor
    scales: Tensor
    activation: str
    gated: bool
    params: Sequence[float]


@cuda_kernel("esmm_act_fp8")
def esmm_act_fp8(o: EsmmActFp8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.table_fp8. One launch: the epilogue quantises."""
    h, hs, a, a_scales = results = o.results()
    out, scales = (h, hs) if o.keep_h else (None, None)
    activated = _Activated(a, a_scales, o.activation, o.gated, o.params)
    _rows(o.to(EsmmFp8), o.v, o.top_k, out, scales, activated)
    return results


@cuda_kernel("esmm_fp8")
def esmm_fp8(o: EsmmFp8) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.table_fp8. One launch."""
    y, ys = o.results()
    _rows(o, None, 1, y, ys)
    return y, ys


def _rows(
    o: EsmmFp8,
    v: Tensor | None,
    top_k: int,
    out: Tensor | None,
    scales: Tensor | None,
    activated: _Activated | None = None,
) -> None:
    """One launch of a row product, of rows in expert order or gathered by v: to ``out`` if it is wanted, with the scales of results
    in bytes, and to what is ``activated``.
    """
    act, act_scales, activation, gated, params = activated or (None, None, "none", False, ())
    result = out if act is None else act
    assert result is not None
    (n, columns), (width, depth) = result.shape, o.w.shape[1:]
    if not n:
        return
    fields = {"activation": activation, "glu": glu_of(gated), "bias": o.bias is not None, "gather": v is not None}
    if act is None:
        kernel = _kernel(o.x, o.w, n, "esmm", DTYPES[result.dtype], fields)
    else:
        kernel = _kernel(o.x, o.w, n, "esmm_act", None, fields, ("store_h", out is not None))
    maps = Maps(
        rows=None if v is not None else rows_map(o.x, _ROW_BOX),
        weight=weight_map(o.w, "nk", PART),
        out=None if out is None else chunk_map(out),
        act=None if act is None else chunk_map(act),
    )
    sizes = {"n": n, "a_ld": depth, "out_ld": width, "act_ld": 0 if act is None else columns}
    sizes |= {"K": depth, "N": columns, "bias_ld": width}
    tensors = {"a": o.x, "out": out, "act": act, "bias": contiguous(o.bias), "v": v}
    given = {"a_scale": o.xs, "w_scale": o.ws, "h_scale": scales, "act_scale": act_scales}
    more = {**divided_by(top_k), "act_params": constants_of(activation, params)}
    _launch(kernel, o.offs, maps, given, **sizes, **tensors, **more)


@cuda_kernel("esmm_act_backward_fp8")
def esmm_act_backward_fp8(o: EsmmActBackwardFp8) -> tuple[Tensor, ...]:
    """Two launches: da is written as bf16, whose rounding is finer than e4m3's by five bits, since an epilogue
    that turned a tile round would keep the tensor cores waiting for as long as they multiply.
    """
    results, (n, inner) = o.results(), (o.v.shape[0], o.w.shape[1])
    if n and any(o.needs):
        da = o.dy.new_empty((n, inner), dtype=torch.bfloat16)
        _rows(o.to(EsmmFp8, x=o.dy, xs=o.dys), o.v, o.top_k, da, None)
        weights = None if o.top_k_weights is None else o.top_k_weights.reshape(-1).float()
        given = Gradient(da, o.h, o.hs, weights, o.v, o.offs, o.activation, o.gated, tuple(o.params))
        activation_gradient(given, into=Results(*[t if t.numel() else None for t in results]))
    return results


@cuda_kernel("estmm_fp8")
def estmm_fp8(o: EstmmFp8) -> None:
    """See hexa_fx.ops.table_fp8. One launch, and a second pass where the copy engine cannot write to ``out``."""
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
    _launch(kernel, o.offs, maps, scales, dw=held, **sizes)
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
    spec = KernelSpec(
        FAMILY, op, 90, dtype=DataType.e4m3, out_dtype=out, bm=TILE_M, bn=TILE_N, bk=TILE_K, stages=stages, **fields
    )
    shared: dict[str, Option] = {"cluster": cluster} if cluster > 1 else {}
    spec = spec.with_options(experts=tables, **shared, **dict(options))
    return kernel_of(spec.adding() if adds else spec)


def _launch(
    kernel: Kernel,
    offs: Tensor,
    maps: Maps,
    scales: dict[str, Any],
    **fields: Any,
) -> None:
    """One block a multiprocessor, in whole clusters; they take tiles from a queue."""
    planning = planning_of(offs)
    piece = ARGS.piece(offs=offs, experts=offs.shape[0] - 1, queue=TileQueue(), group_m=GROUP_M, **fields)
    added = SCALES.piece(**scales)
    cluster = int(kernel.spec.option("cluster", 1))
    blocks = planning.card.multiprocessors // cluster * cluster
    planning.launch(kernel, (blocks, 1, 1), (piece, added), maps)
