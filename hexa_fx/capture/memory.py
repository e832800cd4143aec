"""Which memory tensors lie in: by its address while a block runs, and by numbers that stay true afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def memory_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor. Empty tensors have none, so a negative id tells them apart."""
    pointer = tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
    return pointer or -id(tensor)


class MemoryNumbers:
    """Tells the memory of a run's values apart, also once the run is over and their addresses are given to other tensors.

    Weights that are laid side by side after a run in one mode, and before one in the other, may come to lie where a recorded value
    lay. By its address that value would then be a part of them.

    Args:
        lasting: parameters and buffers. Their memory goes by its address.
    """

    def __init__(self, lasting: Iterable[torch.Tensor]) -> None:
        self.lasting = frozenset(map(memory_of, lasting))
        self._numbers: dict[int, int] = {}

    def of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory. What was numbered before has to be held meanwhile."""
        memory = memory_of(tensor)
        return memory if memory in self.lasting else self._numbers.setdefault(memory, -1 - len(self._numbers))


def number_of_new(value: torch.Tensor) -> int:
    """The number of memory that came to a recorded run later, for as long as ``value`` is held."""
    return -id(value)
