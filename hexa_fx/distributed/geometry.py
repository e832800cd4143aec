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
from hexa_fx.plan import ExpertShape

ROLES = ("w1", "b1", "w3", "b3", "w2")
"""The sliced weights of `hexa::moe_ffn`. The output bias b2 has no intermediate dimension and is replicated."""

Weights = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
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
        return -(-self._used // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @functools.cached_property
    def _used(self) -> int:
        s = self.shape
        used = (3 if self.gated else 2) * s.num_experts * s.hidden_size
        if self.bias:
            used += (2 if self.gated else 1) * s.num_experts
        return used

    def dim(self, role: str) -> int:
        """The intermediate dimension of a role's tensor."""
        if role in ("b1", "b3"):
            return 1
        if role == "w2":
            return 2 if self.layout2 == "nk" else 1
        return 1 if self.layout1 == "nk" else 2

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
        gate, gate_bias, up, up_bias, down = self._offsets
        return (
            rows.as_strided(*matrix, start + gate),
            None if gate_bias is None else rows.as_strided(*bias, start + gate_bias),
            None if up is None else rows.as_strided(*matrix, start + up),
            None if up_bias is None else rows.as_strided(*bias, start + up_bias),
            rows.as_strided(*matrix, start + down),
        )

    def unpack(self, rows: Tensor, dtype: torch.dtype, wanted: Sequence[bool] = (True,) * len(ROLES)) -> Weights:
        """(channels, row) -> contiguous local slices in the user's layout; None for roles that are not wanted."""
        channels = rows.shape[0]
        stored, sizes = self._stored_as(rows), self._local_sizes(channels)
        w1, b1, w3, b3, w2 = [
            rows.new_empty(size, dtype=dtype) if there is not None and want else None
            for size, there, want in zip(sizes, stored, wanted)
        ]
        weights = w1, b1, w3, b3, w2
        copies_between(self._in_halves(weights, channels), stored).run()
        return weights

    def view_grads(self, grads: Weights, dtype: torch.dtype) -> Tensor:
        """Gradients of `views` -> (I, row). Missing ones are zeros."""
        rows = self._empty_rows(_some(grads), self.shape.intermediate_size, dtype)
        copies_between(self.views(rows), grads).run()
        return rows

    def _empty_rows(self, like: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
        """Rows of which only the padding is set."""
        rows = like.new_empty((channels, self.row), dtype=dtype)
        if self._used < self.row:
            rows[:, self._used :].zero_()
        return rows

    @functools.cached_property
    def _offsets(self) -> tuple[int, int | None, int | None, int | None, int]:
        """Offsets of gate, gate bias, up, up bias and down in a row."""
        experts, width = self.shape.num_experts, self.shape.num_experts * self.shape.hidden_size
        up, down = (width, 2 * width) if self.gated else (None, width)
        bias = down + width
        return 0, bias if self.bias else None, up, bias + experts if self.bias and self.gated else None, down

    @functools.cached_property
    def _joined(self) -> bool:
        """Whether gate and up are halves of one user weight, so that one copy takes both."""
        return self.glu in ("concat", "interleaved")

    def _stored_as(self, rows: Tensor) -> Weights:
        """Views of packed rows that a role's local slice is copied to: (E, channels, D), or (E, 2, channels, D) of halves."""
        gate, gate_bias, up, up_bias, down = self.views(rows)
        if not self._joined:
            return gate, gate_bias, up, up_bias, down
        channels, row = rows.shape
        experts, width, start = self.shape.num_experts, self.shape.hidden_size, rows.storage_offset()
        both = rows.as_strided((experts, 2, channels, width), (width, experts * width, row, 1), start)
        _, bias, *_ = self._offsets
        biases = None if bias is None else rows.as_strided((experts, 2, channels), (1, experts, row), start + bias)
        return both, biases, None, None, down

    def _in_halves(self, weights: Weights, channels: int) -> Weights:
        """Local slices in the user's layout -> views shaped as `_stored_as`."""
        w1, b1, w3, b3, w2 = weights
        w1, w3 = _oriented(w1, self.layout1 == "nk"), _oriented(w3, self.layout1 == "nk")
        if self._joined:
            w1, b1 = self._halves(w1, channels), self._halves(b1, channels)
        return w1, b1, w3, b3, _oriented(w2, self.layout2 == "kn")

    def _halves(self, joined: Tensor | None, channels: int) -> Tensor | None:
        if joined is None:
            return None
        experts, _, *width = joined.shape
        if self.glu == "concat":
            return joined.view(experts, 2, channels, *width)
        return joined.view(experts, channels, 2, *width).transpose(1, 2)

    def _local_sizes(self, channels: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of a rank's slices, by role."""
        experts, width = self.shape.num_experts, self.shape.hidden_size
        wide = 2 * channels if self._joined else channels
        w1, w3, w2 = (experts, wide, width), (experts, channels, width), (experts, channels, width)
        if self.layout1 == "kn":
            w1, w3 = (experts, width, wide), (experts, width, channels)
        if self.layout2 == "nk":
            w2 = (experts, width, channels)
        return w1, (experts, wide), w3, (experts, channels), w2


def _oriented(tensor: Tensor | None, as_stored: bool) -> Tensor | None:
    return tensor if tensor is None or as_stored else tensor.transpose(1, 2)


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
