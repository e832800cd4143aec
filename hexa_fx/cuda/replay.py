"""Replays a recorded call on other addresses: few allocations, one packing, and one driver call per launch.

The addresses of a call are those of its operands and results, of what torch computed from operands (`torch_calls`), of tile
queues, and of parts of one workspace.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor

from hexa_fx.cuda.arguments import NO_MAP, Pointer, TensorMap, encoded
from hexa_fx.cuda.launch import LaunchPlan
from hexa_fx.cuda.record import Recording
from hexa_fx.cuda.tile_queue import TileQueue, next_queue
from hexa_fx.cuda.torch_calls import CannotReplay, SurroundingCalls
from hexa_fx.cuda.workspace import Part, Workspace
from hexa_fx.jit.kernel import KernelHandle
from hexa_fx.jit.tensormap import TENSOR_MAP_BYTES, address_offset

_deterministic, _fills = _C._get_deterministic_algorithms, _C._get_deterministic_fill_uninitialized_memory

_empty_strided: Callable[..., Tensor] | None = getattr(_C._dynamo.guards, "_empty_strided_cuda", None)
"""What compiled graphs allocate with, on the current device: a third of the host's time of the same through torch's dispatcher."""


class _Step(NamedTuple):
    """One launch: the format that packs its parameters, and the values: numbers of addresses, or constant bytes."""

    kernel: KernelHandle
    grid: tuple[int, int, int]
    format: str
    values: tuple[int | bytes, ...]
    sizes: tuple[int, ...]


class _Buffer(NamedTuple):
    """The parameters of all launches of one call, and for each launch what `KernelHandle.queue` takes."""

    memory: ctypes.Array[ctypes.c_char]
    launches: tuple[tuple[KernelHandle, bytes, ctypes.Array[Any]], ...]


class Replay:
    """A recorded call that can be run again when only addresses differ.

    Kernels take structs with pointers among their fields, and tensor maps with one pointer each. A pointer is to an operand, to
    a result, or into another allocation. The first two are replaced, and all other allocations become parts of one workspace.

    Args:
        recording: the call.
        operands: its tensors, None where one is missing.
        device: where it ran.
        most: bytes that the workspace may have.

    Raises:
        CannotReplay: the call did something that cannot be repeated, or its parameters contain an address that is none of these.
    """

    def __init__(self, recording: Recording, operands: Sequence[Tensor | None], device: int, most: int) -> None:
        self.device = device
        self._calls, recorded = SurroundingCalls.of(recording, operands)
        places = _Places(recording, operands, recorded, device)
        steps = [_step(launch, places) for launch in recording.launches if 0 not in launch[1]]
        self._fresh, self._size = self._calls.fresh, places.workspace.lay_out()
        if self._size > most:
            raise CannotReplay(f"it would hold {self._size >> 20} MiB")
        self._offsets, self._within = [part.offset + more for part, more in places.parts], places.within
        self._queues, self._device = len(places.turning), next(t.device for t in operands if t is not None)
        self._steps = steps
        self._struct = Struct("".join(step.format for step in steps))
        values = [value for step in steps for value in step.values]
        # order of values: 0, operands and results, queues, workspace, places within the former, constants
        shift = {n: places.given + i for i, n in enumerate((*places.turning, *places.inner, *places.shifted))}
        constants = [value for value in values if isinstance(value, bytes)]
        first = places.given + len(shift)
        at = iter(range(first, first + len(constants)))
        self._constants = tuple(constants)
        self._pick = itemgetter(*(next(at) if isinstance(v, bytes) else shift.get(v, v) for v in values))
        self._free: dict[int, list[_Buffer]] = {}

    def __call__(self, operands: Sequence[Tensor | None], addresses: Sequence[int]) -> Any:
        """Runs the call on other operands and returns its result.

        Args:
            operands: on torch's current device.
            addresses: theirs, 0 where one is missing.

        Raises:
            DriverError: the driver refused a launch.
        """
        like = operands[0]
        assert like is not None
        fresh = [self._allocate(like, *one) for one in self._fresh]
        workspace = self._allocate(like, (self._size,), (1,), torch.uint8)
        before = self._calls.before(operands)
        start = workspace.data_ptr()
        stream = _C._cuda_getCurrentRawStream(self.device)
        free = self._free.setdefault(stream, [])
        try:
            buffer = free.pop()  # whoever holds it has it alone: threads need no lock
        except IndexError:
            buffer = self._buffer(stream)
        outer = (0, *addresses, *[t.data_ptr() for t in (*fresh, *before)])
        turning = [next_queue(self._device) for _ in range(self._queues)]
        inner = [start + offset for offset in self._offsets]
        shifted = [outer[n] + offset for n, offset in self._within]
        values = self._pick((*outer, *turning, *inner, *shifted, *self._constants))
        self._struct.pack_into(buffer.memory, 0, *values)
        for kernel, config, parameters in buffer.launches:
            kernel.queue(self.device, config, parameters)
        free.append(buffer)
        return self._calls.after(operands, fresh)

    def _allocate(self, like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if _empty_strided is None or (_deterministic() and _fills()):  # then torch writes to what is empty
            return like.new_empty_strided(shape, strides, dtype=dtype)
        return _empty_strided(shape, strides, dtype)

    def _buffer(self, stream: int) -> _Buffer:
        memory = ctypes.create_string_buffer(self._struct.size)
        launches, at = [], ctypes.addressof(memory)
        for step in self._steps:
            starts = [at + sum(step.sizes[:i]) for i in range(len(step.sizes))]
            parameters = (ctypes.c_void_p * len(starts))(*starts)
            launches.append((step.kernel, step.kernel.config(step.grid, stream), parameters))
            at += sum(step.sizes)
        return _Buffer(memory, tuple(launches))


class _Places:
    """Numbers the addresses of a recording: 0 for none, then operands and results, then everything else as it is met."""

    def __init__(
        self, recording: Recording, operands: Sequence[Tensor | None], recorded: Sequence[Tensor], device: int
    ) -> None:
        self._device = device
        starts = [0 if t is None else t.data_ptr() for t in (*operands, *recorded)]
        self._number = {start: n for n, start in enumerate(starts, 1)} | {0: 0}
        if len(self._number) - 1 != len(starts) - starts.count(0) or 0 in (
            t.data_ptr() for t in operands if t is not None
        ):
            raise CannotReplay("operands share an address, or are empty")
        self.given = 1 + len(starts)
        self.parts: list[tuple[Part, int]] = []
        self.within: list[tuple[int, int]] = []
        self.turning: list[int] = []
        self.inner: list[int] = []
        self.shifted: list[int] = []
        outer = enumerate((*operands, *recorded), 1)
        self._outer = [(_span(t), n) for n, t in outer if t is not None and t.numel()]
        self._asked, self._launches = self.given, 0
        outside = {t.data_ptr() for t in recorded}
        self.workspace = Workspace(t for t in recording.allocated if t.numel() and t.data_ptr() not in outside)

    def next_launch(self) -> None:
        """Notes that the addresses of another launch follow."""
        self._launches += 1

    def number(self, pointer: Pointer | None) -> int:
        """Returns the number of an address. An address that was not met before gets a new one, and so does every queue."""
        if pointer is None:
            return 0
        if isinstance(pointer, TileQueue):  # every launch has another
            self._asked += 1
            self.turning.append(self._asked)
            return self._asked
        address = pointer.data_ptr()
        found = self.workspace.use(address, self._launches)
        if address in self._number:
            return self._number[address]
        self._asked += 1
        self._number[address] = self._asked
        if found is not None:
            self.parts.append(found)
            self.inner.append(self._asked)
            return self._asked
        inside = [(n, address - span.start) for span, n in self._outer if address in span]
        if len(inside) != 1:
            raise CannotReplay("an address is none of its operands' or allocations'")
        self.within += inside
        self.shifted.append(self._asked)
        return self._asked


def _span(t: Tensor) -> range:
    """Returns the addresses between a tensor's first and last byte."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return range(t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size())


def _step(plan: LaunchPlan, places: _Places) -> _Step:
    places.next_launch()
    fields = [_map(one, places) for one in plan.maps]
    sizes = (TENSOR_MAP_BYTES * len(plan.maps),) if plan.maps else ()
    for pointers, numbers in plan.arguments:
        fields.append((f"{len(pointers)}P{len(numbers)}s", [*map(places.number, pointers), numbers]))
    size = sum(8 * len(pointers) + len(numbers) for pointers, numbers in plan.arguments)
    pad = -size % 8  # pointers of the next launch are aligned
    formats, values = zip(*fields, strict=True)
    flat = tuple(value for each in values for value in each)
    return _Step(plan.kernel.handle, plan.grid, f"{''.join(formats)}{pad}x", flat, (*sizes, size + pad))


def _map(one: TensorMap | None, places: _Places) -> tuple[str, list[int | bytes]]:
    """Returns the format of a tensor map and its values: what is before its address, the address's number, what is after it."""
    if one is None:
        return f"{TENSOR_MAP_BYTES}s", [NO_MAP]
    at, whole = address_offset(), encoded((one,))
    if at is None:
        raise CannotReplay("this driver's tensor maps do not hold the address as it is")
    return f"{at}sP{TENSOR_MAP_BYTES - at - 8}s", [whole[:at], places.number(one[0]), whole[at + 8 :]]
