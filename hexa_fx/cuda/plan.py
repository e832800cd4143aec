"""A call that was planned, to be run on any tensors like those it was planned for: few allocations, little packing, and one driver
call per launch.

The addresses of a call are those of its operands, of what it allocates, of tile queues (two zeros that a persistent kernel of the
Hopper family takes its tiles by, and leaves zero), and of parts of one workspace: one allocation, in which tensors that are not in
use at the same time share a place. They are in use from the first launch that has their address to the last one. Launches of a call
run one after the other on one stream, so places may be shared exactly as separate allocations, each freed after its last use, would
share them. Parameters of launches that follow each other lie one behind the other, and are packed at once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from struct import Struct
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor

from hexa_fx.cuda.choosing import Collection
from hexa_fx.cuda.kernel import Kernel, NotBuilt
from hexa_fx.cuda.planning import (
    CannotPlan,
    Launch,
    Operand,
    Planning,
    Pointer,
    TensorMap,
    TileQueue,
    TorchCall,
    replaced,
)
from hexa_fx.jit.kernel import KernelHandle
from hexa_fx.jit.tensormap import TENSOR_MAP_BYTES, address_offset, tensor_map
from hexa_fx.ops.rows import contiguous_strides
from hexa_fx.torch_private import without_autocast

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


QUEUES = 4096
"""What launches of all streams share in turns."""
CAPTURED = 1 << 15
"""Launches in CUDA graphs that one piece of memory is enough for."""
_BYTES = 8
_rings: dict[int, int] = {}
_turns: dict[int, int] = {}
_captured: dict[int, Iterator[int]] = {}
_kept: list[Tensor] = []
_making = Lock()


def next_queue(device: torch.device) -> int:
    """Address of two zeros, which the kernel leaves zero, so that a ring of them serves all streams.

    A launch under capture gets zeros that nothing else ever uses, because its replays may overlap anything but each other. They are
    zero before the capture; only where none are left does the graph have to write some, in a launch before each of its own.
    """
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        address = next(_captured.get(index, iter(())), None)
        if address is None:
            _rings.pop(index, None)  # the next launch outside of a graph makes more
            address = torch.zeros(2, dtype=torch.int32, device=device).data_ptr()
        return address
    turn = _turns[index] = (_turns.get(index, 0) + 1) % QUEUES
    return (_rings.get(index) or _make_ring(device)) + _BYTES * turn


def _make_ring(device: torch.device) -> int:
    with _making:
        if device.index not in _rings:
            zeros = torch.zeros(2 * (QUEUES + CAPTURED), dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # another stream may use it next
            _kept.append(zeros)
            first = zeros.data_ptr()
            _captured[device.index] = iter(range(first + _BYTES * QUEUES, first + _BYTES * (QUEUES + CAPTURED), _BYTES))
            _rings[device.index] = first
        return _rings[device.index]


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


_deterministic, _fills = _C._get_deterministic_algorithms, _C._get_deterministic_fill_uninitialized_memory

_empty_strided: Callable[..., Tensor] | None = getattr(_C._dynamo.guards, "_empty_strided_cuda", None)
"""What compiled graphs allocate with, on the current device: quicker than the same through torch's dispatcher."""


class CallPlan:
    """What a call does, on whichever tensors.

    Args:
        planning: what its code asked for.
        result: what its code returned, with operands for tensors.
        given: how many tensors it takes.

    Attributes:
        kernels: in the order of their launches.
        workspace: bytes of memory that it works in.
    """

    def __init__(self, planning: Planning, result: Any, given: int) -> None:
        self._given, self._result = given, replaced(result, planning.whole)
        self._steps, planning.steps = _needed(planning.steps, self._result), []  # else operands would hold each other
        calls = [step for step in self._steps if isinstance(step, TorchCall)]
        launches = [step for step in self._steps if isinstance(step, Launch)]
        self.kernels = [launch.kernel for launch in launches]
        tensors: set[int] = set()
        replaced([self._result, [call.args for call in calls]], lambda o: tensors.add(o.place))
        # a call's tensors, in order: those it is given, what it allocates, results of torch's functions
        self._fresh, parts, places = [], {}, [*range(given)]
        for place, (shape, dtype) in planning.allocated.items():
            if place in tensors:
                places.append(place)
                self._fresh.append((shape, contiguous_strides(shape), dtype))
            else:
                parts[place] = Part(dtype.itemsize * math.prod(shape))
        places += [made.place for call in calls for made in call.results]
        self._at = {place: number for number, place in enumerate(places)}
        self._result_of = self._filled(self._result)
        self._parts = parts
        for number, launch in enumerate(launch for launch in launches if 0 not in launch.grid):
            for pointer in launch.pointers:
                if isinstance(pointer, Operand) and pointer.place in parts:
                    parts[pointer.place].use(number)
        self.workspace = lay_out(parts.values())
        self._runs: list[Callable[[CallMemory], None]] | None = None

    def load(self) -> None:
        """Makes it ready to run.

        Raises:
            NotBuilt: a kernel is not there yet; all that are missing were requested.
            SpecError, ToolchainError, BuildError, DriverError: one cannot be had.
            CannotPlan: the driver's tensor maps cannot be given other addresses.
        """
        steps = self._steps  # before the question, since another thread may load it meanwhile
        if self._runs is not None:
            return
        _load(self.kernels)
        runs: list[Callable[[CallMemory], None]] = []
        for launching, some in groupby(steps, lambda step: isinstance(step, Launch)):
            if launching:
                launches = [step for step in some if isinstance(step, Launch) and 0 not in step.grid]
                runs += [Batch(launches, self._at, self._parts)] if launches else []
            else:
                runs.append(self._torch([step for step in some if isinstance(step, TorchCall)]))
        self._runs, self._steps = runs, []

    def __call__(self, tensors: Sequence[Tensor], addresses: Sequence[int], device: torch.device) -> Any:
        """Runs the call and returns its result. `load` comes before.

        Args:
            tensors: like those it was planned for.
            addresses: theirs.
            device: theirs, which is torch's current one.

        Raises:
            DriverError: the driver refused a launch.
        """
        memory = CallMemory(tensors, addresses, device)
        if _empty_strided is None or (_deterministic() and _fills()):  # then torch writes to what is empty
            for shape, _, dtype in self._fresh:
                memory.add(tensors[0].new_empty(shape, dtype=dtype))
            work = tensors[0].new_empty((self.workspace,), dtype=torch.uint8) if self.workspace else None
        else:
            for form in self._fresh:
                memory.add(_empty_strided(*form))
            work = _empty_strided((self.workspace,), (1,), torch.uint8) if self.workspace else None
        if work is not None:
            memory.work = work.data_ptr()
        for run in self._runs or ():
            run(memory)
        return self._result_of(memory.tensors)

    def _torch(self, calls: Sequence[TorchCall]) -> Callable[[CallMemory], None]:
        """Functions of torch that follow each other."""
        prepared = [(call.function, self._filled(call.args), call.kwargs, bool(call.results)) for call in calls]

        def run(memory: CallMemory) -> None:
            with without_autocast():
                for function, args, kwargs, kept in prepared:
                    found = function(*args(memory.tensors), **kwargs)
                    if kept:
                        for t in [found] if isinstance(found, Tensor) else found:
                            memory.add(t)

        return run

    def _filled(self, value: Any) -> Callable[[Sequence[Tensor]], Any]:
        """A function of a call's tensors that gives the value with these in place of operands."""
        at, kind = self._at, type(value)
        if kind is Operand:
            return itemgetter(at[value.place])
        if kind not in (list, tuple) or any(_has_operands(one) for one in value if isinstance(one, list | tuple)):
            return lambda tensors: replaced(value, lambda o: tensors[at[o.place]])
        each = [(at[one.place] if isinstance(one, Operand) else None, one) for one in value]
        return lambda tensors: kind([one if place is None else tensors[place] for place, one in each])

    def collected(self, tensors: Sequence[Tensor], collection: Collection) -> Any:
        """Notes its kernels in place of running it. What it returns is uninitialised; whole numbers are zero."""
        collection.specs.extend(kernel.spec for kernel in self.kernels)
        made: dict[int, Tensor] = {}

        def tensor(o: Operand) -> Tensor:
            if o.place < self._given:
                return tensors[o.place]
            if o.place not in made:
                made[o.place] = tensors[0].new_empty(o.shape, dtype=o.dtype)
                if not o.dtype.is_floating_point:  # torch's operators may index by them
                    made[o.place].zero_()
            return made[o.place]

        return replaced(self._result, tensor)


def _has_operands(value: Any) -> bool:
    found: list[Operand] = []
    replaced(value, found.append)
    return bool(found)


def _needed(steps: Sequence[Launch | TorchCall], result: Any) -> list[Launch | TorchCall]:
    """The steps without functions of torch whose results nobody reads."""
    read: set[int] = set()
    found: list[Launch | TorchCall] = []

    def reads(value: Any) -> None:
        replaced(value, lambda o: read.add(o.place))

    reads(result)
    for step in reversed(steps):
        if isinstance(step, Launch):
            reads(step.pointers)
        elif step.results and not any(made.place in read for made in step.results):
            continue
        else:
            reads(step.args)
        found.append(step)
    return found[::-1]


def _load(kernels: Iterable[Kernel]) -> None:
    missing = ""  # not the error, which would keep all callers and their tensors alive until garbage is collected
    for kernel in kernels:
        try:
            _ = kernel.handle
        except NotBuilt as error:
            missing = missing or str(error)
    if missing:
        raise NotBuilt(missing)
