"""Stand-ins for built-in functions and types of Python that strip a symbolic number in C, or do not know it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize, plain, wrap
from hexa_fx.capture.texts import noted_text


def builtin_shims(recorder: Recorder, kept: Collection[type]) -> dict[str, Any]:
    """The stand-ins by the names that they go by; ``kept``: those of ``int`` and ``float`` that are to stay what they are."""
    numbers = {int: _int_shim(recorder), float: _float_shim()}
    known = {kind: shim for kind, shim in numbers.items() if kind not in kept}
    return {kind.__name__: shim for kind, shim in known.items()} | {
        "type": _type_shim(known),
        "len": _len_shim(recorder),
        "range": _range_shim(recorder),
        "divmod": _divmod_shim,
        "isinstance": _isinstance_shim,
        "min": _extremum_shim(min, recorder),
        "max": _extremum_shim(max, recorder),
    }


def _int_shim(recorder: Recorder) -> type:
    def made(value: Any = 0, *base: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return value
        if isinstance(value, torch.SymFloat):
            truncated = int(plain(value))
            return wrap(truncated, recorder.record_call(int, (recorder.lift(value),), truncated), recorder)
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return value.item()
        return int(value, *base)

    return _number_shim(int, torch.SymInt, made)


def _float_shim() -> type:
    def made(value: Any = 0.0) -> Any:
        number = value.item() if isinstance(value, torch.Tensor) and value.dtype != torch.bool else value
        return torch.sym_float(number) if isinstance(number, SYMBOLIC) else float(number)

    return _number_shim(float, torch.SymFloat, made)


def _number_shim(kind: type, symbolic: type, made: Callable[..., Any]) -> type:
    """A class that equals ``kind``, in dicts and tuples of types that were made before, and makes what ``made`` gives."""

    class NumberMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (kind, symbolic))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, kind)

        def __eq__(cls, other: object) -> bool:
            return other is kind or other is cls

        def __hash__(cls) -> int:
            return hash(kind)

    name = kind.__name__
    return NumberMeta(name, (kind,), {"__new__": lambda cls, *args: made(*args), "__qualname__": name})


def _type_shim(known: dict[type, type]) -> type:
    """``type(n)`` of a number is what the code knows by the name ``int`` or ``float``."""

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
            return known.get(kind, kind) if kind in (int, float) else kind

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


def _formatted(number: Any, how: str) -> str:
    """A part of a text that code makes of a number."""
    return noted_text(format(plain(number), how), number.node.compare)


METHODS: dict[str, Callable[..., Any]] = {
    "__format__": _formatted,
    **{name: _function_of_number(name) for name in "sqrt exp exp2 log log2 log10 log1p cbrt".split()},
}
"""What a text in code asks of a number (``f"{load:.2f}"``), and what numpy calls on an object that is no number of its own, as
in ``np.sqrt(x.shape[-1])``."""
