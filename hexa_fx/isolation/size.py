"""Memory of an analysis: how much it may hold beside the model, and what is too large to be held in float64 as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from hexa_fx.isolation.module_tree import tensors_of
from hexa_fx.isolation.torch_state import autocast_off

Item = TypeVar("Item")

LEAST_BYTES = 1 << 18
"""Float64 bytes from which on a weight of a large block is upcast in pieces, and a gradient kept as products."""

FEW_TOKENS = 32
"""Tokens that such a block is tried on at a time: what its code keeps for them may be as large as its weights."""

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What torch's allocators and CUDA's libraries say."""

_FEW = 8
"""Elements that are looked at first."""


class InPieces(torch.Tensor):
    """A float64 tensor over ``stored`` memory in another dtype, which is only read (`hexa_fx.large_blocks`)."""

    @property
    def source(self) -> torch.Tensor:
        """The stored tensor."""
        raise NotImplementedError

    def lies_with(self, other: InPieces) -> bool:
        """Whether both are the same part of the same memory, or equal where one of them is a copy."""
        raise NotImplementedError


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a weight is read from, for who changes it for a while; any other tensor itself."""
    return tensor.source if isinstance(tensor, InPieces) else tensor


def float64_bytes(block: nn.Module) -> int:
    """Bytes that the block's floating-point parameters and buffers take in float64."""
    return 8 * sum(tensor.numel() for tensor in tensors_of(block) if tensor.is_floating_point())


def whole_bytes(analysis_bytes: int) -> int:
    """Bytes of the largest single tensor that is copied to float64, of ``analysis_bytes`` in all: gradients and
    intermediate values of the same size come with it. What is too small to count as a large weight is copied in any case.
    """
    return max(analysis_bytes // 8, LEAST_BYTES)


def raises_in_pieces(block: nn.Module, analysis_bytes: int) -> bool:
    """Whether the block's large weights are upcast to float64 piece by piece, where they are used."""
    return float64_bytes(block) > whole_bytes(analysis_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left, or that the analysis may hold no more."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def batches(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Runs of items that are no larger than ``most`` together, but for single ones: what is done at a time in bounded memory."""
    batch: list[Item] = []
    room = most
    for item in items:
        room -= size(item)
        if room < 0 and batch:
            yield batch
            batch, room = [], most - size(item)
        batch.append(item)
    if batch:
        yield batch


def is_large(value: torch.Tensor) -> bool:
    """Whether a tensor of such a block counts as a large weight."""
    return value.is_floating_point() and value.dim() >= 2 and 8 * value.numel() >= LEAST_BYTES


@autocast_off()  # which joins no tensors in the other 16-bit type
def of_one_number(values: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the tensors for which `is_of_one_number` holds. All begin with a look that waits for a device once."""
    alike: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
    for value in values:
        if value.is_floating_point() and value.numel():
            length = min(_FEW, value.shape[-1]) if value.dim() else 1
            alike.setdefault((value.device, value.dtype, length), []).append(value)
    found: set[int] = set()
    for (_, _, length), group in alike.items():
        with torch.no_grad():
            rows = torch.stack([(v[(0,) * (v.dim() - 1)] if v.dim() else v[None])[:length] for v in group])
        same = (rows == rows[:, :1]).all(1).tolist()
        found |= {id(value) for value, may_be in zip(group, same) if may_be and is_of_one_number(value)}
    return found


def is_of_one_number(value: torch.Tensor) -> bool:
    """Whether all elements of a floating-point tensor are equal."""
    if not value.is_floating_point() or not value.numel():
        return False
    return bool((value.detach() == value.detach()[(0,) * value.dim()]).all())


_MEMORY = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Bytes that programs may still take; None where nothing says so."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines() if _MEMORY.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
