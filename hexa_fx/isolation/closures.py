"""What functions keep between their calls: in closures, attributes and defaults, and in what lies in these."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn

from hexa_fx.isolation.contents import Holder, contents
from hexa_fx.isolation.held_objects import is_object
from hexa_fx.isolation.module_tree import modules_of
from hexa_fx.isolation.users_code import is_users, module_name

Named: TypeAlias = tuple[str, Any]

_DEEPEST = 3
_MOST = 4096


def kept_by_functions(functions: Iterable[Named], seen: set[int]) -> Iterator[Holder]:
    """Attributes, closures and defaults of functions of the user's, and what lies in these, each once.

    Args:
        functions: each with a name for it. Anything else among them is left out.
        seen: ids of what need not be looked at again, which grows.
    """
    left = deque((0, name, value) for name, value in functions if keeps(value))
    while left and len(seen) < _MOST:
        depth, name, value = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not keeps(value):
            yield Holder(name, value)
        elif isinstance(value, types.FunctionType):
            yield from (Holder(name, kept) for kept in (vars(value), *(value.__closure__ or ())) if kept)
        inside = _inside(value) if depth < _DEEPEST else ()
        left.extend((depth + 1, name, item) for item in inside if keeps(item) or is_object(item))


def functions_of(block: nn.Module) -> Iterator[Named]:
    """Functions that modules hold as attributes, in lists and dicts, and as hooks, and methods of their classes."""
    for module in modules_of(block):
        for name, value in vars(module).items():
            items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else (value,)
            yield from ((name, item) for item in items)
    classes = {base: None for kind in {*map(type, modules_of(block))} for base in kind.__mro__}
    for cls in classes:
        for name, member in list(vars(cls).items()) if is_users(cls.__module__) else ():
            yield name, getattr(member, "__func__", getattr(member, "fget", member))


def globals_of_held(block: nn.Module) -> list[dict[str, Any]]:
    """Globals of the user's functions that modules hold as attributes and as hooks, each once."""
    found: dict[int, dict[str, Any]] = {}
    for module in modules_of(block):
        for value in vars(module).values():
            for item in value.values() if type(value) is OrderedDict else (value,):
                while isinstance(item, functools.partial):
                    item = item.func
                function = getattr(item, "__func__", item)
                if isinstance(function, types.FunctionType) and is_users(module_name(function.__globals__)):
                    found[id(function.__globals__)] = function.__globals__
    return list(found.values())


def keeps(value: Any) -> bool:
    """Whether it is a function of the user's that has something to keep, or what stands for one."""
    if isinstance(value, types.FunctionType):
        held = value.__closure__ or value.__dict__ or value.__defaults__ or value.__kwdefaults__
        return bool(held) and is_users(value.__module__ or "")
    return isinstance(value, (types.MethodType, functools.partial))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [
            *vars(value).values(),
            *given,
            *(item for cell in value.__closure__ or () for _, item in contents(cell)),
        ]
    if isinstance(value, types.MethodType):
        return (value.__func__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    return [item for _, item in contents(value)]
