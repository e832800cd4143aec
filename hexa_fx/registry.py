"""What lower layers use of upper ones. ``hexa_fx/__init__.py`` registers it when the package is imported.

An entry is registered as a function that imports it, called when the entry is first used. So importing `hexa_fx` imports neither
torch nor passes nor kernels, and an operator that is called without any block (from an exported graph, a pickle, torch.compile)
finds the same compiler as one in an installed block.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@contextmanager
def interrupts_after() -> Iterator[None]:
    """A context that Ctrl-C ends only when it is over: operators whose registration was cut short could not be registered again."""
    own = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(own):
        yield
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *about: came.append(about))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
    if came:
        own(*came[-1])


class Provider(Generic[T]):
    """One thing of an upper layer; calling the entry gives it."""

    _load: Callable[[], T]

    def register(self, load: Callable[[], T]) -> None:
        """Sets the function that imports and returns it."""
        self._load = load

    def __call__(self) -> T:
        with interrupts_after():
            return self._load()


compiler: Provider[Callable[[Any, str], Any]] = Provider()
"""Makes the `hexa_fx.ops.program.FfnPrograms` of an `FfnRequest` on a device type."""

large_blocks: Provider[Any] = Provider()
"""The package of that name: weights that count as float64 where they lie, and their gradients as products."""

lora: Provider[Any] = Provider()
"""The package of that name: adapters on the linear layers of experts, as factors."""

packed: Provider[Any] = Provider()
"""The package of that name: listed experts whose weights are packed, as one weight."""

cuda_kernels: Provider[Callable[[], None]] = Provider()
"""Registers the CUDA kernels of the operators."""
