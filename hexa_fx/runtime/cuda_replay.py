"""Replays a recorded call on other addresses: two allocations, one packing, and one driver call per launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from torch import _C, Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.jit.kernel import KernelHandle
from hexa_fx.runtime.cuda_launch import Launch
from hexa_fx.runtime.cuda_operands import ceil_div
from hexa_fx.runtime.cuda_record import Recording

_deterministic, _fills = _C._get_deterministic_algorithms, _C._get_deterministic_fill_uninitialized_memory
_ALIGNED = 256
"""Bytes that parts of the workspace start at multiples of, as allocations of their own would."""


_empty_strided: Callable[..., Tensor] | None = getattr(_C._dynamo.guards, "_empty_strided_cuda", None)
"""What compiled graphs allocate with, on the current device: a third of the host's time of the same through torch's dispatcher."""


class CannotReplay(Exception):
    """A recording cannot be replayed on other addresses; says why."""


class _Step(NamedTuple):
    """One launch: the numbers of the addresses that its argument struct begins with, and the bytes behind them."""

    kernel: KernelHandle
    grid: tuple[int, int, int]
    addresses: tuple[int, ...]
    tail: bytes


class _Buffer(NamedTuple):
    """The arguments of all launches of one call, and for each launch what `KernelHandle.queue` takes."""

    memory: ctypes.Array[ctypes.c_char]
    launches: tuple[tuple[KernelHandle, bytes, ctypes.Array[Any]], ...]


class Replay:
    """A recorded call that can be run again when only addresses differ.

    Argument structs begin with pointers: to an operand, to the result, or into an allocation. The first two are replaced, and
    all allocations other than the result become parts of one workspace.

    Args:
        recording: the call.
        operands: its tensors, None where one is missing.
        device: where it ran.

    Raises:
        CannotReplay: the call did more than launch, or its arguments contain an address that is none of these.
    """

    def __init__(self, recording: Recording, operands: Sequence[Tensor | None], device: int) -> None:
        if recording.other:
            raise CannotReplay(f"it also runs {', '.join(dict.fromkeys(recording.other))}")
        places, first = _Places(recording, operands), operands[0]
        if first is None or first.dtype != recording.result.dtype:
            raise CannotReplay("its result has another type than its first operand")
        steps = [_step(launch, places) for launch in recording.launches if 0 not in launch[1]]
        result: Tensor = recording.result
        self.device, self.shape = device, tuple(result.shape)
        self._strides, self._dtype = result.stride(), result.dtype
        self._elements = ceil_div(places.size, result.element_size())
        self._offsets = places.offsets
        self._steps = steps
        self._struct = Struct("".join(f"{len(step.addresses)}P{len(step.tail)}s" for step in steps))
        first_tail = 1 + len(places.offsets) + places.given
        self._tails = tuple(step.tail for step in steps)
        self._pick = itemgetter(*(n for i, step in enumerate(steps) for n in (*step.addresses, first_tail + i)))
        self._free: dict[int, list[_Buffer]] = {}

    def __call__(self, x: Tensor, addresses: Sequence[int]) -> Tensor:
        """The result of the call on other operands.

        Args:
            x: the first operand, on torch's current device.
            addresses: of the operands, 0 where one is missing.

        Raises:
            DriverError: the driver refused a launch.
        """
        if _empty_strided is None or (_deterministic() and _fills()):  # torch would then fill empty tensors
            out, workspace = x.new_empty(self.shape), x.new_empty(self._elements)
        else:
            out = _empty_strided(self.shape, self._strides, self._dtype)
            workspace = _empty_strided((self._elements,), (1,), self._dtype)
        start = workspace.data_ptr()
        stream = _C._cuda_getCurrentRawStream(self.device)
        free = self._free.setdefault(stream, [])
        try:
            buffer = free.pop()  # a buffer has one user at a time, so threads need no lock
        except IndexError:
            buffer = self._buffer(stream)
        inner = [start + offset for offset in self._offsets]
        values = self._pick((0, *addresses, out.data_ptr(), *inner, *self._tails))
        self._struct.pack_into(buffer.memory, 0, *values)
        for kernel, config, parameters in buffer.launches:
            kernel.queue(self.device, config, parameters)
        free.append(buffer)
        return out

    def _buffer(self, stream: int) -> _Buffer:
        memory = ctypes.create_string_buffer(self._struct.size)
        launches, at = [], ctypes.addressof(memory)
        for step in self._steps:
            launches.append((step.kernel, step.kernel.config(step.grid, stream), (ctypes.c_void_p * 1)(at)))
            at += 8 * len(step.addresses) + len(step.tail)
        return _Buffer(memory, tuple(launches))


class _Places:
    """Numbers the addresses of a recording: 0 for none, then the operands, the result, and places in the workspace."""

    def __init__(self, recording: Recording, operands: Sequence[Tensor | None]) -> None:
        result = recording.result
        whole = [t for t in recording.allocated if t.data_ptr() == result.data_ptr() and t.shape == result.shape]
        if not whole or not result.is_contiguous() or not result.numel():
            raise CannotReplay("its result is none of its allocations")
        starts = [0 if t is None else t.data_ptr() for t in (*operands, result)]
        self._number = {start: n for n, start in enumerate(starts, 1)} | {0: 0}
        if len(self._number) - 1 != len(starts) - starts.count(0) or 0 in (
            t.data_ptr() for t in operands if t is not None
        ):
            raise CannotReplay("operands share an address, or are empty")
        self.given, self.size = len(starts), 0
        self.offsets: list[int] = []
        self._parts: list[tuple[range, int]] = []
        for part in (t for t in recording.allocated if t.numel() and t.data_ptr() != result.data_ptr()):
            size = part.numel() * part.element_size()
            self._parts.append((range(part.data_ptr(), part.data_ptr() + size), self.size))
            self.size += ceil_div(size, _ALIGNED) * _ALIGNED

    def number(self, address: int) -> int:
        """The number of an address. An address in the workspace gets a new one when it is first asked for."""
        if address not in self._number:
            found = [start + address - part.start for part, start in self._parts if address in part]
            if not found:
                raise CannotReplay("an address is none of its operands' or allocations'")
            self.offsets.append(found[0])
            self._number[address] = self.given + len(self.offsets)
        return self._number[address]


def _step(launch: Launch, places: _Places) -> _Step:
    kernel, grid, args = launch
    if not isinstance(kernel, KernelHandle):
        raise CannotReplay("its kernels are stand-ins")
    layout = get_family(kernel.spec.family).args
    fields = layout.format.removesuffix("0P")
    pointers = len(fields) - len(fields.lstrip("P"))
    if len(args) != 1 or "P" in fields[pointers:] or layout.size % 8:
        raise CannotReplay(
            f"{kernel.spec.op} of {kernel.spec.family} takes other things than pointers before constants"
        )
    values = Struct(f"{pointers}P").unpack_from(args[0])
    return _Step(kernel, grid, tuple(map(places.number, values)), args[0][8 * pointers :])
