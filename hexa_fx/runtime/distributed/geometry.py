"""What slice of an expert weight a rank stores, and the packed rows that travel between ranks.

A rank keeps channels ``lo .. hi`` of the intermediate size, of every expert, in the user's own layout: gate and up are
cut alike, whether they are two halves of one weight, its even and odd rows, or two weights.

For a gather each channel becomes one row, so that the shards of all ranks concatenate whatever their sizes:

    row of channel h = [gate (E, D) | up (E, D) | down (E, D) | gate bias (E) | up bias (E) | padding to 8 elements]

and the gathered (I, row) matrix is read in place, as weights (E, I, D) of strides (D, row, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def row(self) -> int:
        """Elements of one packed channel."""
        return -(-self._used // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @property
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
        """Where channels ``lo .. hi`` lie in the whole tensor of a role, and where in the rank's own."""
        dim, length = self.dim(role), hi - lo
        if role in ("w1", "b1") and self.glu == "concat":
            total = self.shape.intermediate_size
            return (Chunk(dim, lo, 0, length), Chunk(dim, total + lo, length, length))
        if role in ("w1", "b1") and self.glu == "interleaved":
            return (Chunk(dim, 2 * lo, 0, 2 * length),)
        return (Chunk(dim, lo, 0, length),)

    def cut(self, role: str, full: Tensor, lo: int, hi: int) -> Tensor:
        """A contiguous copy of a rank's slice."""
        parts = [full.narrow(chunk.dim, chunk.start, chunk.length) for chunk in self.chunks(role, lo, hi)]
        return torch.cat(parts, dim=self.dim(role)).contiguous()

    def pack(self, weights: Weights, channels: int, dtype: torch.dtype) -> Tensor:
        """Local slices (or gradients of them) -> (channels, row). Missing ones are zeros."""
        present = next(w for w in weights if w is not None)
        rows = self._empty_rows(present, channels, dtype)
        for target, source in zip(self._columns(rows), self._to_channels(weights)):
            if target is not None:
                target.zero_() if source is None else target.copy_(source)
        return rows

    def views(self, rows: Tensor) -> Weights:
        """(channels, row) -> weights of a split or ungated expert, layout1 ``nk``, layout2 ``kn``. No copy."""
        gate, up, down, gate_bias, up_bias = (
            None if part is None else part.transpose(0, 1) for part in self._columns(rows)
        )
        return gate, gate_bias, up, up_bias, down

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Weights:
        """(channels, row) -> contiguous local slices in the user's layout."""
        gate, gate_bias, up, up_bias, down = self.views(rows)
        assert gate is not None
        assert down is not None
        if self.glu in ("concat", "interleaved"):
            assert up is not None
            first, second = self._join(gate, up), None
            bias = None if gate_bias is None or up_bias is None else self._join(gate_bias, up_bias)
            bias2 = None
        else:
            first, second, bias, bias2 = gate, up, gate_bias, up_bias
        w1 = first if self.layout1 == "nk" else first.transpose(1, 2)
        w3 = second if second is None or self.layout1 == "nk" else second.transpose(1, 2)
        w2 = down if self.layout2 == "kn" else down.transpose(1, 2)
        return (
            _contiguous(w1, dtype),
            _contiguous(bias, dtype),
            _contiguous(w3, dtype),
            _contiguous(bias2, dtype),
            (_contiguous(w2, dtype)),
        )

    def view_grads(self, grads: Weights, dtype: torch.dtype) -> Tensor:
        """Gradients of `views` -> (I, row). Missing ones are zeros."""
        rows = self._empty_rows(_some(grads), self.shape.intermediate_size, dtype)
        for target, source in zip(self.views(rows), grads):
            if target is not None:
                target.zero_() if source is None else target.copy_(source)
        return rows

    def _empty_rows(self, like: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
        """Rows to be filled; only the padding is set."""
        rows = like.new_empty((channels, self.row), dtype=dtype)
        if self._used < self.row:
            rows[:, self._used :].zero_()
        return rows

    def _join(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.glu == "concat":
            return torch.cat([gate, up], dim=1)
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    def _columns(self, rows: Tensor) -> tuple[Tensor | None, ...]:
        """Views of packed rows: gate, up, down (channels, E, D), gate bias, up bias (channels, E)."""
        s, at = self.shape, 0
        experts, width = s.num_experts, s.num_experts * s.hidden_size
        parts: list[Tensor | None] = []
        for wanted in (True, self.gated, True):
            parts.append(rows[:, at : at + width].unflatten(1, (experts, s.hidden_size)) if wanted else None)
            at += width if wanted else 0
        for wanted in (self.bias, self.bias and self.gated):
            parts.append(rows[:, at : at + experts] if wanted else None)
            at += experts if wanted else 0
        return tuple(parts)

    def _to_channels(self, weights: Weights) -> tuple[Tensor | None, ...]:
        """Local slices in the user's layout -> gate, up, down (channels, E, D), gate bias, up bias (channels, E)."""
        w1, b1, w3, b3, w2 = weights
        gate, up = self._halves(_oriented(w1, self.layout1 == "nk"), _oriented(w3, self.layout1 == "nk"))
        gate_bias, up_bias = self._halves(b1, b3)
        down = _oriented(w2, self.layout2 == "kn")
        return tuple(None if t is None else t.transpose(0, 1) for t in (gate, up, down, gate_bias, up_bias))

    def _halves(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if first is None or self.glu in ("none", "split"):
            return first, second
        if self.glu == "concat":
            gate, up = first.chunk(2, dim=1) if first.shape[1] else (first, first)
            return gate, up
        return first[:, 0::2], first[:, 1::2]


def _contiguous(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


def _oriented(tensor: Tensor | None, as_stored: bool) -> Tensor | None:
    return tensor if tensor is None or as_stored else tensor.transpose(1, 2)


def _some(tensors: Weights) -> Tensor:
    for tensor in tensors:
        if tensor is not None:
            return tensor
    raise PlanError("no gradient of any expert weight arrived; at least one of a layer's weights must require one")


def shape_of(w1: Tensor, w3: Tensor | None, w2: Tensor, glu: Glu, layout1: Layout, top_k: int) -> ExpertShape:
    """Sizes of a layer from its whole weights."""
    rows, hidden = (w1.shape[1], w1.shape[2]) if layout1 == "nk" else (w1.shape[2], w1.shape[1])
    intermediate = rows // 2 if glu in ("concat", "interleaved") else rows
    return ExpertShape(int(w1.shape[0]), int(hidden), int(intermediate), 2 if glu == "none" else 3, top_k)
