"""The float64 form of one piece of a weight at a time, on a CPU always in the same memory.

Thousands of pieces are upcast while a block is analysed, each for one product. Memory that is taken and freed for each would be
zeroed by the kernel every time, and small tensors that outlive a piece would settle in what it leaves, so that the process grows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch

from hexa_fx.contexts import set_to

_kept: ContextVar[list[torch.Tensor] | None] = ContextVar("pieces", default=None)


def piece_memory_kept() -> AbstractContextManager[None]:
    """A context in which `upcast_piece` keeps its memory, as much as the largest piece takes."""
    return set_to(_kept, [])


def upcast_piece(piece: torch.Tensor) -> torch.Tensor:
    """A float64 tensor (rows, columns) of the same values, laid out as ``piece`` is. It holds until the next one is made."""
    kept = _kept.get()
    if kept is None or piece.device.type != "cpu" or piece.dtype == torch.float64:
        return piece.to(torch.float64)
    if not kept or kept[0].numel() < piece.numel():
        kept[:] = [torch.empty(piece.numel(), dtype=torch.float64, device="cpu")]
    memory = kept[0][: piece.numel()]
    by_columns = piece.stride(0) < piece.stride(1)
    upcast = memory.view(piece.shape[::-1]).t() if by_columns else memory.view(piece.shape)
    return upcast.copy_(piece)
