"""Which names the code of a class's forward mentions: attributes that it does not mention may change."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator

_UNIMPORTANT = frozenset({"training", "inplace"})


@functools.lru_cache(maxsize=1024)
def read_by_forward(cls: type) -> frozenset[str]:
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
