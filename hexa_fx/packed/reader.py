"""Readers of weights whose parts are packed, each expert's by itself: what those of all experts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.formats.formed import PackedStack
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.paths import MOVING, WeightReader
from hexa_fx.sources.packed_parameters import packed_parameters
from hexa_fx.torch_private import _len_torch_dispatch_stack

_readers: WeakValueDictionary[int, PackedReader] = WeakValueDictionary()
_numbers = count()


class PackedReader(WeightReader):
    """A weight that is read as a `QuantizedWeight` (E, ., .). Subclasses know how one expert's is packed."""

    def _bind(self, block: nn.Module) -> None:
        super()._bind(block)
        self._packed: QuantizedWeight | None = None
        self._held: tuple[Tensor, ...] = ()
        self._number = next(_numbers)
        _readers[self._number] = self

    def __call__(self, top_k_index: Tensor | None = None) -> QuantizedWeight | PackedStack:
        """The packed weight. It has no gradient, so that ``top_k_index`` does not matter.

        Raises:
            GuardMiss: an expert or parameter was replaced by something that cannot be stacked.
        """
        return self._in_trace() if is_compiling() else self.stacked()

    def stacked(self) -> QuantizedWeight:
        """As a call outside of a compiler."""
        packed = self._packed
        if packed is None or not self._in_place(self.tensors()):
            with MOVING:
                parameters, packed = self.tensors(), self._packed
                if packed is None or not self._in_place(parameters):
                    packed = self._pack(parameters)
                    self._packed, self._held = packed, packed.held
        return packed

    def refresh(self) -> None:
        """Checks the module tree, and stacks what was moved again. Call it before the block has any effect.

        Raises:
            GuardMiss: as a call.
        """
        if is_compiling():
            _lay(self._number)  # before a tracer has seen what it moves
            self._check_in_trace()
            return
        self.check()
        self.stacked()

    def _in_trace(self) -> PackedStack:
        """Reads what the parameters lie in, as long as they do: a compiler compares that in every call. Else copies of them."""
        parameters = self._seen_in_trace()
        if self._still_in_place(parameters):
            codes, *scales = self._held
            return PackedStack(codes, tuple(scales), *self._kind(parameters[0]))
        return self._copied(parameters)

    def _seen_in_trace(self) -> list[Any]:
        """The parameters, checked."""
        raise NotImplementedError

    def _kind(self, first: Any) -> tuple[str, torch.dtype, bool]:
        """Format, dtype and layout that the first parameter says all have."""
        raise NotImplementedError

    def _copied(self, parameters: Sequence[Any]) -> PackedStack:
        """As `_pack`, but that nothing is moved."""
        raise NotImplementedError

    def _check_in_trace(self) -> None:
        """As `refresh`, where a compiler looks again in every call."""

    def _still_in_place(self, parameters: Sequence[Any]) -> bool:
        """As `_in_place`, by plain access that a tracer follows."""
        raise NotImplementedError

    def _in_place(self, parameters: Sequence[Any]) -> bool:
        """Whether the parameters lie where `_pack` has moved them."""
        raise NotImplementedError

    def _pack(self, parameters: Sequence[Any]) -> QuantizedWeight:
        """Moves them into one."""
        raise NotImplementedError


def _lay(number: int) -> bool:
    """Moves the parameters of a reader into one; a tracer calls it while it traces. What hinders it is said where they are read."""
    if _len_torch_dispatch_stack() == 0:  # no tensors without data
        with suppress(GuardMiss):
            _readers[number].stacked()
    return True


_lay._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler does it, which imports dynamo


def packed_weights(block: nn.Module) -> list[QuantizedWeight]:
    """The packed weights that an installed block reads now."""
    stacked = [weight for weight in packed_parameters(block).values() if weight.dim() == 3]
    for reader in vars(block).values():
        if isinstance(reader, PackedReader):
            with suppress(GuardMiss):  # its own code runs
                stacked.append(reader.stacked())
    return stacked
