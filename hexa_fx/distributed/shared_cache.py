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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch.optim.optimizer import register_optimizer_step_post_hook

from hexa_fx.distributed.collectives import fill_slot
from hexa_fx.distributed.geometry import Weights
from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.lockstep import Place, in_backward_of, meet
from hexa_fx.distributed.slots import CachedLayer, GatherSource, SavedSlot, Slot, SlotRows
from hexa_fx.errors import PlanError

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
    ) -> None:
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

    def prefetch(self, path: str, weights: Weights, dtype: torch.dtype) -> None:
        """Starts the gather of a layer ahead of its `fetch`, as a scheduled graph says.

        Raises:
            PlanError: the weights in the slot are still in use.
        """
        index = self._index[path]
        slot = self._slot_of[index]
        if in_backward():  # recomputation of a checkpointed forward, which fetches layers from last to first
            return
        if index <= self._last:
            self._new_pass()
        if self._is_ready(slot, index, dtype, backward=False):
            return
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
        meet(self.groups, Place.FORWARD)
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
