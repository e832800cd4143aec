"""The memory that a planned call works in: one allocation, in which tensors that are not in use at the same time share a place.

They are in use from the first launch that has their address to the last one. Launches of a call run one after the other on one
stream, so places may be shared exactly as separate allocations, each freed after its last use, would share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ALIGNED = 256
"""Bytes that parts start at multiples of, as allocations of their own would."""


@dataclass(eq=False)
class Part:
    """One tensor in the workspace.

    Args:
        size: bytes.
        first, last: numbers of the launches that it is in use from and to; -1 if there is none.
        offset: where it lies in the workspace, once laid out.
    """

    size: int
    first: int = -1
    last: int = -1
    offset: int = 0

    def __post_init__(self) -> None:
        self.size = -(-self.size // _ALIGNED) * _ALIGNED

    @property
    def end(self) -> int:
        return self.offset + self.size

    def use(self, launch: int) -> None:
        """Notes that this launch uses it, which comes after those noted before."""
        self.first = launch if self.first < 0 else self.first
        self.last = launch

    def meets(self, other: Part) -> bool:
        """Whether some launch uses both."""
        return self.first <= other.last and other.first <= self.last


def lay_out(parts: Iterable[Part]) -> int:
    """Gives every used part its place, the largest first and each as low as it can lie. Returns the bytes needed."""
    placed: list[Part] = []
    for part in sorted((p for p in parts if p.first >= 0), key=lambda p: -p.size):
        for other in sorted((p for p in placed if p.meets(part)), key=lambda p: p.offset):
            if part.end <= other.offset:
                break
            part.offset = max(part.offset, other.end)
        placed.append(part)
    return max((part.end for part in placed), default=0)
