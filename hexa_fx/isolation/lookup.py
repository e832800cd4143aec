"""Plain objects that modules hold (configs, dataclasses, namespaces, dicts, lists), where Python finds an attribute, an item or
what a function keeps, and what lies there.

The reader of a recorded run (`hexa_fx.capture.python_reads`) and the guards of a rewritten forward
(`hexa_fx.runtime.attribute_guards`) both go by this, so that they mean the same place.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

LITERALS = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device)
"""Values that are nothing but themselves."""

PLAIN = (*LITERALS, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, functools.partial)
"""Values that are compared as they are. A partial is equal to itself alone."""


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING = _Missing.MISSING
"""Stands for what is not there."""


MODULE_STATE = frozenset(nn.Module().__dict__)
"""Attributes in which torch keeps what every module has; none is a setting."""

_DEEPEST = 4
_LONGEST = 1024
_MANY = 1 << 14
_COLLECTIONS = (OrderedDict, dict, list, tuple, deque, set, frozenset)
_CLOSED = (torch.Tensor, nn.Module, types.ModuleType, types.MethodType, *PLAIN)
_OF_OTHER_USE = frozenset({"torch", "logging", "threading", "_thread", "hexa_fx"})


def is_object(value: Any) -> bool:
    """Whether attributes or items of ``value`` may be settings: it is no object of torch's, no logger, function or class."""
    if isinstance(value, _CLOSED):
        return False
    return type(value).__module__.partition(".")[0] not in _OF_OTHER_USE or isinstance(value, threading.local)


def is_collection(value: Any) -> bool:
    """Whether ``value`` has items with keys instead of attributes."""
    return isinstance(value, _COLLECTIONS)


def plain_kind(collection: Any) -> Any:
    """Python's own kind of a collection, whose methods give what it holds: those of the user's kind may compute it.

    An OrderedDict keeps its order beside the dict that it is, so that methods of the latter break it.
    """
    return next(kind for kind in _COLLECTIONS if isinstance(collection, kind))


def is_data(value: Any) -> bool:
    """Whether it is a list, dict or set of so many items that they are no state of a model: a vocabulary, a notebook's texts.

    Its items are not looked at one by one, which would take seconds. That it is another one, or has other items, is noticed.
    """
    return isinstance(value, (list, dict, set)) and plain_kind(value).__len__(value) > _MANY


def fields_of(value: Any) -> dict[str, Any] | None:
    """With what the class of a dataclass or a mapping of a class of its own is called; None for anything else."""
    if isinstance(value, dict):
        return dict(value) if type(value) is not dict else None
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def held_in(value: Any) -> list[tuple[Any, Any]] | None:
    """All that a dataclass or a mapping of a class of its own holds, by name, sorted; None for anything else."""
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


def at(root: Any, path: str) -> Any:
    """What lies at a dotted path of attributes and of keys of dicts, or `MISSING`."""
    return functools.reduce(step, path.split("."), root)


def number_at(root: nn.Module, path: str) -> Any:
    """The number that a module or a plain object holds itself at a dotted path; None if there is none that may be set."""
    holder, name = _holder_of(root, path)
    number = getattr_plain(holder).get(name) if isinstance(holder, nn.Module) or is_object(holder) else None
    return number if type(number) in (int, float) else None


def put_number(root: nn.Module, path: str, number: Any) -> None:
    """Has what `number_at` finds be another one, or what stands for one; classes of plain objects are not asked."""
    holder, name = _holder_of(root, path)
    if isinstance(holder, nn.Module):
        setattr(holder, name, number)
    else:
        getattr_plain(holder)[name] = number


def _holder_of(root: nn.Module, path: str) -> tuple[Any, str]:
    *steps, name = path.split(".")
    holder: Any = root
    for key in steps:
        holder = step(holder, key) if isinstance(holder, nn.Module) else getattr_plain(holder).get(key, MISSING)
    return holder, name


def items(holder: Any) -> dict[Any, Any]:
    """The items or attributes of ``holder`` itself, by key or name."""
    if isinstance(holder, dict):
        return holder
    if isinstance(holder, (list, tuple, deque)):
        return dict(enumerate(itertools.islice(holder, _LONGEST)))
    return attributes(holder)


def attributes(holder: Any) -> dict[str, Any]:
    """What an instance has of its own, be it under the names of slots."""
    filled = ((name, filling(slot, holder)) for name, slot in slots_of(holder).items())
    return {**getattr(holder, "__dict__", {}), **{name: value for name, value in filled if value is not MISSING}}


def slots_of(holder: Any) -> dict[str, types.MemberDescriptorType]:
    """Of an object whose class has ``__slots__``. Those of the standard library are caches, such as a path's text."""
    cls = type(holder)
    if isinstance(holder, type) or cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        return {}
    members = (item for base in cls.__mro__ if "__slots__" in vars(base) for item in vars(base).items())
    return {name: member for name, member in members if isinstance(member, types.MemberDescriptorType)}


def filling(slot: types.MemberDescriptorType, holder: Any) -> Any:
    """What lies in a slot, or `MISSING`."""
    try:
        return slot.__get__(holder)
    except AttributeError:
        return MISSING


def tensors_in(values: Iterable[Any], deepest: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The tensors among ``values``, and in the lists, dicts and objects there, those of classes that pytrees do not know too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif deepest and is_object(value):
            yield from tensors_in(items(value).values(), deepest - 1)


CALLED = "()"
"""The key of what a function that asks for a state gives when it is called."""


REGISTRIES = ("_parameters", "_buffers", "_modules")
_BY_ATTRIBUTE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CellType,
    functools.partial,
    property,
    torch.Tensor,
)


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_READ_ONLY = frozenset("__closure__ __func__ __self__ __wrapped__ func args keywords fget".split())


class Place(NamedTuple):
    """What lies at a key, and how to look there again quickly.

    Args:
        value: what lies there, `MISSING` if nothing does. What the class gives is given as it lies in the class.
        dicts: dicts that have to hold ``value``, or nothing, under the key.
        owner: what gives ``value`` as an attribute: a class, a Python module, or an object with slots or a way of its own.
        slow: whether only `lookup` finds it.

    Of a place that can never hold anything else, such as an item of a tuple, none of these is set.
    """

    value: Any
    dicts: tuple[tuple[dict[Any, Any], Any], ...] = ()
    owner: Any = None
    slow: bool = False


def lookup(holder: Any, key: Any) -> Any:
    """The value at ``key`` of ``holder``: `MISSING` if there is none."""
    return place(holder, key).value


def place(holder: Any, key: Any) -> Place:
    """Finds ``key`` as an item of a collection, an attribute of an object, class or Python module, or by a call."""
    if key == "__class__":
        return Place(type(holder))
    if key == CALLED:
        return Place(holder(), slow=True)
    if isinstance(holder, dict):
        value = dict.get(holder, key, MISSING)
        return Place(value, ((holder, value),))
    if is_collection(holder):
        return Place(step(holder, key), slow=not isinstance(holder, tuple))
    if not isinstance(key, str):  # where there may be a collection elsewhere, as None may lie in place of a closure
        return Place(MISSING)
    if isinstance(holder, types.ModuleType) and key in vars(holder):
        return Place(vars(holder)[key], ((vars(holder), vars(holder)[key]),))
    if isinstance(holder, (type, types.ModuleType)):
        return Place(_of_class(holder, key), owner=None if key == "__mro__" else holder)
    if isinstance(holder, _BY_ATTRIBUTE):
        return Place(_attribute(holder, key), owner=None if key in _READ_ONLY else holder)
    return _of_object(holder, key)


def _of_object(holder: Any, name: str) -> Place:
    own = getattr_plain(holder)
    if name in own:
        return Place(own[name], ((own, own[name]),))
    found = next((vars(base)[name] for base in type(holder).__mro__ if name in vars(base)), MISSING)
    computes = getattr_of(type(holder)) is not object.__getattribute__ and not isinstance(found, property)
    # attributes of the thread that asks; and what lies in __slots__, or is of C code
    if computes or isinstance(holder, threading.local) or isinstance(found, _DESCRIPTORS):
        return Place(_attribute(holder, name), owner=holder)
    if found is not MISSING:
        return Place(_of_class(type(holder), name), ((own, MISSING),), type(holder))
    registries = [own[registry] for registry in REGISTRIES] if isinstance(holder, nn.Module) else []
    for registry in registries:
        if name in registry:
            return Place(registry[name], ((registry, registry[name]),))
    if getattr(type(holder), "__getattr__", nn.Module.__getattr__) is not nn.Module.__getattr__:
        return Place(_attribute(holder, name), owner=holder)
    return Place(MISSING, tuple((d, MISSING) for d in (own, *registries)), type(holder))


def getattr_plain(holder: Any) -> dict[str, Any]:
    """The ``__dict__`` of an object, whatever its class says; empty if it has none."""
    try:
        own: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return own


def getattr_of(cls: type) -> Any:
    """The ``__getattribute__`` of a class, without the one that notes reads."""
    return getattr(cls.__getattribute__, "noting", cls.__getattribute__)


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, MISSING)
    except Exception:  # of a property; the block's own code then raises it
        return MISSING


def _of_class(cls: Any, name: str) -> Any:
    try:
        return getattr(cls, name, MISSING)
    except Exception:  # of a descriptor that wants an instance
        return inspect.getattr_static(cls, name, MISSING)
