"""What choosing a kernel depends on besides the call: the card, and whether this thread only collects kernels.

Choices are functions of a call's static properties and of the card, so they are cached for all threads. Whether a thread collects
kernels in place of launching them is its own affair: it is kept in a context variable, which no other thread sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import torch

from hexa_fx.contexts import set_to
from hexa_fx.errors import KernelError
from hexa_fx.jit.kernel import device_arch, kernel_arch
from hexa_fx.ops import fp8_weights

if TYPE_CHECKING:
    from hexa_fx.codegen.spec import KernelSpec

P = ParamSpec("P")
R = TypeVar("R")

_forget: list[Callable[[], None]] = []


def cached_choice(function: Callable[P, R]) -> Callable[P, R]:
    """Caches a function of a call's static properties and of the card. `forget_choices` empties the cache."""
    cached = functools.lru_cache(maxsize=4096)(function)
    on_forget(cached.cache_clear)
    return cached  # type: ignore[return-value]


def on_forget(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that `forget_choices` is to call too."""
    _forget.append(forget)
    return forget


def forget_choices() -> None:
    """Makes every operator choose its kernels anew, e.g. after the environment changed."""
    for forget in _forget:
        forget()


class Card(NamedTuple):
    """What choosing kernels needs to know about a GPU, which need not exist.

    Args:
        name: as the driver gives it; tables of measured tiles are kept by it.
        arch: compute capability that kernels are built for: 90 for 9.0.
        multiprocessors: how many it has.
        family_arch: compute capability that kernels are chosen for. It is `arch` unless HEXA_FX_CUDA_ARCH asks for another.
    """

    name: str
    arch: int
    multiprocessors: int
    family_arch: int

    @property
    def is_hopper(self) -> bool:
        """Whether it runs kernels of sm_90a, and these are chosen for it."""
        return self.arch == self.family_arch == 90


_TYPICAL = {
    80: Card("NVIDIA A100", 80, 108, 80),
    86: Card("NVIDIA A40", 86, 84, 86),
    89: Card("NVIDIA L40S", 89, 142, 89),
    90: Card("NVIDIA H200", 90, 132, 90),
}


def typical_card(arch: int) -> Card:
    """A card of a compute capability, 80, 86, 89 or 90.

    Raises:
        KernelError: there are no kernels for it.
    """
    if arch not in _TYPICAL:
        known = ", ".join(map(str, _TYPICAL))
        raise KernelError(f"there are no kernels for compute capability {arch}; give one of {known}, e.g. --arch 90")
    return _TYPICAL[arch]


@cached_choice
def device_card(device: int) -> Card:
    """The card that is CUDA device number `device`."""
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, device_arch(device), properties.multi_processor_count, kernel_arch(device))


@dataclass(frozen=True)
class Collection:
    """Kernels that a thread asked for while it collected them.

    Args:
        card: what they are chosen for; None for the operands' own device.
        specs: the kernels, in the order of their launches.
    """

    card: Card | None
    specs: list[KernelSpec] = field(default_factory=list)


_collection: ContextVar[Collection | None] = ContextVar("collection", default=None)
collection = _collection.get
"""The `Collection` that this thread's launches go to, or None: they are launched."""


@contextmanager
def collect(card: Card | None = None) -> Iterator[list[KernelSpec]]:
    """A context in which this thread's operators choose kernels without launching any; yields the specs.

    Their results are uninitialised; whole numbers are zero. Other threads launch as ever, so autograd runs backward in this
    thread meanwhile.

    Args:
        card: choose for this card, and accept operands on the meta device, so that no GPU is needed. An operator without a
            kernel for its operands then raises `KernelError` instead of falling back.
    """
    found = Collection(card)
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with set_to(_collection, found), one_thread, fp8_weights.nothing_kept():
        yield found.specs


def described_card() -> Card | None:
    """The card that was given to `collect` in this thread, if any. Operands then hold no data."""
    found = collection()
    return None if found is None else found.card


def card_of(device: int) -> Card:
    """The card that kernels for operands on `device` are chosen for."""
    return described_card() or device_card(device)
