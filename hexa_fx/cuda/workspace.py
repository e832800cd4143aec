"""The memory that a replayed call works in: one allocation, in which tensors that are not in use at the same time share a place.

The general path allocates every tensor by itself and frees it after its last use, so that later ones may lie where it lay. A replay
allocates once, so its parts are laid out beforehand. They are in use from the first launch that has their address to the last
one. Launches of a call run one after the other on one stream, so places may be shared exactly as allocations share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hexa_fx.cuda.operands import ceil_div

_ALIGNED = 256
"""Bytes that parts start at multiples of, as allocations of their own would."""


@dataclass(eq=False)
class Part:
    """One tensor of a recording.

    Args:
        memory: its addresses in the recording.
        first, last: numbers of the launches that it is in use from and to; -1 if there is none.
        offset: where it lies in the workspace, once laid out.
    """

    memory: range
    first: int = -1
    last: int = -1
    offset: int = 0

    @property
    def size(self) -> int:
        return ceil_div(len(self.memory), _ALIGNED) * _ALIGNED

    @property
    def end(self) -> int:
        return self.offset + self.size

    def meets(self, other: Part) -> bool:
        """Whether some launch uses both."""
        return self.first <= other.last and other.first <= self.last


class Workspace:
    """The parts of one recording.

    Args:
        tensors: what the recorded call allocated for itself; contiguous.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._parts = [Part(range(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())) for t in tensors]

    def use(self, address: int, launch: int) -> tuple[Part, int] | None:
        """The part that an address lies in, and how far from its start; notes that this launch uses it. None if there is none."""
        for part in self._parts:
            if address in part.memory:
                part.first = launch if part.first < 0 else part.first
                part.last = launch
                return part, address - part.memory.start
        return None

    def lay_out(self) -> int:
        """Gives every used part its place, the largest first and each as low as it can lie. Returns the bytes needed."""
        placed: list[Part] = []
        for part in sorted((p for p in self._parts if p.first >= 0), key=lambda p: -p.size):
            for other in sorted((p for p in placed if p.meets(part)), key=lambda p: p.offset):
                if part.end <= other.offset:
                    break
                part.offset = max(part.offset, other.end)
            placed.append(part)
        return max((part.end for part in placed), default=0)
