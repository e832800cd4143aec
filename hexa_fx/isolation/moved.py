"""Functions, classes and Python modules as pickles and copies of a model can hold them: by name, and by what they do."""

from __future__ import annotations

import collections
import functools
import types
from dataclasses import dataclass
from typing import Any

NAMED = type(vars(collections.namedtuple("_", "field"))["field"])
"""What lies in the class of a named tuple under the name of a field."""


@dataclass(frozen=True)
class Moved:
    """Stands in a pickle for a function, class or Python module: its name, and of a function what it does."""

    name: str
    code: Any

    @classmethod
    def of(cls, value: Any) -> Moved:
        return cls(_name(value), _code(getattr(_function(value), "__code__", None)))

    def is_like(self, value: Any) -> bool:
        return isinstance(value, _MOVED) and Moved.of(value) == self


_MOVED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    property,
    functools.cached_property,
    NAMED,
)


def movable(value: Any) -> Any:
    """``value`` in a form that can be pickled and copied."""
    if isinstance(value, _MOVED):
        return Moved.of(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(movable, value))
    return {key: movable(item) for key, item in value.items()} if type(value) is dict else value


def _function(value: Any) -> Any:
    return getattr(value, "fget", None) or getattr(value, "func", None) or value


def _name(value: Any) -> str:
    if isinstance(value, NAMED):
        return repr(value)  # its place in the tuple
    function = _function(value)
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', getattr(function, '__name__', ''))}"
    )


def _code(code: Any) -> Any:
    if not isinstance(code, types.CodeType):
        return None
    constants = tuple(_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, constants
