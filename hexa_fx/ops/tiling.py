"""Cuts the rows of a routing into tiles, and holds the outputs that the tiles fill together.

The kernels on a tile are in `hexa_fx.ops.tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import cpu, fixed_order
from hexa_fx.ops.cpu import Group
from hexa_fx.ops.reindex import int_tensor, sort_slots
from hexa_fx.ops.rows import accumulate_dtype

TILE_ELEMENTS = 1 << 17
"""Elements a thread of a tile's rows: what several operators go over should fit a core's cache."""

_PIECE_ROWS = 512
"""Rows at which a matmul is efficient: a longer expert may be done in pieces."""

_FEW_ROWS = 16
"""So few rows are one tile at any width."""


class Tiling:
    """All tiles of one routing, and the outputs that they fill together.

    Args:
        slots: (n,) int64, slot of every row; None when no operand is gathered.
        token: (n,) int64, token of every row; None likewise.
        bounds: E + 1 row offsets.
        n: number of rows, including those without an expert.
        top_k: slots a token.
        like: an operand: (., columns), in the dtype of all operands and of the outputs.
    """

    def __init__(
        self, slots: Tensor | None, token: Tensor | None, bounds: list[int], n: int, top_k: int, like: Tensor
    ) -> None:
        self.slots, self.token, self.bounds = slots, token, bounds
        self.n, self.tokens = n, n // top_k
        self.experts, self.routed = len(bounds) - 1, bounds[-1]
        self.dtype = like.dtype
        self.wide = accumulate_dtype(like.dtype)
        elements = 0 if fixed_order.is_fixed() else self.routed * like.shape[-1] // max(len(cpu.groups_of(bounds)), 1)
        self.compute = cpu.compute_dtype(like.dtype, elements)
        self.outputs: dict[str, Callable[[], Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}

    def buffer(self, key: str, make: Callable[[], Tensor], finish: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The tensor behind an output, made by the first tile that asks for it. ``finish`` turns it into the output."""
        found = self.buffers.get(key)
        if found is None:
            found = self.buffers[key] = make()
            self.outputs[key] = partial(finish, found) if finish else lambda: found
        return found

    def accumulator(self, key: str, rows: int, columns: int) -> Tensor:
        """A float32 (float64) buffer of zeros that tiles add to. The output has the operands' dtype."""
        make = partial(torch.zeros, (rows, columns), dtype=self.wide, device="cpu")
        return self.buffer(key, make, lambda sums: sums.to(self.dtype))


def route(top_k_index: Tensor, num_experts: int, like: Tensor) -> Tiling:
    """The tiling of a routing, for operands like ``like``."""
    found = sort_slots(top_k_index, num_experts)
    return Tiling(found.slots, found.token, found.bounds, found.slots.shape[0], top_k_index.shape[1], like)


def route_and_reindex(top_k_index: Tensor, num_experts: int, like: Tensor) -> tuple[Tiling, Tensor, Tensor, Tensor]:
    """`route` and the tensors (v, inv, offs) that `hexa::reindex` gives."""
    found = sort_slots(top_k_index, num_experts)
    tiling = Tiling(found.slots, found.token, found.bounds, found.slots.shape[0], top_k_index.shape[1], like)
    return tiling, *found.tensors()


def routed(v: Tensor | None, offs: Tensor, top_k: int, like: Tensor) -> Tiling:
    """The tiling of what `hexa::reindex` gave; with v None, of operands in expert order, of as many rows as like."""
    bounds: list[int] = offs.tolist()
    if v is None:
        return Tiling(None, None, bounds, like.shape[0], 1, like)
    slots = v.long()
    token = slots if top_k == 1 else slots.div(top_k, rounding_mode="floor")
    return Tiling(slots, token, bounds, v.shape[0], top_k, like)


def run(tiling: Tiling, body: torch.nn.Module, pieces: bool, *operands: Any) -> Tiling:
    """Calls ``body(tile, *operands)`` for every tile (once with an empty one when there is no row at all).

    Args:
        tiling: the tiles and their outputs; it is returned.
        body: row operators of this module, tile first.
        pieces: whether a long expert may be cut (if nothing sums over its rows).
        operands: tensors and None.
    """
    cpu.settle_allocator()
    groups = cpu.groups_of(tiling.bounds)
    limit = _FEW_ROWS
    if tiling.routed > limit:
        width = max(max(t.shape[-2:]) if t.ndim == 3 else t.shape[-1] for t in operands if t is not None)
        limit = max(limit, TILE_ELEMENTS * torch.get_num_threads() // max(width, 1))
    if tiling.routed <= limit:
        body.forward(Tile(tiling, groups), *operands)
        return tiling
    for batch in _batches(groups, limit, pieces):
        body.forward(Tile(tiling, batch), *operands)
    return tiling


def whole(v: Tensor | None, offs: Tensor, top_k: int, like: Tensor) -> Tile:
    """One tile of all rows, for an operator that is called on its own."""
    tiling = routed(v, offs, top_k, like)
    return Tile(tiling, cpu.groups_of(tiling.bounds))


def output(tiling: Tiling, key: str) -> Tensor:
    """A finished output, which the tiling then drops: autograd copies a gradient that something else still holds."""
    del tiling.buffers[key]
    return tiling.outputs.pop(key)()


class Tile:
    """A range of rows, of one or several experts."""

    def __init__(self, tiling: Tiling, groups: list[Group]) -> None:
        self.tiling = tiling
        self.groups = groups
        self.start = groups[0][1] if groups else 0
        self.end = groups[-1][2] if groups else 0
        self.whole = self.start == 0 and self.end == tiling.n
        self._rows: dict[int, Tensor] = {}

    def part(self, t: Tensor) -> Tensor:
        """The tile's rows of a tensor in expert order."""
        return t if self.whole else t[self.start : self.end]

    def operand(self, x: Tensor, v: Tensor | None) -> Tensor:
        """x as the kernels take it: whole if they gather from it, else the tile's rows in compute dtype."""
        return x if v is not None else self.part(x).to(self.tiling.compute)

    def padded(self, y: Tensor) -> Tensor:
        """The tile's rows extended to all rows, with zeros for rows without an expert, in the operands' dtype."""
        tiling = self.tiling
        if y.shape[0] == tiling.n:
            return y.to(tiling.dtype)
        full = y.new_zeros((tiling.n, y.shape[1]), dtype=tiling.dtype)
        full[self.start : self.end].copy_(y)
        return full

    def rows(self, x: Tensor, index: object) -> Tensor:
        """The row operand in compute dtype, gathered if there is an index. Such rows are kept for the tile's next operator."""
        if index is None:
            return x
        found = self._rows.get(id(x))
        if found is None:
            assert self.tiling.token is not None
            found = x.index_select(0, self.part(self.tiling.token)).to(self.tiling.compute)
            self._rows[id(x)] = found
        return found

    def scale(self, weights: Tensor) -> Tensor:
        """(rows, 1): the routing weight of every row, in float32 (float64)."""
        found = self._rows.get(id(weights))
        if found is None:
            assert self.tiling.slots is not None
            found = weights.reshape(-1, 1).index_select(0, self.part(self.tiling.slots)).to(self.tiling.wide)
            self._rows[id(weights)] = found
        return found

    @property
    def experts(self) -> tuple[int, int]:
        """The first expert, and the end of them."""
        return self.groups[0][0], self.groups[-1][0] + 1

    def local_offs(self) -> Tensor:
        """End rows of these experts within the tile."""
        first, end = self.experts
        return int_tensor("i", [row - self.start for row in self.tiling.bounds[first + 1 : end + 1]])


def _batches(groups: list[Group], limit: int, pieces: bool) -> Iterator[list[Group]]:
    piece = max(limit, _PIECE_ROWS)
    batch: list[Group] = []
    for e, start, end in groups:
        if batch and end - batch[0][1] > limit:
            yield batch
            batch = []
        while pieces and end - start > 2 * piece:
            yield [(e, start, start + piece)]
            start += piece
        batch.append((e, start, end))
    if batch:
        yield batch
