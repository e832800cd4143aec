"""The CPU kernels: every operator on one tile, a range of experts whose rows fit in the cache.

A program of row operators never needs all rows at once. On a CPU it therefore runs tile by tile: rows are gathered once per
tile and shared, values between operators (n x I and n x D in all) stay in the cache and in recycled memory, and combine adds a
tile's rows to their tokens. Nothing of size T*k*D is ever written.

A kernel here takes the tile, the operator's record, and a key for each result that does not consist of rows of the tile (a weight's
gradient, a sum over tokens), which goes to an output of the tiling. Of the record's indices it only asks whether they are given:
the tile knows them, and offs and top_k. An operator that is called on its own has one tile of everything (`at_once`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hexa_fx.ops import cpu, fixed_order, library, table
from hexa_fx.ops.activations import ACTIVATIONS, gate_and_up, weighted_backward
from hexa_fx.ops.cpu import Weight, as_kn
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.rows import flip, gather_rows
from hexa_fx.ops.tiling import Tile, Tiling, output, whole
from hexa_fx.torch_private import grouped_mm

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
_RAISED = 1 << 20
"""Elements up to which a weight is copied as a whole, rather than read an expert at a time: a half-type one to raise it, say."""
_COPIED = 1 << 14
"""Elements of a matrix up to which those of a list are copied for a grouped matmul, in less time than a matmul takes to begin."""


ROWS = "rows"
"""A result that consists of rows of the tile, which its kernel returns. Others are outputs of the tiling, each with a key."""
_ASKED_BY = {"h": "keep_h", "db": "has_bias"}
"""By output, the operand that says whether it is wanted."""


def on_tile(name: str, *results: str) -> Callable[[Kernel], Kernel]:
    """Decorates the kernel of ``hexa::<name>`` on a tile. results: of each, its key, or `ROWS`."""
    record = library.record_of(name)

    def decorate(kernel: Kernel) -> Kernel:
        @wraps(kernel)
        def run(tile: Tile, keys: Sequence[str | None], *args: Any) -> Any:
            return kernel(tile, record(*args), *keys)

        KERNELS[name], RESULTS[name] = run, results
        return kernel

    return decorate


KERNELS: dict[str, Callable[..., Any]] = {}
"""By operator, of a tile, the keys of outputs, and the operator's arguments."""
RESULTS: dict[str, tuple[str, ...]] = {}
"""By operator, what its results are: keys, and `ROWS`."""


def keys_of(name: str, o: Any, prefix: str = "") -> list[str | None]:
    """The keys of a call's outputs; None for one that is not wanted."""
    outputs = (result for result in RESULTS[name] if result != ROWS)
    return [prefix + key if getattr(o, _ASKED_BY.get(key, ""), True) else None for key in outputs]


def at_once(name: str, o: Any) -> Any:
    """An operator that is called on its own: its kernel on one tile of everything, which gathers its first rows."""
    (first, index), *others = operands = _rows_of(name)
    for row, by in others:
        if (v := getattr(o, by, None)) is not None:
            o = o._replace(**{row: gather_rows(getattr(o, row), v, o.top_k), by: None})
    tile = whole(getattr(o, index, None), o.offs, o.top_k, getattr(o, first))
    rows = {row: tile.operand(getattr(o, row), getattr(o, by, None)) for row, by in operands}
    keys = keys_of(name, o)
    made, left, results = KERNELS[name](tile, keys, *o._replace(**rows)), iter(keys), list[Any]()
    returned = iter(made if isinstance(made, tuple) else (made,))
    for place, kind in enumerate(RESULTS[name]):
        if kind == ROWS:
            results.append(tile.padded(next(returned)))
        else:
            key = next(left)
            results.append(o.results()[place] if key is None else output(tile.tiling, key))
    return tuple(results) if len(results) > 1 else results[0] if results else None


@cache
def _rows_of(name: str) -> list[tuple[str, str]]:
    """The operands of an operator that are rows, each with the index that may gather it."""
    operands = library.record_of(name).operands
    return [(o.name, o.form.by) for o in operands if o.dtypes is None and o.form.dims.startswith("n ")]


def part(tile: Tile, t: Tensor) -> Tensor:
    """The tile's rows of a tensor in expert order, in compute dtype."""
    return tile.operand(t, None)


@on_tile("esmm", ROWS)
def esmm(tile: Tile, o: table.Esmm) -> Tensor:
    """(rows, N)."""
    return _project(tile, tile.rows(o.x, o.v), as_kn(o.weight, o.layout), o.bias)


def _project(tile: Tile, x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
    """Every row times its expert's weight (E, K, N)."""
    groups = tile.groups
    if not groups:
        return x.new_empty((0, weight.shape[2]))
    parts = weight if isinstance(weight, Listed) and len(weight.sizes) > 1 else None
    if fixed_order.is_fixed() and parts is None:
        out = x.new_empty((x.shape[0], weight.shape[2]))
        fixed_order.multiply_groups_into(x, weight, bias, groups, out)
        return out
    overhead = bias is None and cpu.has_loop_overhead(groups, x.shape[0] * x.shape[1] * weight.shape[2])
    together = _together(weight, *tile.experts, x.dtype) if overhead and not fixed_order.is_fixed() else None
    if together is not None and cpu.grouped_mm_takes(x, together):
        return grouped_mm(x, together, offs=tile.local_offs())
    return cpu.multiply_groups(x, weight, bias, groups) if parts is None else _by_parts(tile, x, parts, bias)


def _together(weight: Weight, first: int, end: int, dtype: torch.dtype) -> Tensor | None:
    """Matrices of some experts as one tensor, for a grouped matmul; None where a loop over them takes less time."""
    if isinstance(weight, Listed):
        small = weight.shape[1] * weight.shape[2] <= _COPIED and weight.numel() <= _RAISED
        return weight.between(first, end).to(dtype) if small else None
    if weight.dtype != dtype:
        return weight.to(dtype)[first:end] if weight.numel() <= _RAISED else None
    return weight[first:end]


def _by_parts(tile: Tile, x: Tensor, weight: Listed, bias: Weight | None) -> Tensor:
    """`_project` with a weight whose parts are columns; or, turned, rows."""
    if weight.turned:
        out = x.new_empty((x.shape[0], weight.shape[2]))
        _project_into(tile, x, weight, bias, out)
        return out
    rows = x.split_with_sizes(weight.sizes, 1)
    first, *others = (_project(tile, part, piece, None) for part, piece in zip(rows, weight.pieces(), strict=True))
    for other in others:
        first.add_(other)
    return first


def _project_into(tile: Tile, x: Tensor, weight: Weight, bias: Weight | None, out: Tensor) -> None:
    """`_project` to a part of wider rows."""
    multiply_groups_into = fixed_order.multiply_groups_into if fixed_order.is_fixed() else cpu.multiply_groups_into
    if not isinstance(weight, Listed) or len(weight.sizes) == 1:
        multiply_groups_into(x, weight, bias, tile.groups, out)
        return
    pieces, columns = weight.pieces(), out.split_with_sizes(weight.sizes, 1)
    biases: Sequence[Any] = [None] * len(pieces)
    if bias is not None:
        biases = bias.pieces() if isinstance(bias, Listed) else bias.split_with_sizes(weight.sizes, 1)
    for piece, own, part in zip(pieces, biases, columns, strict=True):
        multiply_groups_into(x, piece, own, tile.groups, part)


@on_tile("esmm_act", "h", ROWS)
def esmm_act(tile: Tile, o: table.EsmmAct, h_key: str | None) -> Tensor:
    """a (rows, I). h goes to the output ``h_key`` where one is given."""
    rows, first, x, b1, w3 = tile.rows(o.x, o.v), as_kn(o.w1, o.layout), o.x, o.b1, o.w3
    width = first.shape[2] if w3 is None else 2 * first.shape[2]
    kept, tiling = None, tile.tiling
    if h_key is not None:
        if tile.whole and w3 is None and rows.dtype == x.dtype:
            whole = tiling.buffer(h_key, lambda: _project(tile, rows, first, b1))
            return _activated(tile, whole, o)
        kept = tile.part(tiling.buffer(h_key, partial(_rows_output, tiling, width)))
    h = kept if kept is not None and kept.dtype == rows.dtype else None
    if w3 is not None:
        h = rows.new_empty((rows.shape[0], width)) if h is None else h
        gate, up = h.chunk(2, dim=1)
        _project_into(tile, rows, first, b1, gate)
        _project_into(tile, rows, as_kn(w3, o.layout), o.b3, up)
    elif h is None:
        h = _project(tile, rows, first, b1)
    else:
        _project_into(tile, rows, first, b1, h)
    if kept is not None and kept is not h:
        kept.copy_(h)
    return _activated(tile, h, o)


def _rows_output(tiling: Tiling, width: int) -> Tensor:
    y = torch.empty((tiling.n, width), dtype=tiling.dtype, device="cpu")
    if tiling.routed < tiling.n:
        y[tiling.routed :].zero_()
    return y


@on_tile("activate", ROWS)
def activate(tile: Tile, o: table.Activate) -> Tensor:
    """(rows, I)."""
    return _activated(tile, o.h, o)


def _activated(tile: Tile, h: Tensor, o: table.Activated) -> Tensor:
    act, dtype, wide = ACTIVATIONS[o.activation], h.dtype, tile.tiling.wide
    if dtype != wide:
        return _activated(tile, h.to(wide), o).to(dtype)
    run = fixed_order.elementwise if fixed_order.is_fixed() else lambda function, *whole: function(*whole)
    if o.glu == "none":
        return run(act.forward, h)
    gate, up = gate_and_up(h, o.glu)
    if act.pair:
        return run(lambda g, u: act.forward(g, u, *(o.params or act.params)), gate, up)
    return run(act.forward, gate).mul_(up)


@on_tile("activate_backward", ROWS, ROWS, "dweights")
def activate_backward(tile: Tile, o: table.ActivateBackward, dweights_key: str) -> tuple[Tensor, Tensor]:
    """(dh, a_scaled)."""
    dtype, wide = o.da.dtype, tile.tiling.wide
    if dtype != wide or o.h.dtype != wide:
        dh, a = activate_backward(tile, o._replace(da=o.da.to(wide), h=o.h.to(wide)), dweights_key)
        return dh.to(dtype), a.to(dtype)
    w = None if o.top_k_weights is None else tile.scale(o.top_k_weights)
    dh, a, dots = weighted_backward(o.da, o.h, w, o.activation, o.glu, o.params)
    if o.top_k_weights is None or dots is None:
        tile.tiling.buffer(dweights_key, lambda: o.da.new_empty(0))
    else:
        _record_dweights(tile, dweights_key, o.top_k_weights, dots)
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


@on_tile("ess", "sums")
def ess(tile: Tile, o: table.Ess, key: str) -> None:
    """To the output ``key``."""
    y = tile.tiling.accumulator(key, tile.tiling.experts, o.g.shape[1])
    for e, rows in _by_expert(tile, tile.rows(o.g, o.v), o.scale):
        torch.sum(rows, 0, out=y[e])


@on_tile("ess_add")
def ess_add(tile: Tile, o: table.EssAdd) -> None:
    """To a buffer."""
    _add_sums(tile, o.into, tile.rows(o.g, o.v), o.scale)


def _add_sums(tile: Tile, into: Any, g: Tensor, scale: Tensor | None) -> None:
    for e, rows in _by_expert(tile, g, scale):
        if isinstance(into, Tensor):
            into[e].add_(rows.sum(0))
            continue
        for piece, columns in zip(into.pieces, rows.split_with_sizes(into.sizes, 1), strict=True):
            piece.add(e, columns.sum(0))


def _by_expert(tile: Tile, g: Tensor, scale: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The experts of the tile that have rows, each with its rows, scaled and in the accumulators' dtype."""
    rows = _scaled(tile, g, scale)
    for (e, _, _), part, _ in cpu.split(tile.groups, rows, rows) if tile.groups else ():
        yield e, part


def _scaled(tile: Tile, rows: Tensor, scale: Tensor | None) -> Tensor:
    return rows.to(tile.tiling.wide) if scale is None else rows * tile.scale(scale)


@on_tile("estmm", "dw")
def estmm(tile: Tile, o: table.Estmm, key: str) -> None:
    """To the output ``key``."""
    x, g = _sides(tile, o)
    tiling, k, n = tile.tiling, x.shape[1], g.shape[1]
    everyone = bool(tile.groups) and tile.experts == (0, tiling.experts)
    if _is_one_product(tile, x, g, everyone):
        first, end = tile.experts
        y = grouped_mm(x.t(), g, offs=tile.local_offs())
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


def _sides(tile: Tile, o: table.Estmm) -> tuple[Tensor, Tensor]:
    """Rows of the operand that gives the rows of dW, and of the other."""
    x, g = tile.rows(o.x, o.x_index), tile.rows(o.g, o.g_index)
    return (g, x) if o.layout == "nk" else (x, g)


@on_tile("estmm_add")
def estmm_add(tile: Tile, o: table.EstmmAdd) -> None:
    """To a buffer."""
    (x, g), into = _sides(tile, o), cast("Any", o.into)
    if not isinstance(into, Tensor):
        for piece, columns in zip(into.pieces, x.split_with_sizes(into.sizes, 1), strict=True) if tile.groups else ():
            cpu.give_outer_groups(columns, g, tile.groups, piece)
    elif _is_one_product(tile, x, g, False):
        first, end = tile.experts
        into[first:end].add_(grouped_mm(x.t(), g, offs=tile.local_offs()))
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


@on_tile("esfk", ROWS, "dw", "db")
def esfk(tile: Tile, o: table.Esfk, dw_key: str, db_key: str | None) -> Tensor:
    """dx (rows, K). dW and db go to the outputs of their keys."""
    estmm(tile, o.to(table.Estmm), dw_key)
    if db_key is not None:
        ess(tile, o.to(table.Ess), db_key)
    return _input_gradient(tile, o)


@on_tile("esfk_add", ROWS)
def esfk_add(tile: Tile, o: table.EsfkAdd) -> Tensor:
    """dx (rows, K)."""
    estmm_add(tile, o.to(table.EstmmAdd))
    if o.into_bias is not None:
        _add_sums(tile, o.into_bias, o.g, None)
    return _input_gradient(tile, o)


def _input_gradient(tile: Tile, o: table.Esfk | table.EsfkAdd) -> Tensor:
    """dx (rows, K): g times the transposed weight."""
    return _project(tile, o.g, as_kn(o.weight, flip(o.layout)), None)


@on_tile("combine", "y")
def combine(tile: Tile, o: table.Combine, key: str) -> None:
    """Adds its rows to their tokens in the output ``key``, in float32; to their slots if a ``top_k`` is given, which is 1."""
    tiling = tile.tiling
    index, count = (tiling.token, tiling.tokens) if o.top_k is None else (tiling.slots, tiling.n)
    assert index is not None
    out = tiling.accumulator(key, count, o.y.shape[1])
    out.index_add_(0, tile.part(index), _scaled(tile, o.y, o.top_k_weights))
