"""Which sizes of an example's tensors count batch, sequence, pixels or tokens, and the same tensors' shapes at other sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Size = tuple[int | None, int | None]
"""(batch, sequence); None: as in the example."""


@dataclass(frozen=True)
class ExampleSizes:
    """The sizes of an example call.

    Args:
        batch, sequence: batch times sequence is its number of tokens, as far as that can be told.
        flat: whether the first matrix of floats is (T, D).
        channels: of images (batch, ...), the dimension that is as wide as a token; None if that cannot be told.
        grid: of images, the sizes that count pixels, in order; empty as long as the channels are not known.
        image: whether the first tensor of floats has four dimensions or more.
    """

    batch: int
    sequence: int
    flat: bool
    image: bool = False
    channels: int | None = None
    grid: tuple[int, ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Any], widths: Collection[int] = ()) -> ExampleSizes:
        """Those of the tensors among ``leaves``. ``widths``: what a token may be wide."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        floating = [leaf for leaf in tensors if leaf.is_floating_point()] or tensors
        first = next((leaf for leaf in floating if leaf.dim() >= 2), None)
        flat = first is not None and first.is_floating_point() and first.dim() == 2
        if first is not None and first.dim() > 3:
            wide = [dim for dim, size in enumerate(first.shape) if dim and size in widths]
            grid = tuple(size for dim, size in enumerate(first.shape) if dim and dim not in wide)
            if len(wide) != 1:
                return cls(first.shape[0], 1, flat, True)
            return cls(first.shape[0], torch.Size(grid).numel(), flat, True, wide[0], grid)
        for leaf in floating:
            if leaf.dim() == 3:
                return cls(leaf.shape[0], leaf.shape[1], flat)
        return cls(floating[0].shape[0] if floating else 1, 1, flat)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.batch * self.sequence

    def one_each(self, leaf: torch.Tensor) -> bool:
        """Whether the tensor holds one number for each token: its dimensions count tokens, or batch and sequence."""
        return leaf.dim() < 2 or (tuple(leaf.shape) == (self.batch, self.sequence) and self.sequence != 1)

    def resized(self, leaf: torch.Tensor, size: Size) -> tuple[int, ...]:
        """The shape of a tensor at another size. Of images, all pixels lie in the first dimension of the grid then.

        Of a single token, sizes of 1 count tokens where tokens are rows; else those of a mask count batch and sequence.
        """
        old = self.batch, self.sequence
        new = tuple(was if now is None else now for was, now in zip(old, size))
        if self.image:
            return self._resized_image(leaf.shape, new)
        if old == (1, 1) and self.flat and leaf.dim() and leaf.shape[0] == 1:
            return (new[0] * new[1], *leaf.shape[1:])
        if old == (1, 1) and not self.flat and leaf.dtype == torch.bool and leaf.shape == (1, 1):
            return new
        return _resized(leaf.shape, old, new)

    def _resized_image(self, shape: torch.Size, new: tuple[int, ...]) -> tuple[int, ...]:
        if not shape or shape[0] != self.batch:
            return tuple(shape)
        rest = tuple(shape[1:])
        if self.grid and new[1] != self.sequence:
            grid = (new[1], *[1] * (len(self.grid) - 1))
            for place in range(len(rest) - len(self.grid) + 1):
                if rest[place : place + len(grid)] == self.grid:
                    rest = (*rest[:place], *grid, *rest[place + len(grid) :])
                    break
            else:
                if self.channels is not None and len(shape) == len(self.grid) + 2:
                    rest = (*grid[: self.channels - 1], rest[self.channels - 1], *grid[self.channels - 1 :])
                elif rest and rest[0] == self.sequence:
                    rest = (new[1], *rest[1:])
        return new[0], *rest


def _resized(shape: torch.Size, old: tuple[int, int], new: tuple[int, ...]) -> tuple[int, ...]:
    """Leading sizes that are the example's batch, sequence or number of tokens, exchanged."""
    if len(shape) >= 2 and tuple(shape[:2]) == old and old[1] != 1:
        return (*new, *shape[2:])
    exchanged = {old[1]: new[1], old[0]: new[0], old[0] * old[1]: new[0] * new[1]}
    if len(shape) <= 2 and shape and shape[0] in exchanged:
        return (exchanged[shape[0]], *shape[1:])
    if len(shape) == 3 and tuple(shape[:2]) == old:
        return (*new, *shape[2:])
    of_sequences = len(shape) > 2 and shape[0] == old[0] != 1  # a condition (batch, 1, D), say
    return (new[0], *shape[1:]) if of_sequences else tuple(shape)
