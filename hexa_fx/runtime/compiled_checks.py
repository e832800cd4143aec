"""Writes the checks of every call as Python functions: one comparison after the other, without loops and look-ups around them.

A function that says no only says that something may differ. What differs, and whether it matters, is then found out slowly.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch

from hexa_fx.ir import InputGuard
from hexa_fx.isolation.held_objects import MISSING
from hexa_fx.runtime.guards import GuardMiss, check_input, dtype_class, equal, is_plain
from hexa_fx.runtime.resolution import BLOCK, Resolution, StandIn, is_still
from hexa_fx.runtime.signature import ArgumentNames

_MOST = 400
"""Comparisons that are written out. More of them, in lists of many experts, take longer to compile than they save."""

_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_SIMPLE = (bool, int, float, str)
_NOTHING = repeat(MISSING)


class _Names:
    """Names for the objects that a written function compares with."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"MISSING": MISSING, "get": dict.get, "same_object": same_object}
        self._known: dict[int, str] = {}

    def of(self, value: Any) -> str:
        if type(value) is StandIn:
            return value.name
        name = self._known.setdefault(id(value), f"_{len(self._known)}")
        self.values[name] = value
        return name

    def function(self, arguments: str, *lines: str) -> Callable[..., Any]:
        source = "\n    ".join((f"def check({arguments}):", *lines))
        exec(compile(source, "<hexa_fx checks>", "exec"), self.values)
        function: Callable[..., Any] = self.values.pop("check")
        return function


def still_the_same(found: Resolution, block: Any) -> Callable[[Any], bool]:
    """A function of the block that says whether everything lies where it was found; it does not keep the block alive."""
    names = _Names()
    clauses = [*_of_dicts(found.dicts, names), *_of_owners(found.owners, names, block)]
    clauses += [f"type({names.of(value)}) is {names.of(kind)}" for value, kind in found.objects]
    clauses += [f"{names.of(where)}[{key!r}].dtype is {names.of(dtype)}" for where, key, dtype in found.dtypes]
    clauses += [f"len({names.of(value)}) == {count}" for value, count in found.counted]
    names.values |= {"equal": equal, "is_still": is_still}
    clauses += [f"equal({names.of(value)}, {names.of(copy)})" for value, copy in found.whole]
    clauses += [f"is_still({', '.join(map(names.of, each))})" for each in found.slow]
    check = f"return {' and '.join(clauses) or True}"
    return names.function(
        "block",
        "try:",
        "    own = block.__dict__",
        f"    {check}",
        "except (KeyError, AttributeError):",
        "    return False",
    )


def any_of(collections: Iterable[Any]) -> Callable[[], bool]:
    """A function that says whether one of them holds anything."""
    names, held = _Names(), list(collections)
    if len(held) > _MOST:
        return lambda: any(held)
    return names.function("", f"return bool({' or '.join(map(names.of, held)) or False})")


def inputs_of(
    form: tuple[Any, ...], arguments: ArgumentNames, guards: Sequence[InputGuard], inputs: Sequence[str]
) -> Callable[[Any, Any], list[Any] | None]:
    """A function of (args, kwargs) that gives the inputs of a program, or None if they are not what was recorded.

    Args:
        form: how many arguments come by position, and the names of the others.
        arguments: of the block's forward.
        guards: see `hexa_fx.runtime.guards.check_inputs`.
        inputs: names of the arguments that the program takes.
    """
    names = _Names()
    names.values |= {"Tensor": torch.Tensor, "is_plain": is_plain}
    given = [_Given(f"args[{place}]") for place in range(form[0])]
    try:
        values = arguments.bind(tuple(given), {name: _Given(f"kwargs[{name!r}]") for name in form[1:]})
        covered = {*inputs, *(guard.name for guard in guards)}
        if not covered <= values.keys():
            return _unknown
        places = {name: f"x{place}" for place, name in enumerate(values)}
        lines = [f"{places[name]} = {_source(value, names)}" for name, value in values.items()]
        clauses = [clause for guard in guards for clause in _of_guard(guard, places, values[guard.name], names)]
        for name in values.keys() - covered:
            default = arguments.defaults.get(name, MISSING)  # nothing is
            clauses.append(f"{places[name]} is {names.of(default)}")
    except GuardMiss:
        return _unknown
    result = f"[{', '.join(places[name] for name in inputs)}]"
    return names.function("args, kwargs", *lines, f"return {result} if {' and '.join(clauses) or True} else None")


class _Given(str):
    """Stands for an argument that is given: the expression that reads it."""

    __slots__ = ()


def _unknown(args: Any, kwargs: Any) -> None:
    """Of a form of call that the block was not recorded with."""


def _source(value: Any, names: _Names) -> str:
    return str(value) if type(value) is _Given else names.of(value)


def _of_guard(guard: InputGuard, places: dict[str, str], value: Any, names: _Names) -> list[str]:
    x = places[guard.name]
    if type(value) is not _Given:
        check_input(guard, value)  # a default, which is what it is
        return []
    if guard.kind == "constant":
        constant = names.of(guard.value)
        simple = f" or (type({x}) is type({constant}) and {x} == {constant})" * (type(guard.value) in _SIMPLE)
        return [f"({x} is {constant}{simple})"]
    clauses = [f"(type({x}) is Tensor or is_plain({x}))"]
    if guard.dtype is not None and guard.exact_dtype:
        clauses.append(f"{x}.dtype is {names.of(guard.dtype)}")
    elif guard.dtype is not None:
        alike = frozenset(dtype for dtype in _DTYPES if dtype_class(dtype) == dtype_class(guard.dtype))
        clauses.append(f"{x}.dtype in {names.of(alike)}")
    on = f"{x}.is_{guard.device}" if guard.device in ("cpu", "cuda") else f"{x}.device.type == {guard.device!r}"
    clauses += [on] if guard.device is not None else []
    clauses += [f"{x}.is_contiguous() is {guard.contiguous}"] if guard.contiguous is not None else []
    clauses += [f"{x}.requires_grad is {guard.requires_grad}"] if guard.requires_grad is not None else []
    clauses += [f"{x}.ndim == {guard.ndim}"] if guard.ndim is not None else []
    return clauses + ([f"{x}.shape[-1] == {guard.last}"] if guard.last is not None else [])


def _of_dicts(entries: list[tuple[dict[Any, Any], Any, Any]], names: _Names) -> list[str]:
    few, many = _few_and_many(entries)
    clauses = [_of_dict(*entry, names) for entry in few]
    if not many:
        return clauses
    where, keys, values = zip(*many)
    names.values["dicts_are"] = lambda: all(map(is_, map(dict.get, where, keys, _NOTHING), values))
    return ["dicts_are()", *clauses]


def _few_and_many(entries: list[tuple[Any, Any, Any]]) -> tuple[list[tuple[Any, Any, Any]], list[tuple[Any, Any, Any]]]:
    """What is written out, as all is that has to do with the block itself, and what is compared in a loop."""
    if len(entries) <= _MOST:
        return entries, []
    of_block = [StandIn in map(type, entry) for entry in entries]
    return [e for e, own in zip(entries, of_block) if own], [e for e, own in zip(entries, of_block) if not own]


def _of_dict(where: dict[Any, Any], key: Any, value: Any, names: _Names) -> str:
    name = repr(key) if type(key) is str else names.of(key)
    if type(where) not in (dict, StandIn):
        return f"get({names.of(where)}, {name}, MISSING) is {names.of(value)}"
    if value is MISSING:
        return f"{name} not in {names.of(where)}"
    return f"{names.of(where)}[{name}] is {names.of(value)}"


def _of_owners(entries: list[tuple[Any, str, Any]], names: _Names, block: Any) -> list[str]:
    few, many = _few_and_many(entries)
    clauses = [_of_owner(*entry, names, block) for entry in few]
    if not many:
        return clauses
    owners, keys, values = zip(*many)
    names.values["owners_give"] = lambda: all(map(same_object, map(getattr, owners, keys, _NOTHING), values))
    return ["owners_give()", *clauses]


def _of_owner(owner: Any, key: str, value: Any, names: _Names, block: Any) -> str:
    if value is MISSING or not key.isidentifier() or keyword.iskeyword(key):
        return f"same_object(getattr({names.of(owner)}, {key!r}, MISSING), {names.of(value)})"
    if getattr(block if owner is BLOCK else owner, key, MISSING) is (block if value is BLOCK else value):
        return f"{names.of(owner)}.{key} is {names.of(value)}"
    return f"same_object({names.of(owner)}.{key}, {names.of(value)})"


def same_object(one: Any, two: Any) -> bool:
    """Whether both are one object; class methods are bound anew each time."""
    return one is two or (type(one) is type(two) and bool(one == two))
