"""The CPU kernels: every operator on one tile, a range of experts whose rows fit in the cache.

A program of row operators never needs all rows at once. On a CPU it therefore runs tile by tile: rows are gathered once per
tile and shared, values between operators (n x I and n x D in all) stay in the cache and in recycled memory, and combine adds a
tile's rows to their tokens. Nothing of size T*k*D is ever written.

A kernel here takes the tile as its first argument and omits what the tile knows (v, offs, top_k). A result that does not consist of
rows of the tile (a weight's gradient, a sum over tokens) goes to an output of the tiling, named by a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from hexa_fx.ops import cpu, fixed_order
from hexa_fx.ops.activations import ACTIVATIONS, gate_and_up, weighted_backward
from hexa_fx.ops.cpu import as_kn
from hexa_fx.ops.rows import flip
from hexa_fx.ops.tiling import Tile, Tiling
from hexa_fx.torch_private import grouped_mm

_RAISED = 1 << 20
"""Elements up to which a half-type weight is raised as a whole, rather than an expert at a time."""


def part(tile: Tile, t: Tensor) -> Tensor:
    """The tile's rows of a tensor in expert order, in compute dtype."""
    return tile.operand(t, None)


def esmm(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, gathered: bool, layout: str) -> Tensor:
    """`hexa::esmm` of a tile: (rows, N)."""
    return _project(tile, tile.rows(x, gathered), as_kn(weight, layout), bias)


def _project(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every row times its expert's weight (E, K, N)."""
    groups = tile.groups
    if not groups:
        return x.new_empty((0, weight.shape[2]))
    if fixed_order.is_fixed():
        out = x.new_empty((x.shape[0], weight.shape[2]))
        fixed_order.multiply_groups_into(x, weight, bias, groups, out)
        return out
    overhead = bias is None and cpu.has_loop_overhead(groups, x.shape[0] * x.shape[1] * weight.shape[2])
    if overhead and weight.dtype != x.dtype and weight.numel() <= _RAISED:
        weight = weight.to(x.dtype)
    if overhead and cpu.grouped_mm_takes(x, weight):
        first, end, offs = tile.local_offs()
        return grouped_mm(x, weight[first:end], offs=offs)
    return cpu.multiply_groups(x, weight, bias, groups)


def esmm_act(
    tile: Tile,
    h_key: str | None,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    gathered: bool,
    layout: str,
    activation: str,
    glu: str,
    params: Sequence[float],
) -> Tensor:
    """`hexa::esmm_act` of a tile: a (rows, I). h goes to the output ``h_key`` where one is given."""
    multiply_groups_into = fixed_order.multiply_groups_into if fixed_order.is_fixed() else cpu.multiply_groups_into
    rows, first = tile.rows(x, gathered), as_kn(w1, layout)
    width = first.shape[2] if w3 is None else 2 * first.shape[2]
    kept, tiling = None, tile.tiling
    if h_key is not None:
        if tile.whole and w3 is None and rows.dtype == x.dtype:
            whole = tiling.buffer(h_key, lambda: _project(tile, rows, first, b1))
            return activate(tile, whole, activation, glu, params)
        kept = tile.part(tiling.buffer(h_key, partial(_rows_output, tiling, width)))
    h = kept if kept is not None and kept.dtype == rows.dtype else None
    if w3 is not None:
        h = rows.new_empty((rows.shape[0], width)) if h is None else h
        gate, up = h.chunk(2, dim=1)
        multiply_groups_into(rows, first, b1, tile.groups, gate)
        multiply_groups_into(rows, as_kn(w3, layout), b3, tile.groups, up)
    elif h is None:
        h = _project(tile, rows, first, b1)
    else:
        multiply_groups_into(rows, first, b1, tile.groups, h)
    if kept is not None and kept is not h:
        kept.copy_(h)
    return activate(tile, h, activation, glu, params)


def _rows_output(tiling: Tiling, width: int) -> Tensor:
    y = torch.empty((tiling.n, width), dtype=tiling.dtype, device="cpu")
    if tiling.routed < tiling.n:
        y[tiling.routed :].zero_()
    return y


def activate(tile: Tile, h: Tensor, activation: str, glu: str, params: Sequence[float]) -> Tensor:
    """`hexa::activate` of a tile: a (rows, I)."""
    act, dtype, wide = ACTIVATIONS[activation], h.dtype, tile.tiling.wide
    if dtype != wide:
        return activate(tile, h.to(wide), activation, glu, params).to(dtype)
    run = fixed_order.elementwise if fixed_order.is_fixed() else lambda function, *whole: function(*whole)
    if glu == "none":
        return run(lambda part: act.forward(part, params), h)
    gate, up = gate_and_up(h, glu)
    if act.pair:
        return run(lambda g, u: act.forward(g, u, params or act.params), gate, up)
    return run(lambda part: act.forward(part, params), gate).mul_(up)


def activate_backward(
    tile: Tile,
    dweights_key: str,
    da: Tensor,
    h: Tensor,
    top_k_weights: Tensor | None,
    activation: str,
    glu: str,
    params: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """`hexa::activate_backward` of a tile: (dh, a_scaled). dweights go to the output ``dweights_key``."""
    dtype, wide = da.dtype, tile.tiling.wide
    if dtype != wide or h.dtype != wide:
        static = (activation, glu, params)
        dh, a = activate_backward(tile, dweights_key, da.to(wide), h.to(wide), top_k_weights, *static)
        return dh.to(dtype), a.to(dtype)
    w = None if top_k_weights is None else tile.scale(top_k_weights)
    dh, a, dots = weighted_backward(da, h, w, activation, glu, params)
    if top_k_weights is None or dots is None:
        tile.tiling.buffer(dweights_key, lambda: da.new_empty(0))
    else:
        _record_dweights(tile, dweights_key, top_k_weights, dots)
    return dh, a


def _record_dweights(tile: Tile, key: str, weights: Tensor, dots: Tensor) -> None:
    tiling = tile.tiling
    assert tiling.slots is not None
    finish = partial(_by_slot, tiling.slots, weights.shape, weights.dtype)
    if tile.whole:
        tiling.buffer(key, lambda: dots, finish)
    else:
        tile.part(tiling.buffer(key, lambda: dots.new_zeros(tiling.n), finish)).copy_(dots)


def _by_slot(slots: Tensor, shape: torch.Size, dtype: torch.dtype, rows: Tensor) -> Tensor:
    return torch.empty_like(rows).scatter_(0, slots, rows).view(shape).to(dtype)


def ess(tile: Tile, key: str, g: Tensor, gathered: bool, scale: Tensor | None) -> None:
    """`hexa::ess` of a tile, to the output ``key``."""
    y = tile.tiling.accumulator(key, tile.tiling.experts, g.shape[1])
    for e, rows in _by_expert(tile, g, gathered, scale):
        torch.sum(rows, 0, out=y[e])


def ess_add(tile: Tile, into: Tensor, g: Tensor, gathered: bool, scale: Tensor | None) -> None:
    """`hexa::ess_add` of a tile."""
    for e, rows in _by_expert(tile, g, gathered, scale):
        into[e].add_(rows.sum(0))


def _by_expert(tile: Tile, g: Tensor, gathered: bool, scale: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The experts of the tile that have rows, each with its rows, scaled and in the accumulators' dtype."""
    rows = _scaled(tile, tile.rows(g, gathered), scale)
    for (e, _, _), part, _ in cpu.split(tile.groups, rows, rows) if tile.groups else ():
        yield e, part


def _scaled(tile: Tile, rows: Tensor, scale: Tensor | None) -> Tensor:
    return rows.to(tile.tiling.wide) if scale is None else rows * tile.scale(scale)


def estmm(tile: Tile, key: str, x: Tensor, g: Tensor, x_gathered: bool, g_gathered: bool, layout: str) -> None:
    """`hexa::estmm` of a tile, to the output ``key``."""
    x, g = tile.rows(x, x_gathered), tile.rows(g, g_gathered)
    if layout == "nk":
        x, g = g, x
    tiling, k, n = tile.tiling, x.shape[1], g.shape[1]
    everyone = bool(tile.groups) and (tile.groups[0][0], tile.groups[-1][0] + 1) == (0, tiling.experts)
    if _is_one_product(tile, x, g, everyone):
        first, end, offs = tile.local_offs()
        y = grouped_mm(x.t(), g, offs=offs)
        if everyone:
            tiling.buffer(key, lambda: y)
        else:
            tiling.buffer(key, lambda: _weight_output(tiling, k, n))[first:end].copy_(y)
        return
    if tile.whole and len(tile.groups) == tiling.experts and tiling.experts * k * n <= cpu.SMALL:
        tiling.buffer(key, lambda: cpu.outer_products(x, g, tile.groups).to(tiling.dtype))
        return
    out = tiling.buffer(key, lambda: _weight_output(tiling, k, n))
    if tile.groups:
        cpu.outer_groups(x, g, tile.groups, out)


def estmm_add(tile: Tile, into: Tensor, x: Tensor, g: Tensor, x_gathered: bool, g_gathered: bool, layout: str) -> None:
    """`hexa::estmm_add` of a tile."""
    x, g = tile.rows(x, x_gathered), tile.rows(g, g_gathered)
    if layout == "nk":
        x, g = g, x
    if _is_one_product(tile, x, g, False):
        first, end, offs = tile.local_offs()
        into[first:end].add_(grouped_mm(x.t(), g, offs=offs))
    elif tile.groups:
        cpu.add_outer_groups(x, g, tile.groups, into)


def _is_one_product(tile: Tile, x: Tensor, g: Tensor, kept: bool) -> bool:
    """Whether torch's grouped matmul gives the experts' outer products sooner than a loop that writes each to its place.

    Args:
        kept: what it gives is the output as it is, not copied or added to it.
    """
    outer = x.shape[1] * g.shape[1]
    overhead = (kept or outer <= cpu.SMALL) and cpu.has_loop_overhead(tile.groups, x.shape[0] * outer)
    return overhead and cpu.grouped_mm_takes(x, g)


def _weight_output(tiling: Tiling, k: int, n: int) -> Tensor:
    """(E, K, N), zero for the experts that no tile will write."""
    y = torch.empty((tiling.experts, k, n), dtype=tiling.dtype, device="cpu")
    empty_from = 0
    for e, (start, end) in enumerate(pairwise(tiling.bounds)):
        if start == end:
            continue
        if empty_from < e:
            y[empty_from:e].zero_()
        empty_from = e + 1
    if empty_from < tiling.experts:
        y[empty_from:].zero_()
    return y


def esfk(
    tile: Tile,
    dw_key: str,
    db_key: str | None,
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    gathered: bool,
    layout: str,
) -> Tensor:
    """`hexa::esfk` of a tile: dx (rows, K). dW and db go to the outputs of their keys."""
    estmm(tile, dw_key, x, g, gathered, False, layout)
    if db_key is not None:
        ess(tile, db_key, g, False, None)
    return _input_gradient(tile, g, weight, layout)


def esfk_add(
    tile: Tile,
    into: Tensor,
    into_bias: Tensor | None,
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    gathered: bool,
    layout: str,
) -> Tensor:
    """`hexa::esfk_add` of a tile: dx (rows, K)."""
    estmm_add(tile, into, x, g, gathered, False, layout)
    if into_bias is not None:
        ess_add(tile, into_bias, g, False, None)
    return _input_gradient(tile, g, weight, layout)


def _input_gradient(tile: Tile, g: Tensor, weight: Tensor, layout: str) -> Tensor:
    """dx (rows, K): g times the transposed weight."""
    return _project(tile, g, as_kn(weight, flip(layout)), None)


def combine(tile: Tile, key: str, y: Tensor, top_k_weights: Tensor | None, by_slot: bool) -> None:
    """`hexa::combine` of a tile: adds its rows to their tokens (or slots) in the output ``key``, in float32."""
    tiling = tile.tiling
    index, count = (tiling.slots, tiling.n) if by_slot else (tiling.token, tiling.tokens)
    assert index is not None
    out = tiling.accumulator(key, count, y.shape[1])
    out.index_add_(0, tile.part(index), _scaled(tile, y, top_k_weights))
