"""What every CUDA operator needs around its launches: device, stream, element types, fallback, and collecting kernels.

Imported only when the first CUDA tensor reaches an operator.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock, get_ident
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.spec import KernelSpec, SpecError
from hexa_fx.errors import KernelError
from hexa_fx.jit import background
from hexa_fx.jit.errors import ToolchainError
from hexa_fx.jit.kernel import get_kernel, kernel_arch
from hexa_fx.ops import library

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_forget: list[Callable[[], None]] = []

DTYPES = {
    torch.bfloat16: DataType.bf16,
    torch.float16: DataType.f16,
    torch.float32: DataType.f32,
    torch.float64: DataType.f64,
}

fallbacks: dict[str, str] = {}
"""Operators that fell back to another implementation in this process, and why. Each was logged once."""


class Unsupported(KernelError):
    """We have no kernel for these operands; the operator's generic implementation takes them."""


def cuda_kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the CUDA kernel of ``hexa::<name>``: runs it on its first tensor's device, or falls back.

    It falls back to the generic implementation when there is no compiler, when a kernel does not build, or when there is no
    kernel for the operands. The reason is logged once per operator.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kernel(*args: Any) -> Any:
            if _card is not None:
                return function(*args)
            if name in fallbacks and fallbacks[name] in _permanent:
                return generic(name)(*args)
            try:
                index = args[0].device.index
                if index == torch._C._cuda_getDevice():
                    return function(*args)
                with torch.cuda.device(index):
                    return function(*args)
            except KernelError as error:
                _record(name, error)
                return generic(name)(*args)

        return kernel

    return decorate


_permanent: set[str] = set()


def _record(name: str, error: KernelError) -> None:
    reason = str(error)
    if not isinstance(error, Unsupported | SpecError):
        _permanent.add(reason)
    if name not in fallbacks:
        log.warning("hexa::%s falls back to torch's own operators: %s", name, reason)
    fallbacks[name] = reason


def falls_back() -> bool:
    """Whether some operator runs torch's implementation for good, because its kernels cannot be built."""
    return bool(_permanent)


def generic(name: str) -> Callable[..., Any]:
    """The implementation of ``hexa::<name>`` that runs on any device."""
    return library.kernel_for(name, "any")


def plan(function: Callable[P, R]) -> Callable[P, R]:
    """Caches a function of a call's static properties, such as which kernel it takes. `forget_plans` empties the cache."""
    cached = functools.lru_cache(maxsize=4096)(function)
    on_forget(cached.cache_clear)
    return cached  # type: ignore[return-value]


def on_forget(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that `forget_plans` is to call too."""
    _forget.append(forget)
    return forget


def forget_plans() -> None:
    """Makes every operator choose its kernels anew, e.g. after the environment changed."""
    for forget in _forget:
        forget()


class Kernel(Protocol):
    """What a plan hands to `launch`: a `KernelHandle`, or a stand-in while kernels are only collected."""

    @property
    def spec(self) -> KernelSpec: ...

    def launch(self, device: int, grid: tuple[int, int, int], args: tuple[bytes, ...], stream: int) -> None: ...


@dataclass(frozen=True)
class _Collected:
    """A kernel that was asked for but not built. Its launches do nothing."""

    spec: KernelSpec

    def launch(self, device: int, grid: tuple[int, int, int], args: tuple[bytes, ...], stream: int) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Card:
    """What choosing kernels needs to know about a GPU, which need not exist."""

    name: str
    arch: int
    multiprocessors: int


_collecting: list[KernelSpec] | None = None
_card: Card | None = None


@contextmanager
def collect(card: Card | None = None) -> Iterator[list[KernelSpec]]:
    """A context in which operators choose kernels without launching any; yields the specs. Their results are uninitialised.

    Args:
        card: choose for this card, and accept operands on the meta device, so that no GPU is needed. An operator without a
            kernel for its operands then raises `KernelError` instead of falling back.
    """
    global _collecting, _card
    forget_plans()
    _collecting, _card = [], card
    try:
        yield _collecting
    finally:
        _collecting, _card = None, None
        forget_plans()


def described() -> Card | None:
    """The card that was given to `collect`, if any."""
    return _card


def collecting() -> bool:
    """Whether kernels are only collected, so that nothing is written to the operands."""
    return _collecting is not None


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


def kernel_of(spec: KernelSpec) -> Kernel:
    """The loaded kernel of `spec`. Call it from a `plan`."""
    if _collecting is None:
        return get_kernel(spec)
    _collecting.append(spec)
    return _Collected(spec)


Launch = tuple[Kernel, tuple[int, int, int], tuple[bytes, ...]]
"""A kernel, its grid and its arguments."""

_noted: tuple[int, list[Launch]] | None = None
_noting = Lock()


@contextmanager
def noting() -> Iterator[list[Launch]]:
    """A context that yields a list of what this thread launches. One thread at a time; others wait."""
    global _noted
    with _noting:
        launches: list[Launch] = []
        _noted = get_ident(), launches
        try:
            yield launches
        finally:
            _noted = None


def launch(kernel: Kernel, device: int, grid: tuple[int, int, int], *args: bytes) -> None:
    """Queues a kernel on the current stream of `device`, which must be the current device."""
    if _card is not None:
        return
    noted = _noted
    if noted is not None and noted[0] == get_ident():
        noted[1].append((kernel, grid, args))
    kernel.launch(device, grid, args, torch._C._cuda_getCurrentRawStream(device))


def arch(device: int) -> int:
    """Compute capability that kernels of `device` are built for: 90 for 9.0."""
    return _arch(device) if _card is None else _card.arch


@cache
def _arch(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@plan
def family_arch(device: int) -> int:
    """Compute capability that kernels are chosen for: HEXA_FX_CUDA_ARCH if set, else the device's."""
    return kernel_arch(device) if _card is None else _card.arch


def device_name(device: int) -> str:
    """The driver's name of `device`."""
    return torch.cuda.get_device_name(device) if _card is None else _card.name


def multiprocessors(device: int) -> int:
    """Number of multiprocessors of `device`."""
    return _multiprocessors(device) if _card is None else _card.multiprocessors


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
