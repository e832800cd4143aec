"""Which slice of an expert weight a rank stores, and the packed rows that travel between ranks.

A rank keeps channels ``lo .. hi`` of the intermediate size, of every expert, in the user's own layout: gate and up are
cut alike, whether they are two halves of one weight, its even and odd rows, or two weights.

For a gather each channel becomes one row, so that the shards of all ranks concatenate whatever their sizes:

    row of channel h = [gate (E, D) | up (E, D) | down (E, D) | gate bias (E) | up bias (E) | padding to 8 elements]

and the gathered (I, row) matrix is read in place, as weights (E, I, D) of strides (D, row, 1).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexa_fx.distributed.copies import Copies, copies_between
from hexa_fx.errors import PlanError
from hexa_fx.ir import Glu, Layout
from hexa_fx.ops.table_layers import PARAMETERS
from hexa_fx.plan import ExpertShape

ROLES = tuple(name for name in PARAMETERS if name != "b2")
"""The sliced weights of `hexa::moe_ffn`, in its order. The output bias has no intermediate dimension and is replicated."""
_IN_ROW = ("w1", "w3", "w2", "b1", "b3")

Weights = tuple[Tensor | None, ...]
"""One optional tensor a role, in the order of `ROLES`."""

_ROW_ALIGNMENT = 8


@dataclass(frozen=True)
class Chunk:
    """``length`` entries along ``dim``: at ``start`` in the whole tensor, at ``local`` in the rank's slice."""

    dim: int
    start: int
    local: int
    length: int


def taken(whole: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """A contiguous copy of what a rank holds."""
    parts = [whole.narrow(chunk.dim, chunk.start, chunk.length) for chunk in chunks]
    return torch.cat(parts, dim=chunks[0].dim).contiguous()


@dataclass(frozen=True)
class Geometry:
    """Static layout of one layer's experts."""

    shape: ExpertShape
    glu: Glu
    layout1: Layout
    layout2: Layout
    bias: bool

    @property
    def gated(self) -> bool:
        return self.glu != "none"

    @functools.cached_property
    def row(self) -> int:
        """Elements of one packed channel."""
        _, used = self._places
        return -(-used // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @functools.cached_property
    def _places(self) -> tuple[dict[str, int], int]:
        """Where each role that there is begins in a row, and where the last one ends."""
        begins, used = {}, 0
        for role in _IN_ROW:
            if (self.gated or role[1] != "3") and (self.bias or role[0] == "w"):
                begins[role] = used
                used += self.shape.num_experts * (self.shape.hidden_size if role[0] == "w" else 1)
        return begins, used

    def dim(self, role: str) -> int:
        """The intermediate dimension of a role's tensor."""
        return self._dims[role]

    @functools.cached_property
    def _dims(self) -> dict[str, int]:
        first, second = 1 if self.layout1 == "nk" else 2, 2 if self.layout2 == "nk" else 1
        return {role: 1 if role[0] == "b" else second if role == "w2" else first for role in ROLES}

    def chunks(self, role: str, lo: int, hi: int) -> tuple[Chunk, ...]:
        """Where channels ``lo .. hi`` lie in the whole tensor of a role, and where in the rank's slice."""
        dim, length = self.dim(role), hi - lo
        if role in ("w1", "b1") and self.glu == "concat":
            total = self.shape.intermediate_size
            return (Chunk(dim, lo, 0, length), Chunk(dim, total + lo, length, length))
        if role in ("w1", "b1") and self.glu == "interleaved":
            return (Chunk(dim, 2 * lo, 0, 2 * length),)
        return (Chunk(dim, lo, 0, length),)

    def pack(self, weights: Weights, channels: int, dtype: torch.dtype) -> Tensor:
        """Local slices (or gradients of them) -> (channels, row). Missing ones are zeros."""
        rows = self._empty_rows(_some(weights), channels, dtype)
        self.packing(rows, weights).run()
        return rows

    def packing(self, rows: Tensor, weights: Weights) -> Copies:
        """The copies that `pack` makes, into given rows, without the padding. Valid while the tensors stay where they are."""
        return copies_between(self._stored_as(rows), self._in_halves(weights, rows.shape[0]))

    def views(self, rows: Tensor) -> Weights:
        """(channels, row) -> weights of a split or ungated expert, layout1 ``nk``, layout2 ``kn``. No copy."""
        channels, row = rows.shape
        experts, width, start = self.shape.num_experts, self.shape.hidden_size, rows.storage_offset()
        matrix, bias = ((experts, channels, width), (width, row, 1)), ((experts, channels), (1, row))
        begins, _ = self._places
        found: list[Tensor | None] = []
        for role in ROLES:  # every step does this for every layer, so it calls no function of ours
            sizes, strides = matrix if role[0] == "w" else bias
            found.append(rows.as_strided(sizes, strides, start + begins[role]) if role in begins else None)
        return tuple(found)

    def unpack(self, rows: Tensor, dtype: torch.dtype, wanted: Sequence[bool] = (True,) * len(ROLES)) -> Weights:
        """(channels, row) -> contiguous local slices in the user's layout; None for roles that are not wanted."""
        channels = rows.shape[0]
        stored = self._stored_as(rows)
        weights: list[Tensor | None] = []
        for size, view, want in zip(self._local_sizes(channels), stored, wanted, strict=True):
            weights.append(rows.new_empty(size, dtype=dtype) if want and view is not None else None)
        copies_between(self._in_halves(weights, channels), stored).run()
        return tuple(weights)

    def view_grads(self, grads: Weights, dtype: torch.dtype) -> Tensor:
        """Gradients of `views` -> (I, row). Missing ones are zeros."""
        rows = self._empty_rows(_some(grads), self.shape.intermediate_size, dtype)
        copies_between(self.views(rows), grads).run()
        return rows

    def _empty_rows(self, like: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
        """Rows of which only the padding is set."""
        rows = like.new_empty((channels, self.row), dtype=dtype)
        _, used = self._places
        if used < self.row:
            rows[:, used:].zero_()
        return rows

    @functools.cached_property
    def _joined(self) -> bool:
        """Whether gate and up are halves of one user weight, so that one copy takes both."""
        return self.glu in ("concat", "interleaved")

    def _stored_as(self, rows: Tensor) -> Weights:
        """Views of packed rows that a role's local slice is copied to: (E, channels, D), or (E, 2, channels, D) of halves."""
        views = self.views(rows)
        if not self._joined:
            return views
        by_role = dict(zip(ROLES, views, strict=True))
        for one, other in (("w1", "w3"), ("b1", "b3")):
            by_role[one], by_role[other] = _together(by_role[one], by_role[other]), None
        return tuple(by_role.values())

    def _in_halves(self, weights: Sequence[Tensor | None], channels: int) -> Weights:
        """Local slices in the user's layout -> views shaped as `_stored_as`."""
        found: list[Tensor | None] = []
        for role, weight in zip(ROLES, weights, strict=True):
            if weight is not None and self._dims[role] == 2:
                weight = weight.transpose(1, 2)
            found.append(self._halves(weight, channels) if self._joined and role[1] == "1" else weight)
        return tuple(found)

    def _halves(self, joined: Tensor | None, channels: int) -> Tensor | None:
        if joined is None:
            return None
        experts, _, *width = joined.shape
        if self.glu == "concat":
            return joined.view(experts, 2, channels, *width)
        return joined.view(experts, channels, 2, *width).transpose(1, 2)

    def _local_sizes(self, channels: int) -> list[tuple[int, ...]]:
        """Shapes of a rank's slices, by role."""
        experts, width = self.shape.num_experts, self.shape.hidden_size
        found: list[tuple[int, ...]] = []
        for role in ROLES:
            wide = 2 * channels if self._joined and role[1] == "1" else channels
            matrix = (experts, wide, width) if self._dims[role] == 1 else (experts, width, wide)
            found.append(matrix if role[0] == "w" else (experts, wide))
        return found


def _together(gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """Two views of the same rows as (E, 2, channels, ...)."""
    if gate is None or up is None:
        return None
    apart = up.storage_offset() - gate.storage_offset()
    return gate.as_strided((len(gate), 2, *gate.shape[1:]), (gate.stride(0), apart, *gate.stride()[1:]))


def _some(tensors: Weights) -> Tensor:
    for tensor in tensors:
        if tensor is not None:
            return tensor
    raise PlanError("no gradient of any expert weight arrived; at least one of a layer's weights must require one")


def shape_of(w1: Tensor, glu: Glu, layout1: Layout, top_k: int) -> ExpertShape:
    """The sizes of a layer, from its whole first weight."""
    rows, hidden = (w1.shape[1], w1.shape[2]) if layout1 == "nk" else (w1.shape[2], w1.shape[1])
    intermediate = rows // 2 if glu in ("concat", "interleaved") else rows
    return ExpertShape(int(w1.shape[0]), int(hidden), int(intermediate), 2 if glu == "none" else 3, top_k)
