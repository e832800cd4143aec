"""Plain objects that modules hold (configs, dataclasses, namespaces, dicts, lists), and the paths to their values."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

LITERALS = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device)
"""Values that are nothing but themselves."""

PLAIN = (
    *LITERALS,
    enum.Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    functools.partial,
)
"""Values that are compared as they are. A partial is equal to itself alone."""


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING = _Missing.MISSING
"""Stands for what is not there."""

Steps: TypeAlias = tuple[Any, ...]
"""Names of attributes, or keys where a dict or a list is on the way."""

MODULE_STATE = frozenset(nn.Module().__dict__)
"""Attributes in which torch keeps what every module has; none is a setting."""

_DEEPEST = 4
_LONGEST = 1024
_CLOSED = (torch.Tensor, nn.Module, types.ModuleType, types.MethodType, *PLAIN)
_OF_OTHER_USE = frozenset({"torch", "logging", "threading", "_thread", "hexa_fx"})


def is_object(value: Any) -> bool:
    """Whether attributes or items of ``value`` may be settings: it is no object of torch's, no logger, function or class."""
    return not isinstance(value, _CLOSED) and type(value).__module__.partition(".")[0] not in _OF_OTHER_USE


def is_collection(value: Any) -> bool:
    """Whether ``value`` has items with keys instead of attributes."""
    return isinstance(value, (dict, list, tuple, deque, set, frozenset))


def fields_of(value: Any) -> dict[str, Any] | None:
    """With what the class of a dataclass, a namespace or a mapping of a class of its own is called; None for anything else."""
    if isinstance(value, types.SimpleNamespace):
        return dict(vars(value))
    if isinstance(value, dict):
        return dict(value) if type(value) is not dict else None
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def is_own_sequence(value: Any) -> bool:
    """Whether it is a list or tuple of a class of its own, but for named ones."""
    return isinstance(value, (list, tuple)) and not (type(value) in (list, tuple) or hasattr(value, "_fields"))


def held_in(value: Any) -> list[tuple[Any, Any]] | None:
    """All that a dataclass, a namespace or a mapping of a class of its own holds, by name, sorted, or a list or tuple of such a
    class; None for anything else.
    """
    if is_own_sequence(value):
        return list(enumerate(value))
    if fields_of(value) is None:
        return None
    held = attributes(value) | (dict(value) if isinstance(value, dict) else {})
    return sorted(held.items(), key=lambda item: str(item[0]))


def step(holder: Any, key: Any) -> Any:
    """The item or attribute of ``holder`` with that key or name, or `MISSING`."""
    try:
        return holder[key] if is_collection(holder) else getattr(holder, key)
    except (AttributeError, LookupError, TypeError):
        return MISSING


def items(holder: Any) -> dict[Any, Any]:
    """The items or attributes of ``holder`` itself, by key or name."""
    if isinstance(holder, dict):
        return holder
    if isinstance(holder, (list, tuple, deque)):
        return dict(enumerate(itertools.islice(holder, _LONGEST)))
    return attributes(holder)


def attributes(holder: Any) -> dict[str, Any]:
    """What an instance has of its own, be it under the names of slots."""
    found = dict(getattr(holder, "__dict__", None) or {})
    for cls in type(holder).__mro__:
        for name in _slots(cls):
            value = step(holder, name)
            if value is not MISSING:
                found[name] = value
    return found


def as_dict(value: Any) -> dict[str, Any] | None:
    """All that a dataclass or a namespace holds, by name, and None under the name of its class; None for anything else."""
    if isinstance(value, dict) or fields_of(value) is None:
        return None
    return {f"{type(value).__module__}.{type(value).__qualname__}": None, **items(value)}


def tensors_in(values: Iterable[Any], deepest: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The tensors among ``values``, and in the lists, dicts and objects there, those of classes that pytrees do not know too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif deepest and is_object(value):
            yield from tensors_in(items(value).values(), deepest - 1)


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(name for name in names if not name.startswith("__"))
