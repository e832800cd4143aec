"""Readers of weights whose parts are packed, each expert's by itself: what those of all experts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.ops.formed import PackedStack
from hexa_fx.ops.quantized_weight import QuantizedWeight
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.paths import WeightReader
from hexa_fx.sources.packed_parameters import packed_parameters


class PackedReader(WeightReader):
    """A weight that is read as a `QuantizedWeight` (E, ., .). Subclasses know how one expert's is packed."""

    def _bind(self, block: nn.Module) -> None:
        super()._bind(block)
        self._packed: QuantizedWeight | None = None

    def __call__(self, top_k_index: Tensor | None = None) -> QuantizedWeight | PackedStack:
        """The packed weight. It has no gradient, so that ``top_k_index`` does not matter.

        Raises:
            GuardMiss: an expert or parameter was replaced by something that cannot be stacked.
        """
        return self._in_trace() if is_compiling() else self.stacked()

    def stacked(self) -> QuantizedWeight:
        """As a call outside of a compiler."""
        parameters = self._paths.tensors()
        if self._packed is None or not self._in_place(parameters):
            self._packed = self._pack(parameters)
        return self._packed

    def refresh(self) -> None:
        """Checks the module tree, and stacks what was moved again. Call it before the block has any effect.

        Raises:
            GuardMiss: as a call.
        """
        if is_compiling():
            self._check_in_trace()
            return
        self.check()
        self.stacked()

    def _in_trace(self) -> PackedStack:
        """As `_pack`, but that nothing is moved."""
        raise NotImplementedError

    def _check_in_trace(self) -> None:
        """As `refresh`, where a compiler looks again in every call."""

    def _in_place(self, parameters: Sequence[Any]) -> bool:
        """Whether the parameters lie where `_pack` has moved them."""
        raise NotImplementedError

    def _pack(self, parameters: Sequence[Any]) -> QuantizedWeight:
        """Moves them into one."""
        raise NotImplementedError


def packed_weights(block: nn.Module) -> list[QuantizedWeight]:
    """The packed weights that an installed block reads now."""
    stacked = [weight for weight in packed_parameters(block).values() if weight.dim() == 3]
    for reader in vars(block).values():
        if isinstance(reader, PackedReader):
            with suppress(GuardMiss):  # its own code runs
                stacked.append(reader.stacked())
    return stacked
