"""Launches that follow each other: their parameters lie one behind the other and are packed at once, with a call's addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor

from hexa_fx.cuda.kernel import Kernel
from hexa_fx.cuda.planning import CannotPlan, Launch, Operand, Pointer, TensorMap, TileQueue
from hexa_fx.cuda.tile_queue import next_queue
from hexa_fx.cuda.workspace import Part
from hexa_fx.jit.kernel import KernelHandle
from hexa_fx.jit.tensormap import TENSOR_MAP_BYTES, address_offset, tensor_map

_struct = lru_cache(maxsize=1024)(Struct)
_ADDRESSES = [ctypes.c_void_p * count for count in range(3)]
_SOME_ADDRESS = 1 << 20
"""For tensor maps whose address will be exchanged."""


class CallMemory:
    """One call's tensors, their addresses behind a zero for what is not there, and where its workspace begins."""

    __slots__ = ("addresses", "device", "tensors", "work")

    def __init__(self, tensors: Sequence[Tensor], addresses: Sequence[int], device: torch.device) -> None:
        self.tensors, self.addresses, self.device, self.work = [*tensors], [0, *addresses], device, 0

    def add(self, t: Tensor) -> None:
        self.tensors.append(t)
        self.addresses.append(t.data_ptr())


class _Buffer(NamedTuple):
    """The parameters of launches, and for each launch what `KernelHandle.queue` takes."""

    memory: ctypes.Array[ctypes.c_char]
    launches: tuple[tuple[KernelHandle, bytes, ctypes.Array[Any]], ...]


class Batch:
    """Launches that follow each other.

    Args:
        launches: in order, none without blocks.
        at: numbers of a call's tensors, by place.
        parts: of its workspace, by place.
    """

    def __init__(self, launches: Sequence[Launch], at: dict[int, int], parts: dict[int, Part]) -> None:
        self._at, self._parts, self._queues = at, parts, 0
        self._work, self._shifted, self._constants = list[int](), list[tuple[int, int]](), list[bytes]()
        self._launches: list[tuple[Kernel, tuple[int, int, int], int, int]] = []
        forms, numbers = "", list[tuple[int, int]]()
        for launch in launches:
            form, values = _fields(launch)
            maps, size = TENSOR_MAP_BYTES * len(launch.maps), _struct(form).size
            pad = -size % 8  # pointers of the next launch are aligned
            forms += f"{form}{pad}x"
            self._launches.append((launch.kernel, launch.grid, maps, size + pad))
            numbers += map(self._number, values)
        self._struct, self._known = _struct(forms), 1 + len(at)
        first = (0, *accumulate((self._known, self._queues, len(self._work), len(self._shifted))))
        self._pick = itemgetter(*[first[kind] + number for kind, number in numbers])
        self._free: dict[int, list[_Buffer]] = {}

    def _number(self, value: Pointer | bytes) -> tuple[int, int]:
        """Kind of a value (address, queue, place in the workspace, place in a tensor, constant), and its number in the kind."""
        if value is None:
            return 0, 0
        if isinstance(value, bytes):
            self._constants.append(value)
            return 4, len(self._constants) - 1
        if isinstance(value, TileQueue):
            self._queues += 1
            return 1, self._queues - 1
        assert isinstance(value, Operand)
        if not value.numel():  # as torch gives an address
            return 0, 0
        part, more = self._parts.get(value.place), value.offset * value.element_size()
        if part is not None:
            self._work.append(part.offset + more)
            return 2, len(self._work) - 1
        number = 1 + self._at[value.place]
        if not more:
            return 0, number
        self._shifted.append((number, more))
        return 3, len(self._shifted) - 1

    def __call__(self, memory: CallMemory) -> None:
        stream = _C._cuda_getCurrentRawStream(memory.device.index)
        free = self._free.get(stream)
        if free is None:
            free = self._free.setdefault(stream, [])
        try:
            buffer = free.pop()  # whoever holds it has it alone: threads need no lock
        except IndexError:
            buffer = self._buffer(stream)
        known, work = memory.addresses, memory.work
        values = (
            *known,
            *[0] * (self._known - len(known)),
            *[next_queue(memory.device) for _ in range(self._queues)],
            *[work + offset for offset in self._work],
            *[known[number] + more for number, more in self._shifted],
            *self._constants,
        )
        self._struct.pack_into(buffer.memory, 0, *self._pick(values))
        device = memory.device.index
        for kernel, config, parameters in buffer.launches:
            kernel.queue(device, config, parameters)
        free.append(buffer)

    def _buffer(self, stream: int) -> _Buffer:
        memory = ctypes.create_string_buffer(self._struct.size)
        launches, at = [], ctypes.addressof(memory)
        for kernel, grid, maps, size in self._launches:
            starts = (at, at + maps) if maps else (at,)
            launches.append((kernel.handle, kernel.handle.config(grid, stream), _ADDRESSES[len(starts)](*starts)))
            at += size
        return _Buffer(memory, tuple(launches))


def pointers_of(launch: Launch) -> list[Pointer]:
    """What a launch has the addresses of."""
    of_maps = [one.tensor for one in launch.maps if one is not None]
    return [*of_maps, *(pointer for pointers, _ in launch.pieces for pointer in pointers)]


def _fields(launch: Launch) -> tuple[str, list[Pointer | bytes]]:
    """The format of a launch's parameters, and their values."""
    forms, values = zip(*map(_map_fields, launch.maps), strict=True) if launch.maps else ((), ())
    form, flat = "".join(forms), [value for each in values for value in each]
    for pointers, numbers in launch.pieces:
        form += f"{len(pointers)}P{len(numbers)}s"
        flat += [*pointers, numbers]
    return form, flat


def _map_fields(one: TensorMap | None) -> tuple[str, list[Pointer | bytes]]:
    """Of a tensor map: what is before its address, the address, and what is after it."""
    if one is None:
        return f"{TENSOR_MAP_BYTES}s", [bytes(TENSOR_MAP_BYTES)]
    at = address_offset()
    if at is None:
        raise CannotPlan("this driver's tensor maps do not hold the address as it is")
    whole = tensor_map(_SOME_ADDRESS, *one.args)
    return f"{at}sP{TENSOR_MAP_BYTES - at - 8}s", [whole[:at], one.tensor, whole[at + 8 :]]
