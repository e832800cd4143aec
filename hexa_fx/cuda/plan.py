"""A call that was planned, to be run on any tensors like those it was planned for: few allocations, little packing, and one driver
call per launch.

The addresses of a call are those of its operands, of what it allocates, of tile queues, and of parts of one workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import _C, Tensor

from hexa_fx.cuda.batch import Batch, CallMemory, pointers_of
from hexa_fx.cuda.choosing import Collection
from hexa_fx.cuda.kernel import Kernel, NotBuilt
from hexa_fx.cuda.planning import (
    Launch,
    Operand,
    Planning,
    TorchCall,
    replaced,
)
from hexa_fx.cuda.workspace import Part, lay_out
from hexa_fx.ops import library
from hexa_fx.ops.rows import contiguous_strides

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
        self._parts = parts
        for number, launch in enumerate(launch for launch in launches if 0 not in launch.grid):
            for pointer in pointers_of(launch):
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
                runs += [self._torch(step) for step in some if isinstance(step, TorchCall)]
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
        return self._of(memory.tensors)

    def _of(self, tensors: Sequence[Tensor]) -> Any:
        found, at = self._result, self._at
        if isinstance(found, Operand):
            return tensors[at[found.place]]
        return replaced(found, lambda o: tensors[at[o.place]])

    def _torch(self, call: TorchCall) -> Callable[[CallMemory], None]:
        at = self._at

        def run(memory: CallMemory) -> None:
            args = replaced(call.args, lambda o: memory.tensors[at[o.place]])
            with library.without_autocast():
                found = call.function(*args, **call.kwargs)
            if call.results:
                for t in [found] if isinstance(found, Tensor) else found:
                    memory.add(t)

        return run

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


def _needed(steps: Sequence[Launch | TorchCall], result: Any) -> list[Launch | TorchCall]:
    """The steps without functions of torch whose results nobody reads."""
    read: set[int] = set()
    found: list[Launch | TorchCall] = []

    def reads(value: Any) -> None:
        replaced(value, lambda o: read.add(o.place))

    reads(result)
    for step in reversed(steps):
        if isinstance(step, Launch):
            reads(pointers_of(step))
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
