"""The matrix products of docs/operators.md on the sm_90a family: operands in, tensors out.

Shapes: T tokens, n rows in expert order, E experts. The operands are CUDA tensors on one device that `unsupported` has no
objection to: bf16 or f16, 16-byte aligned. Nothing here reads the device back. Row products also take the records of
those with a second product (`hexa_fx.ops.products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen import family_gemm_sm90 as family
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES, Added, Into, Segment, aligned, constants_of, divided_by, has_few_rows
from hexa_fx.cuda.places import MOST, listed, part_of, parts_of, places_of
from hexa_fx.cuda.planning import Piece, TensorMap, TileQueue, planning_of
from hexa_fx.cuda.product import ProductKey, Tiles
from hexa_fx.formats.format import ceil_div
from hexa_fx.ir import Layout
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm
from hexa_fx.ops.table_variants import EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank


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


def line(t: Tensor) -> int:
    """Elements of a line of shared memory, which is as wide as a box is."""
    return family.LINE_BYTES // t.element_size()


def rows_map(x: Tensor, rows: int, columns: int | None = None) -> TensorMap:
    """Boxes of `rows` rows x `columns` columns of a (., C) operand: a line or half of one."""
    count, width = x.shape
    columns = columns or line(x)
    args = (DTYPES[x.dtype], (width, count), (x.stride()[0],), (columns, rows), columns * x.element_size())
    return TensorMap(x, args)


def chunk_map(x: Tensor) -> TensorMap:
    """The boxes that a warp writes, or h's that it reads."""
    return rows_map(x, 16)


def result_map(x: Tensor, tile: family.TileSm90, halves: int = 1) -> TensorMap:
    """The boxes that a row product's results leave in. A swapped tile's warpgroup has half of its columns, which are gate and up in
    `halves`.
    """
    return rows_map(x, 32, tile.bn // 2 // halves) if tile.swapped else chunk_map(x)


def added_maps(
    added: Added | None, layout: Layout, tile: family.TileSm90, mixed: bool = False, in_staging: bool = False
) -> dict[str, TensorMap | None]:
    """What a second product is read through, in the places of maps that row products have no use for. Zeros follow its columns,
    up to a step of the contraction, or to one wgmma's part of it `in_staging`.
    """
    if added is None:
        return {}
    inner = family.INNER if in_staging else line(added.u)
    c = mixed_map(added.c, tile.fetch) if mixed else weight_map(added.c, layout, tile.bn // 2, tile.fetch, inner)
    up = None if added.c3 is None else weight_map(added.c3, layout, tile.bn // 2, inner=inner)
    return {"p": rows_map(added.u, tile.row_box, inner), "q": c, "grad": up}


def mixed_map(weight: Tensor, fetch: int) -> TensorMap:
    """(E, 2 I, K) in boxes of 8 gate columns, their 8 up columns, the next 8 gate columns, ...: 128 x a line. Gate and up of listed
    experts lie at any distance: in boxes of 8 columns.
    """
    if listed(weight):
        return weight_map(weight, "nk", 8, fetch)
    experts, columns, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    shape, strides = (inner, 8, 2, columns // 16, experts), (by_row, columns // 2 * by_row, 8 * by_row, by_expert)
    box = (line(weight), 8, 2, 8, 1)
    return TensorMap(weight, (DTYPES[weight.dtype], shape, strides, box, family.LINE_BYTES, fetch))


def weight_map(weight: Tensor, layout: Layout, columns: int, fetch: int = 128, inner: int | None = None) -> TensorMap:
    """(E, N, K) in boxes of `columns` lines; (E, K, N) in boxes of 64 lines. `fetch`: bytes that come to L2 at a time. `inner`: of
    the contraction that a box holds, a line's elements or fewer. Of listed experts the last dimension counts steps to their
    matrices, see `hexa_fx.cuda.places`.
    """
    inner = inner or line(weight)
    experts, rows, width = weight.shape
    if listed(weight):
        experts, rows = MOST, part_of(weight)
    by_expert, by_row, _ = weight.stride()
    box = (inner, columns, 1) if layout == "nk" else (line(weight), inner, 1)
    swizzle = box[0] * weight.element_size()
    args = (DTYPES[weight.dtype], (width, rows, experts), (by_row, by_expert), box, swizzle, fetch)
    return TensorMap(weight, args)


def added_map(dw: Tensor, turned: bool) -> TensorMap:
    """The boxes of floats that a warp adds to dW: 16 rows x a line of P^T Q, of which half a line is `turned`."""
    experts, rows, columns = dw.shape
    by_expert, by_row, _ = dw.stride()
    box, swizzle = ((16, line(dw), 1), family.LINE_BYTES // 2) if turned else ((line(dw), 16, 1), family.LINE_BYTES)
    return TensorMap(dw, (DTYPES[dw.dtype], (columns, rows, experts), (by_row, by_expert), box, swizzle))


FAMILY = "gather_gemm_sm90"
FLOATS = (torch.bfloat16, torch.float16)
ONLY_OTHERS = ("tanh",)
"""Activations without an epilogue here."""
ADDS_ALIGNED = True
"""Buffers that gradients are added to have rows of whole 16 bytes."""


class Sm90Tiles(Tiles):
    """Of gather_gemm_sm90."""

    kind = family.TileSm90

    def rule(self, key: ProductKey) -> family.TileSm90:
        spec, own = key.kernel, _own_columns(key)
        sizes, swapped = (key.rows, key.experts, own, key.inner), family.swaps(spec.op, spec.glu, spec.layout)
        return family.choose_tile(spec.op, *sizes, swapped, bool(spec.option("transpose")), key.card.name)

    def candidates(self, key: ProductKey) -> Sequence[family.TileSm90]:
        op, rule = key.kernel.op, self.rule(key)
        narrow = op in family.NARROW_OPS and _own_columns(key) <= family.NARROW_COLUMNS
        streamed = family.STREAMED_TILES if rule in family.STREAMED_TILES else ()
        return tuple(dict.fromkeys((rule, *streamed, *(family.NARROW_CANDIDATES if narrow else family.CANDIDATES[op]))))

    def complete(self, key: ProductKey, tile: family.TileSm90) -> KernelSpec:
        flags: dict[str, Option] = {name: True for name in ("swapped", "once") if getattr(tile, name)}
        spec = replace(key.kernel, bm=tile.bm, bn=tile.bn, stages=tile.stages, schedule=tile.kernel_schedule)
        return spec.with_options(cluster=tile.cluster, **flags)


TILES = Sm90Tiles()


def _own_columns(key: ProductKey) -> int:
    """Columns that a tile's width is chosen for: those of esfk's rows are the contraction of its projection."""
    return key.inner if key.kernel.op == "esfk" else key.columns


def takes(o: Any) -> bool:
    """Whether this family computes a product of `hexa_fx.ops.table`, and is the faster one for it."""
    if isinstance(o, Esmm):
        boxes = _in_whole_boxes(o.weight, o.layout)
        return boxes and _takes(o.offs, (o.columns,), o.x, o.weight, *(_second_of(o) or ()), *_stored(o.bias))
    if isinstance(o, Estmm):
        both = o.x_index is not None and o.g_index is not None
        return not both and _takes(o.offs, (o.x.shape[1], o.g.shape[1]), o.x, o.g)
    if isinstance(o, Esfk):
        some = o.g.shape[0] and o.weight.numel() and _in_whole_boxes(o.weight, flip(o.layout))
        return bool(some) and _takes(o.offs, (o.x.shape[1], o.g.shape[1]), o.x, o.g, o.weight)
    if o.activation in ONLY_OTHERS or (o.activation, o.glu) == ("none", "none"):
        return False
    second = _second_of(o) or ()
    if isinstance(o, EsmmActBackward):
        return not has_few_rows(o.v.shape[0], o.offs) and _takes(o.offs, (o.inner,), o.dy, o.weight, o.h, *second)
    if not family.swaps("esmm_act", o.glu, o.layout) and has_few_rows(o.rows, o.offs):
        return False
    return _takes(o.offs, (o.inner,), o.x, o.w1, o.w3, *_stored(o.b1, o.b3), *second)


_MOST_LINES = 128
"""Lines of a weight that a box may hold."""


def _in_whole_boxes(weight: Tensor, layout: Layout) -> bool:
    """Whether no box of the weight holds some of gate and some of up, where these are matrices of their own."""
    return parts_of(weight) == 1 or part_of(weight) % (_MOST_LINES if layout == "nk" else line(weight)) == 0


def _takes(offs: Tensor, widths: tuple[int, ...], *operands: Tensor | None) -> bool:
    """Whether the card has this family, which takes these operands and stores results of these widths."""
    if not planning_of(offs).card.is_hopper or any(width % 8 for width in widths):
        return False
    return not unsupported(*operands, experts=offs.shape[0] - 1)


def _stored(*biases: Tensor | None) -> list[Tensor]:
    """The biases that kernels read where they lie. Others are copied first, as those in a slot of the shared cache are."""
    return [b for b in biases if b is not None and b.is_contiguous()]


def unsupported(*tensors: Tensor | None, experts: int) -> str:
    """Why this family cannot take these operands; empty if it can. The inner dimension must be contiguous."""
    if experts > family.MAX_EXPERTS:
        return f"{experts} experts; the tile tables hold {family.MAX_EXPERTS}"
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in FLOATS:
            return f"{t.dtype} operand; wgmma here multiplies bf16 and f16"
        if t.stride()[-1] != 1 or not aligned(t):
            return f"operand of shape {tuple(t.shape)} and strides {t.stride()} is not 16-byte aligned along its rows"
    return ""


def esmm(o: Esmm, into: Segment | None = None) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    into = into or Segment(o.results(), o.rows, True)
    _rows("esmm", o.plain, into, _second_of(o))
    return into.out


def esmm_act(o: EsmmAct, into: Segment | None = None) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)``: (n, I) or (n, 2I), and (n, I). Without `keep_h` (inference) h is empty."""
    if into is None:
        h, a = o.results()
        into = Segment(h, o.rows, True, a)
    assert into.act is not None
    _rows("esmm_act", o, into, _second_of(o))
    return into.out, into.act


def _rows(op: str, o: EsmmAct, into: Segment, added: Added | None) -> None:
    """One launch of a row product: h to ``out`` if it is kept, and a to ``act`` if it is given."""
    x, w1, layout, inner, (h, rows, last, act, _) = o.x, o.w1, o.layout, o.inner, into
    out = h if o.keep_h else None
    if not o.rows:
        return
    bias, bias_up = (None if b is None else b.contiguous() for b in (o.b1, o.b3))
    options = (*(() if act is None else (("store_h", o.keep_h),)), *_low_rank(added), *listed(w1))
    sizes, halves = (rows, w1.shape[0], x.shape[1], o.width), 1 if o.glu == "none" else 2
    static: dict[str, Any] = {"layout": layout, "gather": o.v is not None, "bias": bias is not None}
    kernel, tile = _tiled(op, x, sizes, options, activation=o.activation, glu=o.glu, **static)
    mixed = tile.swapped and halves == 2
    in_staging = added is not None and family.adds_in_staging(kernel.spec)
    maps = Maps(
        rows=None if o.v is not None else rows_map(x, tile.row_box),
        weight=mixed_map(w1, tile.fetch) if mixed else weight_map(w1, layout, tile.bn // 2, tile.fetch),
        up=None if o.w3 is None else weight_map(o.w3, layout, tile.bn // 2),
        out=None if out is None else result_map(out, tile, halves),
        act=None if act is None else result_map(act, tile, halves),
        **added_maps(added, layout, tile, mixed, in_staging),
    )
    leading = {"a_ld": x.stride()[0], "out_ld": o.width, "act_ld": 0 if act is None else inner}
    bias_ld = w1.shape[1] if layout == "nk" else w1.shape[2]
    tensors = {"a": x, "out": out, "act": act, "bias": bias, "bias_up": bias_up}
    numbers = {"n": o.rows if last else 0, "K": x.shape[1], "N": inner, "R": 0 if added is None else added.rank}
    more = {**numbers, "bias_ld": bias_ld, "act_params": constants_of(o.activation, o.params)}
    _launch(kernel, tile, maps, o.v, o.offs, o.top_k, *places_of(w1, o.w3), **tensors, **leading, **more)


def esmm_act_backward(o: EsmmActBackward, into: Segment | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``da = esmm(dy, weight, v)`` and activate_backward in its epilogue; da itself is never stored.

    Returns:
        dh like h, a_scaled (n, I), and d(weights) by slot (n,) in float32: <da, a>.
    """
    added = _second_of(o)
    dy, weight, h, inner, n = o.dy, o.weight, o.h, o.inner, o.v.shape[0]
    scale = None if o.top_k_weights is None else o.top_k_weights.reshape(-1).float()
    into = into or Segment(h.new_empty(h.shape), n, True, h.new_empty((n, inner)))
    dh, rows, last, a, dots = into
    assert a is not None
    if not n:
        return dh, a, h.new_empty((0,), dtype=torch.float32)
    sizes, glu = (rows, weight.shape[0], dy.shape[1], inner), "concat" if o.glu == "split" else o.glu
    static: dict[str, Any] = {"layout": o.layout, "gather": True, "activation": o.activation, "glu": glu}
    kernel, tile = _tiled("esmm_act_backward", dy, sizes, (*_low_rank(added), *listed(weight)), **static)
    parts = h.new_empty((ceil_div(inner, tile.bn), n), dtype=torch.float32) if dots is None else dots
    weights = weight_map(weight, o.layout, tile.bn // 2, tile.fetch)
    second = added_maps(added, o.layout, tile)
    maps = Maps(weight=weights, h=chunk_map(h), out=chunk_map(dh), act=chunk_map(a), **second)
    leading = {"a_ld": dy.stride()[0], "out_ld": dh.stride()[0], "act_ld": inner, "h_ld": h.stride()[0]}
    tensors = {"a": dy, "out": dh, "act": a, "h": h, "slot_scale": scale, "row_dot": parts}
    sizes_of = {"K": dy.shape[1], "N": inner, "R": 0 if added is None else added.rank}
    more = {**sizes_of, "n": n if last else 0, "bias_ld": n, "act_params": constants_of(o.activation, o.params)}
    _launch(kernel, tile, maps, o.v, o.offs, o.top_k, *places_of(weight), **tensors, **leading, **more)
    if dots is not None:
        return dh, a, dots
    return dh, a, parts.sum(0) if parts.shape[0] > 1 else parts[0]


def estmm(o: Estmm, into: Tensor | None = None) -> Tensor:
    """``dW[e] = sum over rows of x[row]^T g[row]``, (E, N, K) for ``nk``, (E, K, N) for ``kn``. At most one index.

    Args:
        into: tensor of the result's shape, float32 or of the operands' type, that the result is added to; it is returned.
    """
    experts, layout = o.experts, o.layout
    if o.g_index is None:  # the gathered operand is P, dW's rows unless transposed
        p, v, q, transpose = o.x, o.x_index, o.g, layout == "nk"
    else:
        p, v, q, transpose = o.g, o.g_index, o.x, layout == "kn"
    if v is None and transpose and q.shape[1] > family.NARROW_COLUMNS:  # narrow tiles are so along Q
        p, q, transpose = q, p, False
    rows, columns, n = p.shape[1], q.shape[1], q.shape[0]
    shape = (experts, columns, rows) if transpose else (experts, rows, columns)
    if into is None:
        dw = o.x.new_empty(shape) if n else o.x.new_zeros(shape)
    else:
        dw = into
    if not n or not dw.numel():
        return dw
    sizes, options = (n, experts, rows, columns), (("transpose", transpose),)
    kernel, tile = _tiled("estmm", p, sizes, options, into, gather=v is not None)
    maps = Maps(p=_whole_rows(p, v), q=rows_map(q, 64), grad=_gradient(dw, p, transpose))
    given = {"n": n, "p": p, "p_ld": p.stride()[0], "dw": dw, "R": rows, "C": columns}
    _launch(kernel, tile, maps, v, o.offs, o.top_k, **given)
    return dw


def esfk(o: Esfk, into: Into | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The paper's fused backward: ``dx = g W^T`` (n, K), ``dW``, ``db`` (E, N) of one projection in one launch.

    Where dX and dW are faster in launches of their own, the tile says to `split` it. A bias prevents that: its gradient is free in
    the one launch.

    Args:
        into: what dW, and db if there is a bias, are added to; it is returned instead.
    """
    x, g, weight, v, layout, has_bias = o.x, o.g, o.weight, o.x_index, o.layout, o.has_bias
    flipped, stored = flip(layout), layout if into is None else into.layout
    experts, n, rows, columns = weight.shape[0], g.shape[0], x.shape[1], g.shape[1]
    if not n:
        dx = g.new_empty((0, rows))
        if into is not None:
            return dx, into.weight, into.bias
        return dx, g.new_zeros(weight.shape), g.new_zeros((experts, columns)) if has_bias else None
    turned = stored == "nk"
    p, q = x, g
    if v is None and not has_bias and rows <= family.NARROW_COLUMNS < columns:  # narrow tiles are so along Q
        p, q, turned = g, x, not turned
    sizes, options = (n, experts, rows, columns), (("transpose", turned), *listed(weight))
    added_to = None if into is None else into.weight
    kernel, tile = _tiled("esfk", x, sizes, options, added_to, layout=flipped, gather=v is not None)
    if tile.split and not has_bias:
        dx = esmm(Esmm(g, weight, None, None, o.offs, 1, flipped))
        return dx, estmm(o.to(Estmm, layout=stored), into=None if into is None else into.weight), None
    dx = g.new_empty((n, rows))
    if into is not None:
        dw, db = into.weight, into.bias
    else:
        dw, db = weight.new_empty(weight.shape), g.new_empty((experts, columns)) if has_bias else None
    maps = Maps(
        rows=rows_map(g, tile.row_box),
        weight=weight_map(weight, flipped, tile.bn // 2, tile.fetch),
        p=_whole_rows(p, v),
        q=rows_map(q, 64),
        out=chunk_map(dx),
        grad=_gradient(dw, p, turned),
    )
    given = {"n": n, "K": columns, "N": rows, "out_ld": rows, "p_ld": p.stride()[0], "R": p.shape[1], "C": q.shape[1]}
    _launch(kernel, tile, maps, v, o.offs, o.top_k, *places_of(weight), out=dx, p=p, dw=dw, db=db, **given)
    return dx, dw, db


def _second_of(o: Esmm | EsmmAct | EsmmActBackward) -> Added | None:
    """A second product that is added to one."""
    if isinstance(o, EsmmActLowRank):
        return Added(o.u, o.c, o.c3)
    return Added(o.u, o.c) if isinstance(o, EsmmLowRank | EsmmActBackwardLowRank) else None


def _low_rank(added: Added | None) -> tuple[tuple[str, int], ...]:
    """Options of a kernel that adds a second product."""
    return (
        ()
        if added is None
        else (("low_rank", min(ceil_div(added.rank, family.INNER), family.LINE_BYTES // 2 // family.INNER)),)
    )


def _tiled(
    op: str,
    x: Tensor,
    sizes: tuple[int, int, int, int],
    options: Sequence[tuple[str, Option]],
    into: Tensor | None = None,
    **static: Any,
) -> tuple[Kernel, family.TileSm90]:
    """The kernel of a product, and its tile. sizes: rows, experts, inner and columns of `ProductKey`. into: what is added to."""
    planning, dtype, (rows, experts, inner, columns) = planning_of(x), DTYPES[x.dtype], sizes
    tables = next(size for size in family.TABLES if experts <= size)  # the smallest that hold the experts
    spec = KernelSpec(FAMILY, op, planning.card.arch, dtype, bk=family.line_elements(dtype), **static)
    spec = spec.with_options(experts=tables, **dict(options))
    spec = spec if into is None else spec.adding(DTYPES[into.dtype])
    key = ProductKey(TILES, spec, planning.card, rows, experts, inner, columns)
    tile: family.TileSm90 = planning.tile_of(key)
    return kernel_of(key.spec(tile)), tile


def _launch(
    kernel: Kernel,
    tile: family.TileSm90,
    maps: Maps,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    *more: Piece,
    **fields: Any,
) -> None:
    launch_persistent(kernel, offs, maps, *more, group_m=tile.group_m, v=v, **divided_by(top_k), **fields)


def launch_persistent(kernel: Kernel, offs: Tensor, maps: Maps, *more: Piece, group_m: int, **fields: Any) -> None:
    """One block a multiprocessor, in whole clusters; they take tiles from a queue. more: what the arguments end with."""
    planning, cluster = planning_of(offs), family.cluster_of(kernel.spec)
    piece = family.ARGS.piece(offs=offs, experts=offs.shape[0] - 1, queue=TileQueue(), group_m=group_m, **fields)
    blocks = planning.card.multiprocessors // cluster * cluster
    planning.launch(kernel, (blocks, 1, 1), (piece, *more), maps)


def _whole_rows(p: Tensor, v: Tensor | None) -> TensorMap | None:
    """What a weight's gradient reads P through; gathered rows need no map."""
    return None if v is not None else rows_map(p, 64)


def _gradient(dw: Tensor, p: Tensor, turned: bool) -> TensorMap:
    """What dW leaves through, as it lies in memory: (C, R) if it is `turned`."""
    return weight_map(dw, "nk", 16) if dw.dtype == p.dtype else added_map(dw, turned)
