"""The operators of FP8 block compute on Hopper: products by block_gemm_sm90, the rest in `fp8_rows`.

Arguments and results are those of `hexa_fx.ops.fp8`. Quantised operands are contiguous and their widths multiples of 128, so a
launch follows from sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family_block_sm90 import FAMILY, PART, TILE_K, TILE_M, TILE_N
from hexa_fx.codegen.family_gemm_sm90 import MAX_EXPERTS, TABLES
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.arguments_sm90 import Maps, chunk_map, division, pack, rows_map, weight_map
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.choosing import cached_choice, card_of
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.fp8_rows import Gradient, Results, activation_gradient
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES, aligned, ceil_div, constants_of
from hexa_fx.cuda.planning import Piece, TileQueue, planning_of
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count
from hexa_fx.ops.fp8_arguments import Arguments

STAGES, STAGES_GATHERED = 3, 4
"""Of shared memory, 48 KiB each. With three there is room for a tile's results, which leave while the next one is multiplied.
Gathered rows come later than those that the copy engine brings.
"""

GROUP_M = 8
"""Tiles along M that share a weight tile in L2, as the bf16 kernels' rule has it."""

_ROW_BOX = 64
_SCALES = ("a_scale", "w_scale", "h_scale", "act_scale", "p_scale", "q_scale")


def why_not(o: Arguments) -> str:
    """Why these kernels cannot take a call of ``hexa::moe_ffn_fp8``; empty if they can."""
    card, experts = card_of(o.x.device.index), o.w1.shape[0]
    if card.arch != 90 or card.family_arch != 90:
        return f"its products need an sm_90, this card is an sm_{card.family_arch}"
    if experts > MAX_EXPERTS:
        return f"{experts} experts; the kernels' tables hold {MAX_EXPERTS}"
    odd = [size for size in (o.input_size, o.output_size) if size * o.x.element_size() % 16]
    return f"rows of {odd[0]} numbers; kernels write them in whole 16 bytes" if odd else ""


@cuda_kernel("esmm_act_fp8")
def esmm_act_fp8(
    x: Tensor,
    xs: Tensor,
    w: Tensor,
    ws: Tensor,
    bias: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    activation: str,
    gated: bool,
    params: tuple[float, ...],
    keep_h: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.fp8. One launch: the epilogue quantises."""
    n, width = v.shape[0], w.shape[1]
    inner = width // 2 if gated else width
    h, hs = _rows_and_scales(x, n if keep_h else 0, width)
    a, a_scales = _rows_and_scales(x, n, inner)
    if not n:
        return h, hs, a, a_scales
    fields = {"activation": activation, "glu": "concat" if gated else "none", "bias": bias is not None, "gather": True}
    kernel = _kernel(x, w, "esmm_act", None, fields, ("store_h", keep_h))
    maps = Maps(weight=weight_map(w, "nk", PART), out=chunk_map(h) if keep_h else None, act=chunk_map(a))
    sizes = {
        "n": n,
        "a_ld": x.shape[1],
        "out_ld": width,
        "act_ld": inner,
        "K": x.shape[1],
        "N": inner,
        "bias_ld": width,
    }
    scales = {"a_scale": xs, "w_scale": ws, "h_scale": hs if keep_h else None, "act_scale": a_scales}
    tensors = {"a": x, "out": h if keep_h else None, "act": a, "bias": _bias(bias), "v": v}
    more = {"division": division(top_k), "constants": constants_of(activation, params)}
    _launch(kernel, offs, maps, scales, **sizes, **tensors, **more)
    return h, hs, a, a_scales


@cuda_kernel("esmm_fp8")
def esmm_fp8(
    x: Tensor,
    xs: Tensor,
    w: Tensor,
    ws: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """See hexa_fx.ops.fp8. One launch."""
    y = x.new_empty((x.shape[0], columns), dtype=dtype)
    _product(y, x, xs, w, ws, bias, None, offs, 1)
    return y


def _product(
    y: Tensor,
    x: Tensor,
    xs: Tensor,
    w: Tensor,
    ws: Tensor,
    bias: Tensor | None,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
) -> None:
    """One launch that writes y."""
    n, columns = y.shape
    if columns * y.element_size() % 16:
        raise Unsupported(f"results of {columns} columns; the copy engine writes rows of whole 16 bytes")
    if not n:
        return
    fields = {"bias": bias is not None, "gather": v is not None}
    kernel = _kernel(x, w, "esmm", DTYPES[y.dtype], fields)
    maps = Maps(
        rows=None if v is not None else rows_map(x, _ROW_BOX), weight=weight_map(w, "nk", PART), out=chunk_map(y)
    )
    sizes = {"n": n, "a_ld": x.shape[1], "out_ld": columns, "K": x.shape[1], "N": columns, "bias_ld": w.shape[1]}
    tensors = {"a": x, "out": y, "bias": _bias(bias), "v": v}
    _launch(kernel, offs, maps, {"a_scale": xs, "w_scale": ws}, **sizes, **tensors, division=division(top_k))


@cuda_kernel("esmm_act_backward_fp8")
def esmm_act_backward_fp8(
    dy: Tensor,
    dys: Tensor,
    w: Tensor,
    ws: Tensor,
    h: Tensor,
    hs: Tensor,
    top_k_weights: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    activation: str,
    gated: bool,
    params: tuple[float, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """See hexa_fx.ops.fp8. Two launches: da is written as bf16, whose rounding is finer than e4m3's by five bits, since an epilogue
    that turned a tile round would keep the tensor cores waiting for as long as they multiply.
    """
    n, inner, width, experts = v.shape[0], w.shape[1], h.shape[1], offs.shape[0] - 1
    groups = group_count(n, experts)
    needs_dh, needs_columns, needs_a, needs_dots = needs
    dh, dhs = _rows_and_scales(h, n if needs_dh else 0, width)
    dh_t, dhs_t = _groups_and_scales(h, groups if needs_columns else 0, width)
    a_t, at_scales = _groups_and_scales(h, groups if needs_a else 0, inner)
    dots = h.new_empty((n if needs_dots else 0, inner // BLOCK), dtype=torch.float32)
    results = (dh, dhs, dh_t, dhs_t, a_t, at_scales, dots)
    if n and any(needs):
        da = dy.new_empty((n, inner), dtype=torch.bfloat16)
        _product(da, dy, dys, w, ws, None, v, offs, top_k)
        wanted = Results(*[t if t.numel() else None for t in results])
        weights = None if top_k_weights is None else top_k_weights.reshape(-1).float()
        activation_gradient(Gradient(da, h, hs, weights, v, offs, activation, gated, tuple(params)), into=wanted)
    return results


@cuda_kernel("estmm_fp8")
def estmm_fp8(out: Tensor, x: Tensor, xs: Tensor, g: Tensor, gs: Tensor, offs: Tensor, add: bool) -> None:
    """See hexa_fx.ops.fp8. One launch, and a second pass where the copy engine cannot write to ``out``."""
    held, (p, ps, q, qs) = out, (x, xs, g, gs)
    turned = out.stride()[2] != 1 and out.stride()[1] == 1
    if turned:
        held, (p, ps, q, qs) = out.transpose(1, 2), (g, gs, x, xs)
    beside = held.stride()[2] != 1 or not aligned(held)
    experts, rows, columns = held.shape
    if beside:
        lines = 16 // out.element_size()
        held = out.new_empty((experts, rows, ceil_div(columns, lines) * lines))
        held = held.view_of((experts, rows, columns), held.strides, held.offset)  # type: ignore[attr-defined]
    if not x.shape[0] or not out.numel():
        if not add:
            planning_of(out).run(Tensor.zero_, out)
        return
    kernel = _kernel(x, out, "estmm", DTYPES[out.dtype], {}, adds=add and not beside)
    maps = Maps(p=weight_map(p, "nk", TILE_M), q=weight_map(q, "nk", PART), grad=weight_map(held, "nk", 16))
    sizes = {"n": x.shape[0] * BLOCK, "R": rows, "C": columns}
    strides = ps.stride()[0], qs.stride()[0]
    _launch(kernel, offs, maps, {"p_scale": ps, "q_scale": qs}, strides=strides, dw=held, **sizes)
    if beside:
        planning_of(out).run(Tensor.add_ if add else Tensor.copy_, out, held.transpose(1, 2) if turned else held)


def _rows_and_scales(like: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    return like.new_empty((rows, width), dtype=ELEMENT), like.new_empty((rows, width // BLOCK), dtype=torch.float32)


def _groups_and_scales(like: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    return like.new_empty((groups, width, BLOCK), dtype=ELEMENT), like.new_empty((groups, width), dtype=torch.float32)


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _kernel(
    x: Tensor,
    w: Tensor,
    op: str,
    out: DataType | None,
    fields: dict[str, Any],
    *options: tuple[str, bool],
    adds: bool = False,
) -> Kernel:
    """The kernel of a product whose experts are those of ``w``."""
    card = planning_of(x).card
    if card.arch != 90 or card.family_arch != 90:
        raise Unsupported(f"sm_{card.arch}; FP8 products need an sm_90")
    if w.shape[0] > MAX_EXPERTS:
        raise Unsupported(f"{w.shape[0]} experts; the tile tables hold {MAX_EXPERTS}")
    tables = next(size for size in TABLES if w.shape[0] <= size)
    return _kernel_of(op, out, tuple(sorted(fields.items())), (*options, ("experts", tables)), adds)


@cached_choice
def _kernel_of(
    op: str,
    out: DataType | None,
    fields: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, int | bool], ...],
    adds: bool,
) -> Kernel:
    stages = STAGES_GATHERED if dict(fields).get("gather") else STAGES
    tile: dict[str, Any] = {"bm": TILE_M, "bn": TILE_N, "bk": TILE_K, "stages": stages}
    spec = KernelSpec(FAMILY, op, 90, dtype=DataType.e4m3, out_dtype=out, **tile, **dict(fields))
    spec = spec.with_options(**dict(options))
    return kernel_of(spec.adding() if adds else spec)


def _launch(
    kernel: Kernel,
    offs: Tensor,
    maps: Maps,
    scales: dict[str, Tensor | None],
    **fields: Any,
) -> None:
    """One block a multiprocessor; they take tiles from a queue. ``strides`` are those of P's and Q's scales."""
    planning, strides = planning_of(offs), fields.pop("strides", (0, 0))
    piece = pack(offs=offs, experts=offs.shape[0] - 1, queue=TileQueue(), group_m=GROUP_M, **fields)
    added: Piece = (
        tuple(scales.get(name) for name in _SCALES),
        strides[0].to_bytes(4, "little") + strides[1].to_bytes(4, "little"),
    )
    planning.launch(kernel, (planning.card.multiprocessors, 1, 1), (piece, added), maps)
