"""Copies between a rank's slices and packed rows, which have gaps, lie the other way round, or both.

torch copies such tensors element by element, in bf16 2 bytes at a time. What lies one behind the other in both is copied in chunks
of 16 bytes, the most that a thread moves; what has to be turned, in two such steps. On an H200, 201 MB of bf16 take 0.10 ms and not
0.27, and turned 0.38 and not 0.93.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

_CHUNK = torch.complex128
"""A type of 16 bytes. Its numbers are copied bit for bit."""

Pair = tuple[Tensor, Tensor]
"""Where to copy, and from where. Views of other types and shapes, where copies are turned."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies made in one call, because a call from Python takes the host as long as a small copy takes the device.

    Args:
        targets, sources: where to copy, and from where.
        turned: one as (..., R / n, C) chunks of n elements, the other as (..., R / n, C, n). Chunks change places and then the
            elements in them, which are near each other; or the other way round. The source, once its numbers lie one behind the
            other, is seen in the target's type and shape.
        missing: targets without a source, which become zero.
    """

    targets: list[Tensor]
    sources: list[Tensor]
    turned: list[Pair]
    missing: list[Tensor]

    def run(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        for target, source in self.turned:
            target.copy_(source.contiguous().view(target.dtype).view(target.shape))
        for target in self.missing:
            target.zero_()


def copies_between(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> Copies:
    """The copies between tensors of which both are there. A source without a target is left out."""
    found = Copies([], [], [], [])
    for target, source in zip(targets, sources):
        if target is None:
            continue
        if source is None:
            found.missing.append(target)
            continue
        lies = target.dtype, target.stride(), target.storage_offset()
        how = _way(target.shape, lies, (source.dtype, source.stride(), source.storage_offset()))
        if how in ("to rows", "to columns"):
            rows, columns = (target, source) if how == "to rows" else (source, target)
            *first, count, width = rows.shape
            each = _CHUNK.itemsize // rows.element_size()
            elements = rows.view(*first, count // each, each, width).transpose(-1, -2)
            chunks = columns.transpose(-1, -2).view(_CHUNK).transpose(-1, -2)
            found.turned.append((elements, chunks) if how == "to rows" else (chunks, elements))
        else:
            found.targets.append(target.view(_CHUNK) if how == "in chunks" else target)
            found.sources.append(source.view(_CHUNK) if how == "in chunks" else source)
    return found


Lies = tuple[torch.dtype, tuple[int, ...], int]
"""A tensor's type, strides and offset."""
Way = Literal["by element", "in chunks", "to rows", "to columns"]


@lru_cache(maxsize=4096)
def _way(shape: tuple[int, ...], target: Lies, source: Lies) -> Way:
    """How to copy (..., R, C). Cached, because the host asks it for every layer and step."""
    if target[0] != source[0] or 0 in shape:
        return "by element"
    if _in_chunks(shape, *target) and _in_chunks(shape, *source):
        return "in chunks"
    if target[1][-1] == 1 != source[1][-1] and _in_columns(shape, *source):
        return "to rows"
    if source[1][-1] == 1 != target[1][-1] and _in_columns(shape, *target):
        return "to columns"
    return "by element"


def _in_chunks(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...], offset: int) -> bool:
    """Whether the last dimension is whole chunks of memory that lie one behind the other."""
    *steps, last = strides
    each = _CHUNK.itemsize // dtype.itemsize
    return last == 1 and not any(at % each for at in (*steps, shape[-1], offset))


def _in_columns(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...], offset: int) -> bool:
    """The same of the dimension before the last."""
    turned = [(*sizes[:-2], sizes[-1], sizes[-2]) for sizes in (shape, strides)]
    return len(shape) > 2 and _in_chunks(turned[0], dtype, turned[1], offset)
