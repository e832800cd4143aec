"""Per-expert tensors that lie side by side in one storage, so that they read as one stacked tensor."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from hexa_fx.isolation.size import available_bytes, bytes_that_stay
from hexa_fx.jit.errors import DriverError
from hexa_fx.jit.mapped_memory import MappedMemory

PIECE_BYTES = 512 << 20
"""How much of a large weight is on a GPU twice while it moves, unless one expert is larger."""

log = logging.getLogger(__name__)

_made: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Stacked tensors that parameters lie in, by where their storage starts: memory that is nobody else's."""


class NoRoom(Exception):
    """A device lacks memory for moving parameters.

    Args:
        needed: bytes that have to be there twice for a while.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True)
class SharedStorage:
    """The place of every tensor in a stacked tensor of shape (E, sum of part sizes, ...).

    Args:
        shape: shape of the stacked tensor.
        sizes: each part's size along dimension 1 of the stacked tensor.
        offsets: for each part, where it starts along dimension 1.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Sequence[torch.Tensor]]) -> SharedStorage:
        sizes = tuple(part[0].shape[0] for part in parts)
        offsets = (0, *accumulate(sizes))[:-1]
        return cls((len(parts[0]), sum(sizes), *parts[0][0].shape[1:]), sizes, offsets)

    def views(self, stacked: torch.Tensor) -> list[torch.Tensor]:
        """Contiguous views of ``stacked``, one per tensor: part by part, and expert by expert within a part."""
        return [
            row for offset, size in zip(self.offsets, self.sizes) for row in stacked.narrow(1, offset, size).unbind(0)
        ]

    def byte_offsets(self, itemsize: int) -> list[int]:
        """Where each of `views` starts, in bytes from the start of the stacked tensor."""
        inner = 1
        for extent in self.shape[2:]:
            inner *= extent
        row = self.shape[1] * inner
        return [
            (expert * row + offset * inner) * itemsize for offset in self.offsets for expert in range(self.shape[0])
        ]


def same_kind(parts: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all tensors share dtype and device, and the experts within a part their shape."""
    first = parts[0][0]
    return first.dim() > 0 and all(
        tensor.dtype == first.dtype
        and tensor.device == first.device
        and tensor.shape == part[0].shape
        and tensor.shape[1:] == first.shape[1:]
        for part in parts
        for tensor in part
    )


def adopt(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
    """The stacked tensor over parameters that lie side by side already, as after unpickling; else None.

    Parameters of one part may also lie in rows with others in a stacked tensor that was made here, as where a block reads gate and
    up as one in eval mode and as two in train mode.
    """
    flat = [tensor.data for part in parts for tensor in part]  # so that the stack counts its own versions
    first, shared = flat[0], SharedStorage.of(parts)
    size = first.element_size()
    stride = [1] * len(shared.shape)
    for dim in range(len(shared.shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * shared.shape[dim + 1]
    places = shared.byte_offsets(size)
    if len(flat) > 1 and len(parts) == 1 and is_made_here(first):
        step = flat[1].data_ptr() - first.data_ptr()
        if step > stride[0] * size:
            stride[0], places = step // size, [step * place for place in range(len(flat))]
    if not _lie_at(flat, places):
        return None
    stacked = first.as_strided(shared.shape, stride, first.storage_offset())
    _made.setdefault(stacked.untyped_storage().data_ptr(), stacked)
    return stacked


def _lie_at(flat: Sequence[torch.Tensor], places: Sequence[int]) -> bool:
    """Whether tensors lie in one storage, at so many bytes from where the first one does."""
    base, storage = flat[0].data_ptr(), flat[0].untyped_storage().data_ptr()
    return all(
        tensor.data_ptr() == base + place and tensor.is_contiguous() and tensor.untyped_storage().data_ptr() == storage
        for tensor, place in zip(flat, places)
    )


def is_made_here(tensor: torch.Tensor) -> bool:
    """Whether a parameter lies in a stacked tensor that was made for parameters like it."""
    return tensor.untyped_storage().data_ptr() in _made


def nbytes(parts: Sequence[Sequence[torch.Tensor]]) -> int:
    """Bytes of the stacked tensor."""
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part)


def lacking_bytes(parts: Sequence[Sequence[torch.Tensor]]) -> int:
    """Bytes that have to be there twice for a while and for which there is no room; 0 if there is room.

    The host's memory is taken page by page as it is written, and what has been moved is given back at once, but for views of a
    larger tensor and files that are mapped.
    """
    needed, free = nbytes(parts), free_bytes(parts[0][0].device)
    if free is not None and needed > free and parts[0][0].device.type == "cpu":
        needed = bytes_that_stay(tensor for part in parts for tensor in part)
    return needed if free is not None and needed > free else 0


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a new tensor may take; None where nothing says so."""
    if device.type != "cuda":
        return available_bytes() if device.type == "cpu" else None
    torch.cuda.empty_cache()  # experts that were moved before lie in blocks of their own
    return torch.cuda.mem_get_info(device)[0]


def move(parts: Sequence[Sequence[nn.Parameter]]) -> torch.Tensor:
    """Moves the parameters' data into one new stacked tensor, bit for bit, and returns it.

    The parameters stay the same objects; only their ``.data`` becomes a view. Large weights on a GPU are moved a few experts at
    a time, and what these leave is given back in between, so that there is never a second copy of them.

    Raises:
        NoRoom: the device has no memory for what has to be there twice for a while. The parameters keep their values.
    """
    first, memory = parts[0][0], None
    if first.is_cuda and nbytes(parts) > PIECE_BYTES:
        try:
            memory = MappedMemory(nbytes(parts), first.device.index)
        except DriverError as error:
            log.info("expert weights move all at once: %s", error)
    if memory is not None:
        stacked = _moved_in_pieces(parts, memory)
    elif needed := lacking_bytes(parts):
        raise NoRoom(needed)
    else:
        stacked = torch.empty(SharedStorage.of(parts).shape, dtype=first.dtype, device=first.device)
        _place(parts, stacked)
    _made[stacked.untyped_storage().data_ptr()] = stacked
    return stacked


def _moved_in_pieces(parts: Sequence[Sequence[nn.Parameter]], memory: MappedMemory) -> torch.Tensor:
    shared, dtype = SharedStorage.of(parts), parts[0][0].dtype
    experts, per_expert = len(parts[0]), nbytes(parts) // len(parts[0])
    step = max(1, PIECE_BYTES // per_expert)
    for start in range(0, experts, step):
        end = min(start + step, experts)
        torch.cuda.empty_cache()  # what the experts before have left
        try:
            memory.extend(end * per_expert)
        except DriverError:
            raise NoRoom((end - start) * per_expert) from None
        _place([part[start:end] for part in parts], memory.tensor((end, *shared.shape[1:]), dtype)[start:])
    stacked = memory.tensor(shared.shape, dtype)
    for parameter, view in _with_views(parts, stacked):
        parameter.data = view
    return stacked


def _place(parts: Sequence[Sequence[nn.Parameter]], stacked: torch.Tensor) -> None:
    """Copies the parameters into a stacked tensor, and frees their own memory one by one."""
    for parameter, view in _with_views(parts, stacked):
        view.copy_(parameter.detach())
        parameter.data = view


def _with_views(
    parts: Sequence[Sequence[nn.Parameter]], stacked: torch.Tensor
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Every parameter, with its place in the stacked tensor."""
    return zip((parameter for part in parts for parameter in part), SharedStorage.of(parts).views(stacked))


def stack(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The stacked tensor as a differentiable copy, for where storage must not be moved."""
    if len(parts) == 1:
        return torch.stack(list(parts[0]))
    rows = torch.cat([tensor for expert in zip(*parts) for tensor in expert])
    return rows.view(len(parts[0]), -1, *rows.shape[1:])
