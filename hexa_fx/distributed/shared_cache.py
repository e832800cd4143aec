"""The pipeline-shared cache of the paper: one or two slots in which all data-centric layers gather their weights in turn.

A layer's weights are gathered before its experts run, and again in backward, so the memory for gathered weights does not grow with
the number of layers. Three rules keep the results exact:

* Autograd never saves an alias of a slot (`saved_tensors`); what backward asks for is gathered again (`refetch`).
* Gathered values are only used while they are current. A forward gathers anew unless the slot was filled ahead of time in the same
  pass, and any optimizer step starts a new pass.
* All ranks take the same decisions, since each gather is a collective. Decisions depend on the order of layers and on passes, never
  on a rank's own tensors or clock. A rank's own parameter versions are only used to raise errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from hexa_fx.distributed.collectives import Works, fill_slot, finish
from hexa_fx.distributed.copies import Copies
from hexa_fx.distributed.geometry import Geometry, Weights
from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.lockstep import begin_forward, guarded, in_backward_of
from hexa_fx.distributed.reductions import Destination, destinations, is_copy, origin
from hexa_fx.errors import PlanError

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
    held = (weight,) if target is None or is_copy(weight) else target.parameters
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


_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def in_backward() -> bool:
    """Whether autograd is running backward on this thread (also true in the recomputation of checkpointing)."""
    return bool(_current_graph_task_id() != -1)


class SharedCache:
    """The slots, and whose weights are in them. Layers use slot ``index % slots``, so with two slots neighbours never share one.

    With 0 slots nothing is shared: every layer has its own, gathered once per pass and kept for backward, as in Janus.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        slots: int,
        groups: Groups,
        prefetch: bool,
        parameters_of: Callable[[str], tuple[Tensor, ...]],
        kind: Callable[[], int],
    ) -> None:
        self._kind = kind
        self.layers = tuple(layers)
        self.groups = groups
        self.parameters_of = parameters_of
        """What a layer's own slices lie in; nothing where another library gathers these for as long as the layer runs."""
        self.prefetch_enabled = prefetch
        self.follows_schedule = False
        """Whether the graph says when forward's gathers start, some of them later than the slots would allow."""
        self.gathers = 0
        self.hits = 0
        self.slots = [Slot() for _ in range(slots or len(self.layers))]
        self._slot_of = tuple(self.slots[i % len(self.slots)] for i in range(len(self.layers)))
        self._largest = [_largest(self.layers[i :: len(self.slots)]) for i in range(len(self.slots))]
        self._index = {layer.path: i for i, layer in enumerate(self.layers)}
        self._sources: dict[int, GatherSource] = {}
        self._places: dict[int, SlotRows] = {}
        self._pass = 0
        self._last = len(self.layers)

    # --- what the nodes of the graph call -------------------------------------------------------------------------

    def source(self, path: str, weights: Weights, dtype: torch.dtype) -> GatherSource:
        """What the layer's gathers read from now on."""
        index = self._index[path]
        source = self._sources.get(index)
        if source is None or not source.is_of(weights, dtype):
            source = self._sources[index] = GatherSource.of(weights, dtype, self.parameters_of(path))
        return source

    def dtype_of(self, path: str) -> torch.dtype | None:
        """In which a layer was gathered last."""
        source = self._sources.get(self._index[path])
        return None if source is None else source.dtype

    def fetch(self, path: str) -> Tensor:
        """The gathered (I, row) matrix of a layer whose forward begins, valid until another layer uses the slot.

        Raises:
            PlanError: the weights changed after they were gathered.
        """
        index, backward = self._index[path], in_backward()
        if backward:
            in_backward_of(self.groups.main_name)
        else:
            self._enter(index)
        slot, dtype = self._slot_of[index], self._sources[index].dtype
        if self._is_ready(slot, index, dtype, backward):
            self.hits += 1
        else:
            self._fill(index)
        self._check_fresh(slot, index, slot.versions)
        if slot.works:
            slot.arrive()
        slot.busy, slot.prefetched = True, False
        if len(self.slots) > 1:
            self._fill_ahead(index - 1 if backward else index + 1, backward)
        assert slot.matrix is not None
        return slot.matrix

    def release(self, path: str) -> None:
        """Called when the layer's experts have run (in backward: given their gradients). The next layers may fill free slots."""
        index, backward = self._index[path], in_backward()
        self._slot_of[index].busy = False
        for ahead in range(1, len(self.slots) + 1):
            self._fill_ahead(index - ahead if backward else index + ahead, backward)

    def is_due(self, path: str, dtype: torch.dtype) -> bool:
        """Called when a scheduled graph comes to the gather of a layer: whether that is to begin now. Not in recomputation of a
        checkpointed forward, which fetches layers from last to first.
        """
        index = self._index[path]
        if in_backward():
            return False
        if index <= self._last:
            self._new_pass()
        return not self._is_ready(self._slot_of[index], index, dtype, backward=False)

    def prefetch(self, path: str, weights: Weights, dtype: torch.dtype) -> None:
        """Starts the gather of a layer ahead of its `fetch`, as a scheduled graph says.

        Raises:
            PlanError: the weights in the slot are still in use.
        """
        index = self._index[path]
        slot = self._slot_of[index]
        if slot.busy:
            raise PlanError(
                f"the schedule gathers {path!r} while {self.layers[slot.layer].path!r} still uses the slot: "
                "schedule with the number of slots of the plan"
            )
        self.source(path, weights, dtype)
        self._fill(index)
        slot.prefetched = True

    def refetch(self, saved: SavedSlot) -> Tensor:
        """The tensor that backward asks for, gathered again if its slot holds another layer's weights.

        Raises:
            PlanError: the weights changed since forward.
        """
        slot = self._slot_of[saved.layer]
        if saved.layer not in self._sources:
            self._check_fresh(slot, saved.layer, saved.versions)
        if not slot.busy or slot.layer != saved.layer:
            in_backward_of(self.groups.main_name)
        if slot.layer != saved.layer or slot.dtype != saved.dtype:
            self._fill(saved.layer)
        elif slot.works or not slot.busy:
            self.hits += 1
        self._check_fresh(slot, saved.layer, saved.versions)
        if slot.works:
            slot.arrive()
        if not slot.busy:
            slot.busy = True
            if len(self.slots) > 1:
                self._fill_ahead(saved.layer - 1, backward=True)
        assert slot.matrix is not None
        return slot.matrix.as_strided(saved.size, saved.stride, saved.offset)

    def begin(self) -> None:
        """Called on all ranks when the model's forward begins. Fills free slots with its first layers before anything else runs."""
        if in_backward():
            return
        self._new_pass()
        for index in range(len(self.slots)):
            self._fill_ahead(index, backward=False)

    def invalidate(self) -> None:
        """Drops everything gathered. Call it on all ranks after changing weights by other means than an optimizer."""
        self.drain()
        self._sources.clear()
        self._places.clear()
        self._pass += 1
        self._last = len(self.layers)
        for slot in self.slots:
            slot.layer, slot.busy, slot.prefetched = -1, False, False

    def abandon(self) -> None:
        """Drops everything gathered, and gathers under way for which nobody can wait."""
        for slot in self.slots:
            slot.works = []
        self.invalidate()

    def drain(self) -> None:
        """Waits for every gather under way."""
        for slot in self.slots:
            slot.arrive()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.buffer.numel() for slot in self.slots if slot.buffer is not None)

    # --- slots -----------------------------------------------------------------------------------------------------

    def _is_current(self, slot: Slot) -> bool:
        """Whether what is in the slot was gathered in this pass, and since the last optimizer step."""
        return slot.epoch == (self._pass, _optimizer_steps)

    def _enter(self, index: int) -> None:
        """Notes that a layer runs. One at or before the last one begins a new pass over the model."""
        if index <= self._last:
            self._new_pass()
        self._last = index

    def _new_pass(self) -> None:
        begin_forward(self.groups, self._kind)
        self._pass += 1
        self._last = -1
        for slot in self.slots:  # those of frozen weights have no backward to release them
            slot.busy = False

    def _is_ready(self, slot: Slot, index: int, dtype: torch.dtype, backward: bool) -> bool:
        if slot.layer != index or slot.dtype != dtype:
            return False
        return backward or (slot.prefetched and self._is_current(slot))

    def _fill_ahead(self, index: int, backward: bool) -> None:
        source = self._sources.get(index)
        if not self.prefetch_enabled or source is None or not (source.lasting or backward) or source.managed:
            return
        if self.follows_schedule and not backward:
            return
        slot = self._slot_of[index]
        if slot.busy or (slot.layer == index and (backward or self._is_current(slot))):
            return
        self._fill(index)
        slot.prefetched = True

    def _fill(self, index: int) -> None:
        if torch.is_inference_mode_enabled():  # the slots outlive it
            with torch.inference_mode(False):
                self._fill(index)
            return
        layer, slot, source = self.layers[index], self._slot_of[index], self._sources[index]
        slot.arrive()
        place = self._place(index)
        slot.layer = -1  # in case the gather does not start
        place.packing.run()
        slot.works = fill_slot(place.matrix, place.own, layer.shards, self.groups.gather_name)
        slot.layer, slot.matrix, slot.dtype, slot.versions = index, place.matrix, source.dtype, source.versions
        slot.epoch, slot.busy, slot.prefetched = (self._pass, _optimizer_steps), False, False
        self.gathers += 1

    def _place(self, index: int) -> SlotRows:
        layer, slot, source = self.layers[index], self._slot_of[index], self._sources[index]
        geometry, largest = layer.geometry, self._largest[index % len(self.slots)]
        matrix = slot.rows(geometry.shape.intermediate_size, geometry.row, source.dtype, source.device, largest)
        known = self._places.get(index)
        if known is None or known.source is not source or known.matrix is not matrix:
            known = self._places[index] = SlotRows.of(source, matrix, layer, self.groups.rank)
        return known

    def _check_fresh(self, slot: Slot, index: int, versions: tuple[int, ...]) -> None:
        source = self._sources.get(index)
        if source is not None and source.versions == slot.versions == versions:
            return
        raise PlanError(
            f"the expert weights of {self.layers[index].path!r} changed after they were gathered and before use: "
            "step the optimizer after backward, and call PartitionSession.invalidate() after changing weights by hand"
        )


def _largest(layers: Sequence[CachedLayer]) -> int:
    """Elements that the largest of the layers sharing a slot needs."""
    return max((layer.geometry.shape.intermediate_size * layer.geometry.row for layer in layers), default=0)


class _Passed(NamedTuple):
    """A saved tensor that surrounding hooks on saved tensors (activation checkpointing, offloading) took over."""

    value: Any
    unpack: Any


class SavedTensors:
    """Autograd's hooks on saved tensors while the experts of a data-centric layer run.

    Args:
        cache: whose slots must not be saved, and which gathers their contents again.
    """

    def __init__(self, cache: SharedCache) -> None:
        self._cache = cache
        self._guards = tuple(guarded(f"the gather for the backward of {layer.path!r}") for layer in cache.layers)
        self._bound = 0
        self._hooked = 0

    def hook(self) -> None:
        """From here to `unhook`, autograd saves no alias of a slot. Other tensors go to the hooks that were set before."""
        outer = _top_saved_tensors_default_hooks(False)
        _push_saved_tensors_default_hooks(
            self._pack if outer is None else partial(self._pack, outer=outer), self._unpack
        )
        self._hooked += 1

    def unhook(self) -> None:
        """Ends what `hook` began, once the layer's experts have run."""
        if self._hooked:  # there is none in a graph that runs without its gather
            _pop_saved_tensors_default_hooks()
            self._hooked -= 1

    def enter_bound(self) -> None:
        """Called when the forward of a bound module begins."""
        self._bound += 1

    def leave_bound(self) -> None:
        """Called when the forward of a bound module ends, perhaps by an error between a layer's gather and its release."""
        self._bound -= 1
        while self._hooked:
            self.unhook()

    def check_bound(self) -> None:
        """Raises `PlanError` if nothing would remove the hooks on saved tensors again if the layer failed."""
        if not self._bound:
            raise PlanError(
                "a data-centric layer runs outside its bound module, so an error in it would leave autograd's hooks on saved "
                "tensors set: bind the module that holds the graph (PartitionSession.bind)"
            )

    def _pack(self, tensor: Tensor, outer: Any = None) -> Any:
        where = address_of(tensor)
        for slot in self._cache.slots:
            if slot.address <= where < slot.end:
                size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
                return SavedSlot(slot.layer, slot.versions, tensor.dtype, size, stride, offset)
        return tensor if outer is None else _Passed(outer[0](tensor), outer[1])

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, SavedSlot):
            with self._guards[packed.layer]:
                return self._cache.refetch(packed)
        return packed.unpack(packed.value) if isinstance(packed, _Passed) else packed
