"""Stand-ins for built-in functions and types of Python that strip a symbolic number in C, or do not know it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize, plain, wrap


def builtin_shims(recorder: Recorder, plain_int: bool) -> dict[str, Any]:
    """The stand-ins by the names that they go by; without ``int`` if that is to stay what it is."""
    integer = int if plain_int else _int_shim(recorder)
    shims = {
        "type": _type_shim(integer),
        "len": _len_shim(recorder),
        "range": _range_shim(recorder),
        "divmod": _divmod_shim,
        "isinstance": _isinstance_shim,
        "min": _extremum_shim(min, recorder),
        "max": _extremum_shim(max, recorder),
    }
    return shims if plain_int else {"int": integer, **shims}


def _int_shim(recorder: Recorder) -> type:
    class IntMeta(type):
        """Makes a class that equals ``int``, in dicts and tuples of types that were made before."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (int, torch.SymInt))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, int)

        def __eq__(cls, other: object) -> bool:
            return other is int or other is cls

        def __hash__(cls) -> int:
            return hash(int)

    class Int(int, metaclass=IntMeta):
        def __new__(cls, value: Any = 0, *base: Any) -> Any:
            if isinstance(value, torch.SymInt):
                return value
            if isinstance(value, torch.SymFloat):
                truncated = int(plain(value))
                return wrap(truncated, recorder.record_call(int, (recorder.lift(value),), truncated), recorder)
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                return value.item()
            return int(value, *base)

    Int.__name__ = Int.__qualname__ = "int"
    return Int


def _type_shim(integer: type) -> type:
    """``type(n)`` of a whole number is what the code knows by the name ``int``."""

    class TypeMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, type)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, type)

    class Type(type, metaclass=TypeMeta):
        def __new__(cls, value: Any, *bases_and_body: Any, **options: Any) -> Any:
            if bases_and_body:
                return type(value, *bases_and_body, **options)
            kind = torch.Size if isinstance(value, SymbolicSize) else type(plain(value))
            return integer if kind is int else kind

    return Type


def _range_shim(recorder: Recorder) -> type:
    """A loop over rows one by one is what verification sees at other sizes; of larger steps, the run holds for their number."""

    class RangeMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, range)

    class Range(metaclass=RangeMeta):
        def __new__(cls, *limits: Any) -> Any:
            found = range(*map(plain, limits))
            symbolic = [limit.node for limit in limits if isinstance(limit, torch.SymInt)]
            if len(limits) < 3 or plain(limits[2]) == 1:
                for number in symbolic:
                    recorder.note_decision(number.node)
            elif symbolic:
                bool((limits[1] - limits[0] + limits[2] - 1) // limits[2] == len(found))
            return found

    return Range


def _len_shim(recorder: Recorder) -> Callable[[Any], Any]:
    def shim(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.shape[0]
        pieces = recorder.pieces.number(value)
        return len(value) if pieces is None else pieces

    return shim


def _divmod_shim(value: Any, by: Any) -> Any:
    symbolic = isinstance(value, SYMBOLIC) or isinstance(by, SYMBOLIC)
    return (value // by, value % by) if symbolic else divmod(value, by)


def _isinstance_shim(value: Any, kinds: Any) -> bool:
    number = torch.Size(map(plain, value)) if isinstance(value, SymbolicSize) else plain(value)
    return isinstance(value, kinds) or isinstance(number, kinds)


def _extremum_shim(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def shim(*args: Any, **kwargs: Any) -> Any:
        numbers = len(args) == 2 and not kwargs and all(isinstance(plain(item), (int, float)) for item in args)
        if not numbers or not any(isinstance(item, SYMBOLIC) for item in args):
            return function(*args, **kwargs)
        value = function(*[plain(item) for item in args])
        return wrap(value, recorder.record_call(function, tuple(recorder.lift(item) for item in args), value), recorder)

    return shim


def _function_of_number(name: str) -> Callable[[Any], Any]:
    function = getattr(math, name)
    return lambda number: torch.sym_sqrt(number) if name == "sqrt" else function(number)


METHODS = {name: _function_of_number(name) for name in "sqrt exp exp2 log log2 log10 log1p cbrt".split()}
"""What numpy calls on an object that is no number of its own, as in ``np.sqrt(x.shape[-1])``."""
