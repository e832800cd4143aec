"""The names that a class's forward mentions. Attributes that it does not mention may change freely."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator

_UNIMPORTANT = frozenset({"training", "inplace"})


@functools.lru_cache(maxsize=1024)
def read_by_forward(cls: type) -> frozenset[str]:
    """Names mentioned by ``forward`` and by the methods, properties and functions that it mentions in turn."""
    seen: set[str] = set()
    left: list[tuple[str, dict[str, object]]] = [("forward", {})]
    while left:
        name, scope = left.pop()
        seen.add(name)
        for function in (_member(cls, name), _beside(scope.get(name))):
            if function is not None:
                left.extend((mentioned, function.__globals__) for mentioned in set(_names(function.__code__)) - seen)
    return frozenset(seen - _UNIMPORTANT)


@functools.lru_cache(maxsize=1024)
def methods_of_forward(cls: type) -> frozenset[str]:
    """Of these names, those of methods that the user's code defines."""
    found = ((name, _member(cls, name)) for name in read_by_forward(cls) if name != "forward")
    return frozenset(name for name, member in found if member and member.__module__.partition(".")[0] != "torch")


def _member(cls: type, name: str) -> types.FunctionType | None:
    member = inspect.getattr_static(cls, name, None)
    if isinstance(member, property):
        member = member.fget
    return _function(getattr(member, "__func__", member))


def _beside(value: object) -> types.FunctionType | None:
    """A function that the code calls by name; torch's own know nothing about the module."""
    function = _function(value)
    return None if function is None or function.__module__.partition(".")[0] == "torch" else function


def _function(value: object) -> types.FunctionType | None:
    """The Python function behind a class member, if there is one."""
    function = inspect.unwrap(value) if callable(value) else None
    return function if isinstance(function, types.FunctionType) else None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
            continue
        if isinstance(constant, str):
            yield constant  # getattr(self, "name", default)
