"""Launches: a kernel that was chosen, loaded when it is first launched, and what a thread launches while it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.choosing import cached_choice, collect, collection
from hexa_fx.jit import background
from hexa_fx.jit.errors import ToolchainError
from hexa_fx.jit.kernel import KernelHandle, get_kernel


class Kernel:
    """A kernel that was chosen; see `kernel_of`. It is built and loaded when it is first launched."""

    __slots__ = ("_handle", "spec")

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self._handle: KernelHandle | None = None

    @property
    def handle(self) -> KernelHandle:
        """The loaded kernel.

        Raises:
            SpecError, ToolchainError, BuildError, DriverError: it cannot be had.
        """
        if self._handle is None:
            self._handle = get_kernel(self.spec)
        return self._handle


@cached_choice
def kernel_of(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`."""
    return Kernel(spec)


Launch = tuple[Kernel, tuple[int, int, int], tuple[bytes, ...]]
"""A kernel, its grid and its arguments."""

_noted: ContextVar[list[Launch] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[Launch]]:
    """A context that yields a list of what this thread launches."""
    launches: list[Launch] = []
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)


def launch(kernel: Kernel, device: int, grid: tuple[int, int, int], *args: bytes) -> None:
    """Queues a kernel on the current stream of `device`, which must be the current device."""
    found = collection()
    if found is not None:
        found.specs.append(kernel.spec)
        return
    handle, noted = kernel.handle, _noted.get()
    if noted is not None:
        noted.append((kernel, grid, args))
    handle.launch(device, grid, args, torch._C._cuda_getCurrentRawStream(device))


def prebuild(run: Callable[[], object]) -> int:
    """Builds all kernels that `run` needs in parallel, instead of one after the other as they are first launched.

    Call it before a model's first step, with a function that runs forward and backward as a step does. The operators in it
    launch nothing and return uninitialised tensors, so it must not change anything that outlives it.

    Returns:
        How many kernels `run` needs; 0 where there is no compiler, which the operators will report themselves.

    Raises:
        BuildError: a kernel does not build; the error is that of the first one.
    """
    with collect() as specs:
        run()
    try:
        background.prebuild(specs)
    except ToolchainError:
        return 0
    return len(set(specs))
