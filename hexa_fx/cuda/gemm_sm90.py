"""The matrix products of docs/operators.md on the sm_90a family: operands in, tensors out.

Shapes: T tokens, n rows in expert order, E experts. The operands are CUDA tensors on one device that `unsupported` has no
objection to: bf16 or f16, 16-byte aligned. Nothing here reads the device back. Unless `tile` is given, the shape decides it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hexa_fx.codegen.family_gemm_sm90 import MAX_EXPERTS
from hexa_fx.codegen.spec import Layout
from hexa_fx.codegen.tiles_sm90 import TileChoice
from hexa_fx.cuda.arguments import Piece, TensorMap
from hexa_fx.cuda.arguments_sm90 import (
    Maps,
    added_map,
    chunk_map,
    mixed_map,
    pack,
    result_map,
    rows_map,
    shared_args,
    weight_map,
)
from hexa_fx.cuda.choosing import card_of
from hexa_fx.cuda.key_sm90 import HopperKey, choice_for
from hexa_fx.cuda.launch import launch
from hexa_fx.cuda.operands import Into, Segment, aligned, ceil_div, constants_of
from hexa_fx.cuda.tile_choice import run_with_tile
from hexa_fx.ops.operands import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm
from hexa_fx.ops.rows import flip

FLOATS = (torch.bfloat16, torch.float16)

Build = Callable[[TileChoice], tuple[Maps, Piece]]
"""Makes the tensor maps and the argument struct of a launch with a tile."""


def unsupported(*tensors: Tensor | None, experts: int) -> str:
    """Why this family cannot take these operands; empty if it can. The inner dimension must be contiguous."""
    if experts > MAX_EXPERTS:
        return f"{experts} experts; the tile tables hold {MAX_EXPERTS}"
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in FLOATS:
            return f"{t.dtype} operand; wgmma here multiplies bf16 and f16"
        if t.stride()[-1] != 1 or not aligned(t):
            return f"operand of shape {tuple(t.shape)} and strides {t.stride()} is not 16-byte aligned along its rows"
    return ""


def esmm(o: Esmm, tile: TileChoice | None = None, segment: Segment | None = None) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    x, weight, bias, v, offs, top_k, layout = o
    n, columns, bias = o.rows, o.columns, _packed(bias)
    y = x.new_empty((n, columns)) if segment is None else segment.out
    if not n:
        return y
    written = n if segment is None or segment.last else 0
    sizes = (n if segment is None else segment.rows, weight.shape[0], x.shape[1], columns)
    key = HopperKey("esmm", card_of(x.device.index), x.dtype, *sizes, layout, v is not None, bias=bias is not None)

    def build(tile: TileChoice) -> tuple[Maps, Piece]:
        args = shared_args(v, offs, top_k, written, tile)
        piece = pack(
            **args, a=x, a_ld=x.stride()[0], K=x.shape[1], N=columns, out=y, out_ld=columns, bias=bias, bias_ld=columns
        )
        return Maps(_rows(x, v, tile), _weight(weight, layout, tile), out=result_map(y, tile)), piece

    _run(key, x.device.index, build, tile)
    return y


def esmm_act(o: EsmmAct, tile: TileChoice | None = None) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)``: (n, I) or (n, 2I), and (n, I). Without `keep_h` (inference) h is empty."""
    x, w1, b1, w3, b3, v, offs, top_k, layout, activation, glu, params, keep_h = o
    n, width, inner, halves = o.rows, o.width, o.inner, 1 if glu == "none" else 2
    b1, b3 = _packed(b1), _packed(b3)
    h, a = x.new_empty((n if keep_h else 0, width)), x.new_empty((n, inner))
    if not n:
        return h, a
    sizes, options = (n, w1.shape[0], x.shape[1], width), (("store_h", keep_h),)
    key = HopperKey("esmm_act", card_of(x.device.index), x.dtype, *sizes, layout, v is not None, activation, glu)
    key = key._replace(bias=b1 is not None, options=options)
    bias_ld = w1.shape[1] if layout == "nk" else w1.shape[2]

    def build(tile: TileChoice) -> tuple[Maps, Piece]:
        mixed = tile.swapped and halves == 2
        maps = Maps(
            _rows(x, v, tile),
            mixed_map(w1, tile.fetch) if mixed else _weight(w1, layout, tile),
            up=None if w3 is None else weight_map(w3, layout, tile.bn // 2),
            out=result_map(h, tile, halves) if keep_h else None,
            act=result_map(a, tile, halves),
        )
        piece = pack(
            **shared_args(v, offs, top_k, n, tile),
            a=x,
            a_ld=x.stride()[0],
            K=x.shape[1],
            N=inner,
            out=h if keep_h else None,
            out_ld=width,
            act=a,
            act_ld=inner,
            bias=b1,
            bias_up=b3,
            bias_ld=bias_ld,
            constants=constants_of(activation, params),
        )
        return maps, piece

    _run(key, x.device.index, build, tile)
    return h, a


def esmm_act_backward(o: EsmmActBackward, tile: TileChoice | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``da = esmm(dy, weight, v)`` and activate_backward in its epilogue; da itself is never stored.

    Args:
        o: its routing weights are not looked at but for their gradient; kernels read `scale`.

    Returns:
        dh like h, a_scaled (n, I), and d(weights) by slot (n,) in float32: <da, a>.
    """
    dy, weight, h, gates, v, offs, top_k, layout, activation, glu, params = o
    n, inner, scale = v.shape[0], o.inner, None if gates is None else gates.reshape(-1).float()
    dh, a = torch.empty_like(h), h.new_empty((n, inner))
    if not n:
        return dh, a, torch.empty(0, dtype=torch.float32, device=h.device)
    sizes = (n, weight.shape[0], dy.shape[1], inner)
    static = (layout, True, activation, "concat" if glu == "split" else glu)
    key = HopperKey("esmm_act_backward", card_of(dy.device.index), dy.dtype, *sizes, *static)
    found: list[Tensor] = []

    def build(tile: TileChoice) -> tuple[Maps, Piece]:
        dots = torch.empty((ceil_div(inner, tile.bn), n), dtype=torch.float32, device=h.device)
        found[:] = [dots]
        weights = _weight(weight, layout, tile)
        piece = pack(
            **shared_args(v, offs, top_k, n, tile),
            a=dy,
            a_ld=dy.stride()[0],
            K=dy.shape[1],
            N=inner,
            out=dh,
            out_ld=dh.stride()[0],
            act=a,
            act_ld=inner,
            h=h,
            h_ld=h.stride()[0],
            slot_scale=scale,
            row_dot=dots,
            constants=constants_of(activation, params),
        )
        return Maps(None, weights, h=chunk_map(h), out=chunk_map(dh), act=chunk_map(a)), piece

    _run(key, dy.device.index, build, tile)
    return dh, a, found[0].sum(0) if found[0].shape[0] > 1 else found[0][0]


def estmm(o: Estmm, tile: TileChoice | None = None, into: Tensor | None = None) -> Tensor:
    """``dW[e] = sum over rows of x[row]^T g[row]``, (E, N, K) for ``nk``, (E, K, N) for ``kn``. At most one index.

    Args:
        into: float32 tensor of the result's shape that the result is added to; it is returned.
    """
    experts, layout = o.experts, o.layout
    if o.g_index is None:  # the gathered operand is P, dW's rows unless transposed
        p, v, q, transpose = o.x, o.x_index, o.g, layout == "nk"
    else:
        p, v, q, transpose = o.g, o.g_index, o.x, layout == "kn"
    if v is None and transpose:
        p, q, transpose = q, p, False
    rows, columns, n = p.shape[1], q.shape[1], q.shape[0]
    shape = (experts, columns, rows) if transpose else (experts, rows, columns)
    dw = o.x.new_empty(shape) if into is None else into
    if not n:
        return dw.zero_() if into is None else dw
    if not dw.numel():
        return dw
    static = (card_of(p.device.index), p.dtype, n, experts, rows, columns)
    options = (("transpose", transpose),)
    key = HopperKey("estmm", *static, gather=v is not None, accumulate=into is not None, options=options)

    def build(tile: TileChoice) -> tuple[Maps, Piece]:
        piece = pack(**shared_args(v, o.offs, o.top_k, n, tile), p=p, p_ld=p.stride()[0], dw=dw, R=rows, C=columns)
        return Maps(p=_whole_rows(p, v), q=rows_map(q, 64), grad=_gradient(dw, p, transpose)), piece

    _run(key, p.device.index, build, tile)
    return dw


def esfk(o: Esfk, tile: TileChoice | None = None, into: Into | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The paper's fused backward: ``dx = g W^T`` (n, K), ``dW``, ``db`` (E, N) of one projection in one launch.

    Where dX and dW are faster in launches of their own, the tile says to `split` it. A bias prevents that: its gradient is free in
    the one launch.

    Args:
        into: what dW, and db if there is a bias, are added to; it is returned instead.
    """
    x, g, weight, v, offs, top_k, layout, has_bias = o
    flipped, stored = flip(layout), layout if into is None else into.layout
    experts, n, rows, columns = weight.shape[0], g.shape[0], x.shape[1], g.shape[1]
    if not n:
        dx = g.new_empty((0, rows))
        if into is not None:
            return dx, into.weight, into.bias
        dw, db = torch.zeros_like(weight, memory_format=torch.contiguous_format), g.new_zeros((experts, columns))
        return dx, dw, db if has_bias else None
    device, turned = x.device.index, stored == "nk"
    static = (card_of(device), x.dtype, n, experts, rows, columns, flipped, v is not None)
    key = HopperKey("esfk", *static, accumulate=into is not None, options=(("transpose", turned),))
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def run(given: TileChoice | None) -> None:
        if choice_for(key, given).tile.split and not has_bias:
            dx = esmm(Esmm(g, weight, None, None, offs, 1, flipped))
            of_weight = Estmm(x, g, v, None, offs, top_k, stored)
            found[:] = [(dx, estmm(of_weight, into=None if into is None else into.weight), None)]
            return
        dx = g.new_empty((n, rows))
        if into is not None:
            dw, db = into.weight, into.bias
        else:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
            db = g.new_empty((experts, columns)) if has_bias else None

        def build(tile: TileChoice) -> tuple[Maps, Piece]:
            maps = Maps(
                _rows(g, None, tile),
                _weight(weight, flipped, tile),
                p=_whole_rows(x, v),
                q=rows_map(g, 64),
                out=chunk_map(dx),
                grad=_gradient(dw, x, turned),
            )
            piece = pack(
                **shared_args(v, offs, top_k, n, tile),
                K=columns,
                N=rows,
                out=dx,
                out_ld=rows,
                p=x,
                p_ld=x.stride()[0],
                dw=dw,
                db=db,
                R=rows,
                C=columns,
            )
            return maps, piece

        _launch(key, device, build, given)
        found[:] = [(dx, dw, db)]

    run_with_tile(key, device, run, tile)
    return found[0]


def _run(key: HopperKey, device: int, build: Build, tile: TileChoice | None) -> None:
    run_with_tile(key, device, lambda given: _launch(key, device, build, given), tile)


def _launch(key: HopperKey, device: int, build: Build, given: TileChoice | None) -> None:
    kernel, tile, grid = choice_for(key, given)
    maps, args = build(tile)
    launch(kernel, device, grid, (args,), maps)


def _rows(x: Tensor, v: Tensor | None, tile: TileChoice) -> TensorMap | None:
    """What a row product reads its rows through; gathered ones need no map."""
    return None if v is not None else rows_map(x, tile.row_box)


def _weight(weight: Tensor, layout: Layout, tile: TileChoice) -> TensorMap:
    return weight_map(weight, layout, tile.bn // 2, tile.fetch)


def _whole_rows(p: Tensor, v: Tensor | None) -> TensorMap | None:
    """What a weight's gradient reads P through."""
    return None if v is not None else rows_map(p, 64)


def _gradient(dw: Tensor, p: Tensor, turned: bool) -> TensorMap:
    """What dW leaves through, as it lies in memory: (C, R) if it is `turned`."""
    return weight_map(dw, "nk", 16) if dw.dtype == p.dtype else added_map(dw, turned)


def _packed(bias: Tensor | None) -> Tensor | None:
    """A contiguous bias, as the kernels read it."""
    return None if bias is None else bias.contiguous()
