"""What autograd saves of gathered weights: never an alias of a slot, which other layers' weights overwrite before backward.

From a layer's gather to its release, saved tensors that live in a slot of the shared cache are replaced by a note of where to find
them (`SavedSlot`), and gathered again when backward asks for them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)

from hexa_fx.distributed.collective_errors import guarded
from hexa_fx.distributed.shared_cache import SharedCache
from hexa_fx.distributed.slots import SavedSlot, address_of
from hexa_fx.errors import PlanError


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
