"""Random numbers that do not come from torch's default generators: Python's, numpy's, and generators that modules hold.

A recorded graph has what was drawn once as a number.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.module_tree import named_modules


@dataclass(frozen=True)
class _Stream:
    label: str
    state: Callable[[], Any]
    put_back: Callable[[Any], None]


class Streams:
    """The streams that a module's code can draw from, in their present state."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(stream, stream.state()) for stream in _streams(module)]

    def drawn(self) -> list[str]:
        """Labels of those that are in another state now."""
        return [stream.label for stream, before in self._before if stream.state() != before]

    def restore(self) -> None:
        for stream, before in self._before:
            if stream.state() != before:
                stream.put_back(before)


def _streams(module: nn.Module) -> Iterator[_Stream]:
    yield _Stream("Python's random", random.getstate, random.setstate)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield _Stream("numpy.random", lambda: _comparable(numpy.get_state()), numpy.set_state)
    for path, child in named_modules(module):
        if any(issubclass(kind, torch.Generator) for kind in {*map(type, vars(child).values())}):
            for name, value in vars(child).items():
                if isinstance(value, torch.Generator):
                    yield _of_generator(f"{path or 'self'}.{name}", value)


def _comparable(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return (name, tuple(keys), *rest)


def _of_generator(label: str, generator: torch.Generator) -> _Stream:
    def put_back(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return _Stream(label, lambda: bytes(generator.get_state().numpy()), put_back)
