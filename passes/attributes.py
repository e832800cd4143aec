"""Plain attributes that the recorded code read: a trainer may set another temperature, top_k or dropout later."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterator

from torch import nn

from hexa_fx.ir import AttributeGuard

_PLAIN = (int, float, str, bool, type(None))
_UNIMPORTANT = frozenset({"training", "inplace"})


def attribute_guards(
    block: nn.Module, kept: Collection[str], stored: Collection[tuple[str, str]]
) -> tuple[AttributeGuard, ...]:
    """What the numbers, texts and switches are that the forwards inside ``block`` read.

    Args:
        kept: paths of submodules that are still called, so that they read their own.
        stored: (path, name) of attributes that the code sets itself.
    """
    found = []
    for path, module in block.named_modules():
        if any(path == call or path.startswith(f"{call}.") for call in kept):
            continue
        read = _read_by_forward(type(module))  # type: ignore[arg-type]
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN and name in read and (path, name) not in stored:
                found.append(AttributeGuard(path, name, value))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _read_by_forward(cls: type) -> frozenset[str]:
    """Names that ``forward``, or a method or property that it mentions, mentions."""
    seen: set[str] = set()
    left = {"forward"}
    while left:
        name = left.pop()
        seen.add(name)
        member = inspect.getattr_static(cls, name, None)
        if isinstance(member, property):
            member = member.fget
        function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else None
        if isinstance(function, types.FunctionType):
            left.update(set(_names(function.__code__)) - seen)
    return frozenset(seen - _UNIMPORTANT)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
            continue
        if isinstance(constant, str):
            yield constant  # getattr(self, "name", default)
