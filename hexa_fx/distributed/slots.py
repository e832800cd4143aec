"""The slots of the shared cache: what is in one, where it was gathered from, and how a saved tensor refers to it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from operator import attrgetter, is_
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hexa_fx.distributed.collectives import Works, finish
from hexa_fx.distributed.geometry import Copies, Geometry, Weights
from hexa_fx.distributed.reductions import Destination, destinations, origin

_version = attrgetter("_version")


@dataclass(frozen=True)
class CachedLayer:
    """One data-centric layer: its path, the layout of its experts and h_i of every rank."""

    path: str
    geometry: Geometry
    shards: tuple[int, ...]


class SavedSlot(NamedTuple):
    """A saved tensor that lived in a slot: which layer's weights, under which versions, and where in the slot."""

    layer: int
    versions: tuple[int, ...]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class GatherSource:
    """What a layer's gather reads: local slices, and the parameters whose versions say whether they are still the same.

    Args:
        given: what the weights were that `of` was called with (`origin`), unless one is the result of a computation, which
            would keep a graph alive.
        addresses: where those lay that are not None.
        weights: the same, detached.
        targets: where their gradients go.
        parameters: those that the slices lie in, or were copied from. held: where these lay.
        lasting: the slices lie in parameters, so the next pass may read them before its own forward hands them over. What
            was computed from parameters is stale by then.
        managed: another library (FSDP2) gathers the slices for the time that the layer runs, and frees them in between.
    """

    given: Weights | None
    addresses: tuple[int, ...]
    weights: Weights
    dtype: torch.dtype
    targets: tuple[Destination | None, ...]
    parameters: tuple[Tensor, ...]
    held: tuple[int, ...]
    lasting: bool
    managed: bool = False

    @classmethod
    def of(cls, weights: Weights, dtype: torch.dtype, parameters: tuple[Tensor, ...] = ()) -> GatherSource:
        """What these weights are read from: ``parameters`` of this package alone, or none where another library manages them."""
        given, detached = _origins(weights), _detached(weights)
        if not parameters:  # what is done with gradients, when the slices are there, and where, is for the other to say
            read = tuple(w for w in detached if w is not None and not w.is_inference())
            return cls(given, _addresses(weights), detached, dtype, (None,) * 5, read, (), False, managed=True)
        targets = destinations(weights)
        lasting = all(w is None or _lies_in_parameters(w, target) for w, target in zip(weights, targets))
        held = tuple(map(Tensor.data_ptr, parameters))
        return cls(given, _addresses(weights), detached, dtype, targets, parameters, held, lasting)

    def is_of(self, weights: Weights, dtype: torch.dtype) -> bool:
        """Whether `of` would give an equal source: the same tensors at the same addresses, since ``.data = ...`` moves a tensor."""
        if self.given is None or dtype != self.dtype:
            return False
        given = _origins(weights)
        return given is not None and all(map(is_, given, self.given)) and _addresses(weights) == self.addresses

    @functools.cached_property
    def device(self) -> torch.device:
        return next(w for w in self.weights if w is not None).device

    @property
    def versions(self) -> tuple[int, ...]:
        """Identifies the values. Addresses count too, because ``.data = ...`` does not change a tensor's version."""
        return *map(_version, self.parameters), *self.held


class SlotRows(NamedTuple):
    """Where a layer's rows are in its slot, and the copies that bring this rank's own there."""

    source: GatherSource
    matrix: Tensor
    own: Tensor
    packing: Copies

    @classmethod
    def of(cls, source: GatherSource, matrix: Tensor, layer: CachedLayer, rank: int) -> SlotRows:
        own = matrix.narrow(0, sum(layer.shards[:rank]), layer.shards[rank])
        return cls(source, matrix, own, layer.geometry.packing(own, source.weights))


@dataclass
class Slot:
    """Memory that layers use in turn, and what it currently holds.

    Args:
        buffer: the memory, as bytes.
        address, end: where it lies, 0 without a buffer.
        layer: number of the layer whose weights it holds, -1 for none.
        dtype, versions, matrix: of these weights; the matrix is that of their packed rows.
        epoch: pass and optimizer step in which they were gathered.
        prefetched: whether they were gathered ahead and not used yet.
        works: the gather under way.
        busy: whether they are in use, so not to be overwritten.
    """

    buffer: Tensor | None = None
    address: int = 0
    end: int = 0
    layer: int = -1
    dtype: torch.dtype | None = None
    versions: tuple[int, ...] = ()
    matrix: Tensor | None = None
    epoch: tuple[int, int] = (-1, -1)
    prefetched: bool = False
    works: Works = field(default_factory=list)
    busy: bool = False
    _rows: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def rows(self, size: int, row: int, dtype: torch.dtype, device: torch.device, largest: int) -> Tensor:
        """The (size, row) matrix in the buffer. A buffer that is too small is replaced by one of ``largest`` elements."""
        used = size * row * dtype.itemsize
        if self.buffer is None or self.buffer.device != device or self.buffer.numel() < used:
            self.buffer = torch.empty(largest * dtype.itemsize, dtype=torch.uint8, device=device)
            self.address = self.buffer.data_ptr()
            self.end = self.address + self.buffer.numel()
            self._rows.clear()
        key = size, row, dtype
        if key not in self._rows:
            self._rows[key] = self.buffer[:used].view(dtype).view(size, row)
        return self._rows[key]

    def arrive(self) -> None:
        """Waits for the gather under way (on CUDA, in stream order)."""
        finish(self.works)
        self.works = []


def address_of(tensor: Tensor) -> int:
    """Where a tensor begins; 0 where there is nothing, as in an empty one."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory, e.g. DTensor or a fake tensor
        return 0


def _lies_in_parameters(weight: Tensor, target: Destination | None) -> bool:
    parameter = origin(weight)
    if parameter is not None and parameter is not weight:
        return True
    held = (weight,) if target is None else target.parameters
    return all(isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter) for t in held)


def _origins(weights: Weights) -> Weights | None:
    found = [None if w is None else origin(w) for w in weights]
    if list(map(type, found)).count(NoneType) != list(map(type, weights)).count(NoneType):
        return None
    w1, b1, w3, b3, w2 = found
    return w1, b1, w3, b3, w2


def _addresses(weights: Weights) -> tuple[int, ...]:
    return tuple([w.data_ptr() for w in weights if w is not None])


def _detached(weights: Weights) -> Weights:
    w1, b1, w3, b3, w2 = (None if w is None else w.detach() for w in weights)
    return w1, b1, w3, b3, w2
