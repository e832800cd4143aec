"""The matrix products of docs/operators.md on the sm_90a family: tensors in, tensors out.

Shapes: T tokens, n rows in expert order, E experts. The operands are CUDA tensors on one device that `unsupported` has no
objection to: bf16 or f16, 16-byte aligned. Nothing here reads the device back. Unless `tile` is given, the shape decides it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.codegen.family_gemm_sm90 import MAX_EXPERTS, TABLES
from hexa_fx.codegen.spec import Layout
from hexa_fx.codegen.tiles_sm90 import TileChoice
from hexa_fx.cuda.operands import Into, aligned
from hexa_fx.cuda.select_sm90 import SpecKey, pack, row_args, run_with_tile, shared_args, submit, weight_args
from hexa_fx.cuda.tensor_maps_sm90 import (
    Maps,
    chunk_map,
    mixed_map,
    result_map,
    row_maps,
    weight_map,
    weight_maps,
)
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.rows import columns_of, flip, row_count

FLOATS = (torch.bfloat16, torch.float16)


def unsupported(*tensors: Tensor | None, experts: int) -> str:
    """Why this family cannot take these operands; empty if it can. The inner dimension must be contiguous."""
    if experts > MAX_EXPERTS:
        return f"{experts} experts; the tile tables hold {MAX_EXPERTS}"
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in FLOATS:
            return f"{t.dtype} operand; wgmma here multiplies bf16 and f16"
        if t.stride(-1) != 1 or not aligned(t):
            return f"operand of shape {tuple(t.shape)} and strides {t.stride()} is not 16-byte aligned along its rows"
    return ""


def esmm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    tile: TileChoice | None = None,
) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    n, columns, bias = row_count(x, v), columns_of(weight, layout), _packed(bias)
    y = x.new_empty((n, columns))
    if not n:
        return y
    key = SpecKey("esmm", x.dtype, layout, v is not None, bias is not None, tables=_tables(weight.shape[0]))

    def run(tile: TileChoice) -> None:
        args = row_args(x, weight, v, offs, top_k, layout, tile)
        args |= {"out": y, "out_ld": columns, "N": columns, "bias": bias, "bias_ld": columns}
        maps = row_maps(x, weight, v, layout, tile)._replace(out=result_map(y, tile))
        submit(key, tile, x.device.index, maps, pack(**args))

    run_with_tile(key, x.device.index, n, weight.shape[0], x.shape[1], columns, tile, run)
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
    glu: str,
    params: tuple[float, ...] = (),
    store_h: bool = True,
    tile: TileChoice | None = None,
) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)``: (n, I) or (n, 2I), and (n, I). Without `store_h` (inference) h is empty."""
    n, columns, b1, b3 = row_count(x, v), columns_of(w1, layout), _packed(b1), _packed(b3)
    inner = inner_width(columns, glu)
    halves = 1 if glu == "none" else 2
    width = halves * inner
    h, a = x.new_empty((n if store_h else 0, width)), x.new_empty((n, inner))
    if not n:
        return h, a
    options = (("store_h", store_h),)
    tables = _tables(w1.shape[0])
    key = SpecKey("esmm_act", x.dtype, layout, v is not None, b1 is not None, activation, glu, options, tables)

    def run(tile: TileChoice) -> None:
        maps = row_maps(x, w1, v, layout, tile)._replace(act=result_map(a, tile, halves))
        if tile.swapped and halves == 2:
            maps = maps._replace(weight=mixed_map(w1, tile.fetch))
        if w3 is not None:
            maps = maps._replace(up=weight_map(w3, layout, tile.bn // 2))
        if store_h:
            maps = maps._replace(out=result_map(h, tile, halves))
        args = row_args(x, w1, v, offs, top_k, layout, tile)
        args |= {"out": h if store_h else None, "out_ld": width, "act": a, "act_ld": inner}
        args |= {"N": inner, "bias": b1, "bias_up": b3, "bias_ld": columns, "params": params}
        submit(key, tile, x.device.index, maps, pack(**args))

    run_with_tile(key, x.device.index, n, w1.shape[0], x.shape[1], width, tile, run)
    return h, a


def esmm_act_backward(
    dy: Tensor,
    w2: Tensor,
    h: Tensor,
    weights: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    activation: str,
    glu: str,
    params: tuple[float, ...] = (),
    tile: TileChoice | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``da = esmm(dy, w2, v)`` and activate_backward in its epilogue; da itself is never stored.

    Args:
        dy: (T, D).
        w2: the down projection as the product reads it: ``kn`` is (E, D, I), ``nk`` is (E, I, D).
        h: (n, I) or (n, 2I).
        weights: float32 routing weight of every slot, or None for 1.

    Returns:
        dh like h, a_scaled (n, I), and d(weights) by slot (n,) in float32: <da, a>.
    """
    n, inner = v.shape[0], columns_of(w2, layout)
    dh, a = torch.empty_like(h), h.new_empty((n, inner))
    if not n:
        return dh, a, torch.empty(0, dtype=torch.float32, device=h.device)
    half = "concat" if glu == "split" else glu
    tables = _tables(w2.shape[0])
    key = SpecKey("esmm_act_backward", dy.dtype, layout, True, False, activation, half, tables=tables)
    found: list[Tensor] = []

    def run(tile: TileChoice) -> None:
        dots = torch.empty((-(-inner // tile.bn), n), dtype=torch.float32, device=h.device)
        args = row_args(dy, w2, v, offs, top_k, layout, tile)
        args |= {"out": dh, "out_ld": dh.stride(0), "act": a, "act_ld": inner, "N": inner}
        args |= {"h": h, "h_ld": h.stride(0), "slot_scale": weights, "row_dot": dots}
        args["params"] = params
        maps = row_maps(dy, w2, v, layout, tile)
        maps = maps._replace(h=chunk_map(h), out=chunk_map(dh), act=chunk_map(a))
        submit(key, tile, dy.device.index, maps, pack(**args))
        found[:] = [dots]

    run_with_tile(key, dy.device.index, n, w2.shape[0], dy.shape[1], inner, tile, run)
    return dh, a, found[0].sum(0) if found[0].shape[0] > 1 else found[0][0]


def estmm(
    x: Tensor,
    g: Tensor,
    x_index: Tensor | None,
    g_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    tile: TileChoice | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """``dW[e] = sum over rows of x[row]^T g[row]``, (E, N, K) for ``nk``, (E, K, N) for ``kn``. At most one index.

    Args:
        into: float32 tensor of the result's shape that the result is added to; it is returned.
    """
    experts = offs.shape[0] - 1
    if g_index is not None:  # the gathered operand is P, dW's rows unless transposed
        p, q, transpose = g, x, layout == "kn"
    else:
        p, q, transpose = x, g, layout == "nk"
    v = x_index if g_index is None else g_index
    if v is None and transpose:
        p, q, transpose = q, p, False
    rows, columns, n = p.shape[1], q.shape[1], q.shape[0]
    shape = (experts, columns, rows) if transpose else (experts, rows, columns)
    dw = x.new_empty(shape) if into is None else into
    if not n:
        return dw.zero_() if into is None else dw
    if not dw.numel():
        return dw
    options = (("transpose", transpose),)
    tables, accumulate = _tables(experts), into is not None
    key = SpecKey("estmm", x.dtype, "nk", v is not None, options=options, tables=tables, accumulate=accumulate)

    def run(tile: TileChoice) -> None:
        args = shared_args(v, offs, top_k, n, tile) | weight_args(p, q, dw)
        submit(key, tile, x.device.index, Maps(**weight_maps(p, q, v, dw, transpose)), pack(**args))

    run_with_tile(key, x.device.index, n, experts, rows, columns, tile, run)
    return dw


def esfk(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    x_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    has_bias: bool,
    tile: TileChoice | None = None,
    into: Into | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The paper's fused backward: ``dx = g W^T`` (n, K), ``dW``, ``db`` (E, N) of one projection in one launch.

    Where dX and dW are faster in launches of their own, the tile says to `split` it. A bias prevents that: its gradient is free in
    the one launch.

    Args:
        into: what dW, and db if there is a bias, are added to; it is returned instead.
    """
    flipped = flip(layout)
    experts, n, rows, columns = weight.shape[0], g.shape[0], x.shape[1], g.shape[1]
    if not n:
        dx = g.new_empty((0, rows))
        if into is not None:
            return dx, into.weight, into.bias
        dw, db = torch.zeros_like(weight, memory_format=torch.contiguous_format), g.new_zeros((experts, columns))
        return dx, dw, db if has_bias else None
    stored = layout if into is None else into.layout
    options, tables, accumulate = (("transpose", stored == "nk"),), _tables(experts), into is not None
    gather = x_index is not None
    key = SpecKey("esfk", x.dtype, flipped, gather, options=options, tables=tables, accumulate=accumulate)
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def run(tile: TileChoice) -> None:
        if tile.split and not has_bias:
            dx = esmm(g, weight, None, None, offs, 1, flipped)
            held = None if into is None else into.weight
            found[:] = [(dx, estmm(x, g, x_index, None, offs, top_k, stored, into=held), None)]
            return
        dx = g.new_empty((n, rows))
        if into is not None:
            dw, db = into.weight, into.bias
        else:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
            db = g.new_empty((experts, columns)) if has_bias else None
        reads = row_maps(g, weight, None, flipped, tile)
        maps = reads._replace(out=chunk_map(dx), **weight_maps(x, g, x_index, dw, stored == "nk"))
        args = shared_args(x_index, offs, top_k, n, tile) | weight_args(x, g, dw, db)
        args |= {"K": columns, "N": rows, "out": dx, "out_ld": rows}
        submit(key, tile, x.device.index, maps, pack(**args))
        found[:] = [(dx, dw, db)]

    run_with_tile(key, x.device.index, n, experts, rows, columns, tile, run)
    return found[0]


def _tables(experts: int) -> int:
    """Size of the smallest expert tables that hold `experts`."""
    return next(size for size in TABLES if experts <= size)


def _packed(bias: Tensor | None) -> Tensor | None:
    """A contiguous bias, as the kernels read it."""
    return None if bias is None else bias.contiguous()
