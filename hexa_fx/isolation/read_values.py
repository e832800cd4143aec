"""Values that code reads from Python, in a form that tells later whether they are still the same."""

from __future__ import annotations

import collections
import copy
import functools
import pathlib
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.ir import PythonRead
from hexa_fx.isolation.lookup import CALLED, MISSING, PLAIN, is_collection, is_object, items
from hexa_fx.isolation.purity import CLOCK, hidden_source, is_of_users, is_stream
from hexa_fx.isolation.torch_state import gradients_state

_NAMED = type(vars(collections.namedtuple("_", "field"))["field"])
"""What lies in the class of a named tuple under the name of a field."""

CONSTANT = (
    *(kind for kind in PLAIN if kind is not functools.partial),
    range,
    slice,
    type(...),
    type(NotImplemented),
    pathlib.PurePath,
    re.Pattern,
    torch.Size,
    torch.layout,
    torch.memory_format,
    types.ModuleType,
    property,
    functools.cached_property,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    _NAMED,
    type(MISSING),
)
"""Values that never change and are compared as they are; functions, classes and Python modules by identity."""

_NAMESPACES = (types.SimpleNamespace, threading.local)
_COPIED = (list, tuple, set, frozenset, dict, deque, bytearray)
_LONGEST = 4096
_OWN_CLASS, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE
CACHED = type(functools.lru_cache(lambda: None))
_SEEN_INTO = (types.MethodType, types.CellType, functools.partial, staticmethod, classmethod, CACHED)


@dataclass(frozen=True)
class IsA:
    """Of an object, module or tensor, its kind. What is read of it is noted by itself."""

    kind: type


@dataclass(frozen=True)
class Names:
    """Of a module's registry, the keys."""

    names: frozenset[str]


@dataclass(frozen=True)
class Keys:
    """Of a namespace, or a dict, list or tuple of objects, its kind and keys. What it holds is noted by itself."""

    kind: type
    keys: tuple[Any, ...]


@dataclass(frozen=True)
class Unreadable:
    """Of an object that can change without a trace, its type in words."""

    kind: str


def snapshot(value: Any) -> Any:
    """``value`` in a form that later changes do not reach: itself, a copy, or what kind of object it is."""
    if isinstance(value, CONSTANT) or _is_number_of_numpy(value):
        return value
    if type(value) in _COPIED and len(value) <= _LONGEST and _all_constant(value):
        return copy.copy(value)
    if isinstance(value, _NAMESPACES) or (is_collection(value) and not isinstance(value, (set, frozenset))):
        return Keys(type(value), tuple(items(value)))
    return IsA(torch.Tensor if isinstance(value, torch.Tensor) else type(value))


def alike(now: Any, noted: Any) -> bool:
    """Whether ``now`` is what was noted, by the rules of its type. An int is no float, and no bool."""
    if now is noted:
        return True
    if isinstance(noted, IsA):
        return isinstance(now, torch.Tensor) if noted.kind is torch.Tensor else type(now) is noted.kind
    if isinstance(noted, Keys):
        return type(now) is noted.kind and tuple(items(now)) == noted.keys
    if type(now) is not type(noted):
        return False
    if type(noted) in (list, tuple, deque):
        return len(now) == len(noted) and all(map(alike, now, noted))
    if type(noted) is dict:
        return list(now) == list(noted) and all(map(alike, now.values(), noted.values()))
    try:
        return bool(now == noted) or (noted != noted and now != now)
    except (RuntimeError, ValueError, TypeError):
        return False


def _is_torchs(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and str(value.__globals__.get("__name__")).startswith("torch.")


def is_unreadable(value: Any, noted: Any) -> bool:
    """Whether an object has a state that nobody can see from outside: an iterator, say, or an object of C code."""
    if hidden_source(value) == CLOCK or is_stream(value):
        return True
    if not isinstance(noted, IsA) or isinstance(value, (torch.Tensor, nn.Module)):
        return False
    if hasattr(type(value), "__next__") or isinstance(value, (set, frozenset)):
        return True
    own = type(value).__flags__ & (_OWN_CLASS | _IMMUTABLE) == _OWN_CLASS
    return is_object(value) and not isinstance(value, _SEEN_INTO) and not own


def keys_inside(value: Any, noted: Any) -> Iterator[Any]:
    """What an object of a built-in kind holds, which cannot tell when it is read."""
    if isinstance(value, types.FunctionType):
        if is_of_users(value):
            yield from (name for name in ("__closure__", "__defaults__", "__kwdefaults__") if getattr(value, name))
            yield from (name for name in vars(value) if not name.startswith("__"))
    elif isinstance(noted, Keys):
        yield from noted.keys
    elif names := next((names for kind, names in _PARTS.items() if isinstance(value, kind)), ""):
        yield from names.split()
    elif isinstance(value, types.BuiltinMethodType):
        if not isinstance(value.__self__, (types.ModuleType, type, type(None))):
            yield "__self__"
    elif type(value) in _COPIED and not isinstance(value, (set, frozenset, bytearray)):
        yield from (key for key, item in items(value).items() if isinstance(item, (type, *_MADE_BY_DEF)))
    elif isinstance(noted, IsA) and is_object(value) and not type(value).__flags__ & _OWN_CLASS:
        yield from items(value)


_MADE_BY_DEF = (types.FunctionType, functools.partial)
_PARTS = {
    types.CellType: "cell_contents",
    property: "fget",
    functools.partial: "func args keywords",
    types.MethodType: "__func__ __self__",
    CACHED: "__wrapped__",
}


def _is_number_of_numpy(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic)


def _all_constant(value: Any) -> bool:
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return isinstance(value, bytearray) or all(
        isinstance(item, CONSTANT)
        or _is_number_of_numpy(item)
        or (type(item) in (tuple, frozenset) and _all_constant(item))
        for item in items
    )


def name_of(holder: Any) -> str:
    """What an object is called in a sentence."""
    named = isinstance(holder, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))
    return str(holder.__name__ if named else type(holder).__name__)


@dataclass(frozen=True)
class Bound:
    """What lies at a key of an object that is no part of the block: a Python module, a class, a function, or what these hold.

    Args:
        holder: the object.
        key: see `hexa_fx.isolation.lookup.place`.
        value: what lay there; an object has to lie there itself.
        noted: what `snapshot` makes of it.
    """

    holder: Any
    key: Any
    value: Any
    noted: Any

    def is_as(self, now: Any) -> bool:
        """Whether what lies there now is what did."""
        if isinstance(now, types.MethodType):  # of a class, bound anew each time
            return bool(now == self.value)
        if self.key == "__call__" and _is_torchs(now) and _is_torchs(self.value):  # its tracers put theirs in its place
            return True
        if isinstance(self.noted, (IsA, Keys)) and now is not self.value:
            return False
        return alike(now, self.noted)

    def __str__(self) -> str:
        above = name_of(self.holder)
        return f"torch.{above}()" if self.key == CALLED else f"{above}.{self.key}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return self


@dataclass(frozen=True)
class Code:
    """What the names in the code that ran lead to outside of the block."""

    bounds: tuple[Bound, ...]


def gradients_asked(reads: Iterable[PythonRead]) -> Any:
    """What code was told that asks whether gradients are on, as `gradients_state` gives it; None if none does."""
    bounds = (bound for read in reads if isinstance(read.value, Code) for bound in read.value.bounds)
    return next((bound.noted for bound in bounds if bound.key == CALLED and bound.holder is gradients_state), None)


def values_of(read: PythonRead) -> list[Any]:
    """What was read, each for itself."""
    return [bound.noted for bound in read.value.bounds] if isinstance(read.value, Code) else [read.value]
