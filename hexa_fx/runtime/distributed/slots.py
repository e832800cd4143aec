"""The slots of the shared cache: what lies in one, where it was gathered from, and what a saved tensor remembers of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hexa_fx.runtime.distributed.geometry import Geometry, Weights
from hexa_fx.runtime.distributed.reductions import destinations


@dataclass(frozen=True)
class CachedLayer:
    """One data-centric layer: its path, the layout of its experts and h_i of every rank."""

    path: str
    geometry: Geometry
    shards: tuple[int, ...]


@dataclass(frozen=True)
class SavedSlot:
    """A saved tensor that lived in a slot: which layer's weights, under which versions, and where in the slot."""

    index: int
    versions: tuple[int, ...]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Source:
    """What a layer's gather reads: local slices, and the parameters whose versions say whether they are still the same.

    ``lasting``: the slices lie in parameters, so the next pass may read them before its own forward hands them over. What
    was computed from parameters is stale by then.
    """

    weights: Weights
    dtype: torch.dtype
    parameters: tuple[Tensor, ...]
    lasting: bool

    @classmethod
    def of(cls, weights: Weights, dtype: torch.dtype) -> Source:
        found = [
            t for w, d in zip(weights, destinations(weights)) if w is not None for t in (d.parameters if d else (w,))
        ]
        # detach() shares the version counter, so the versions of detached sources follow the parameters
        lasting = all(isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter) for t in found)
        return cls(_detached(weights), dtype, tuple(t.detach() for t in found), lasting)

    @property
    def versions(self) -> tuple[int, ...]:
        """Which values these are. ``.data = ...`` leaves a version as it is, so where they lie counts too."""
        return tuple(n for t in self.parameters for n in (t._version, t.data_ptr()))


@dataclass
class Slot:
    """Memory in which layers take turns, and what it holds now.

    Args:
        buffer: bytes. index: of the layer whose weights it holds. dtype, versions: of these weights. epoch: pass and optimizer
            step they were gathered in. prefetched: gathered ahead, not yet used. pending: the gather is under way. busy: in
            use, not to be overwritten.
    """

    buffer: Tensor | None = None
    index: int = -1
    dtype: torch.dtype | None = None
    versions: tuple[int, ...] = ()
    epoch: tuple[int, int] = (-1, -1)
    prefetched: bool = False
    pending: bool = False
    busy: bool = False

    def rows(self, size: int, row: int, dtype: torch.dtype, device: torch.device, nbytes: int) -> Tensor:
        """The (size, row) matrix in the buffer, which is made with ``nbytes`` bytes where there is none that is large enough."""
        used = size * row * dtype.itemsize
        if self.buffer is None or self.buffer.device != device or self.buffer.numel() < used:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.buffer[:used].view(dtype).view(size, row)


def slot_of(tensor: Tensor, slots: Sequence[Slot]) -> Slot | None:
    """The slot in whose memory ``tensor`` lies."""
    if tensor.numel() == 0:
        return None
    try:
        where = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without storage, e.g. DTensor or a fake tensor
        return None
    for slot in slots:
        if slot.buffer is not None and slot.buffer.untyped_storage().data_ptr() == where:
            return slot
    return None


def _detached(weights: Weights) -> Weights:
    w1, b1, w3, b3, w2 = (None if w is None else w.detach() for w in weights)
    return w1, b1, w3, b3, w2
