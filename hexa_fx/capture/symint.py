"""Python numbers that remember which recorded node they came from.

A size or ``.item()`` that the run reads must stay symbolic, or the graph would hold for one batch size only. A subclass of
``int`` will not do: ``1.0 * n`` calls ``float.__mul__``, which forgets the source. A `torch.SymInt` over a SymNode of our own is
accepted wherever torch takes an int, and its arithmetic ends up here.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Protocol

import torch
import torch.fx

from hexa_fx.capture.bytecode import instructions_of
from hexa_fx.capture.records import record_of
from hexa_fx.isolation.purity import asking_frame

_FOR_PEOPLE = frozenset("print debug info warning warn error exception critical log write".split())


def noted_text(text: str, used: Callable[[], None]) -> str:
    """A text that code makes of a number. Tells ``used`` that the code may go by it, unless that code prints or logs something, as
    what is written for people is no result.
    """
    frame = asking_frame(("torch.", "hexa_fx."))
    if frame is None or _FOR_PEOPLE.isdisjoint(frame.f_code.co_names):
        used()
    return text


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NumberRecorder(Protocol):
    """What a recorded number needs of the recorder (`hexa_fx.capture.recorder.Recorder`)."""

    def note_decision(self, node: torch.fx.Node | None) -> None:
        """Notes that the host has seen the number, so that the rest of the run may depend on it."""

    def record_call(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> torch.fx.Node:
        """Records a call and what it gave."""


class RecordedNumber:
    """The SymNode behind a recorded number: its value in this run and the graph node that computes it.

    torch calls the methods of a SymNode by name (``torch/fx/experimental/sym_node.py``); the arithmetic ones are generated
    below from `_ARITHMETIC`.
    """

    def __init__(self, value: float | bool, node: torch.fx.Node | None, recorder: NumberRecorder) -> None:
        self.value = value
        self.node = node
        self.recorder = recorder

    def is_int(self) -> bool:
        return isinstance(self.value, int) and not isinstance(self.value, bool)

    def is_float(self) -> bool:
        return isinstance(self.value, float)

    def is_bool(self) -> bool:
        return isinstance(self.value, bool)

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_constant

    def has_hint(self, *_: object) -> bool:
        return True

    is_symbolic = expect_size = has_hint

    def require_hint(self, *_: object) -> float | bool:
        return self.value

    hint = expr = property(require_hint)

    def maybe_as_int(self) -> None:
        return None

    constant_int = constant_bool = nested_int = singleton_int = maybe_as_int

    def guard_int(self, *_: object) -> int:
        """The run turns the number into a plain one, so from here on the recording holds for this value only.

        An index into a list, or a remainder, chooses what is done. What code makes of a size as a plain number goes unseen.
        """
        frame = sys._getframe(2)  # of the code that indexes or slices something, perhaps
        subscript = _operations(frame.f_code).get(frame.f_lasti, "").startswith("BINARY_S")
        if self.node is not None and (self.node.target is operator.mod or subscript or is_of_sizes(self.node)):
            self.compare(subscript)
        else:
            self.recorder.note_decision(self.node)
        return int(self.value)

    int_ = guard_int

    def guard_float(self, *_: object) -> float:
        if self.node is not None and is_of_sizes(self.node):
            self.compare()
        else:
            self.recorder.note_decision(self.node)
        return float(self.value)

    def guard_bool(self, *_: object) -> bool:
        self.recorder.note_decision(self.node)
        return bool(self.value)

    bool_ = expect_true = guard_bool
    guard_size_oblivious = guard_or_false = guard_or_true = statically_known_true = guard_bool

    def wrap_int(self, value: float | bool) -> RecordedNumber:
        return RecordedNumber(value, None, self.recorder)

    wrap_float = wrap_bool = wrap_int

    def clone(self) -> RecordedNumber:
        return self

    def compare(self, subscript: bool = False) -> None:
        """Notes that the run went on with this very number."""
        if self.node is not None:
            compared = self.recorder.record_call(operator.eq, (self.node, self.value), True)
            record_of(compared).subscript = subscript
            self.recorder.note_decision(compared)

    def str(self) -> str:
        return noted_text(repr(self.value), self.compare)

    _graph_repr = __str__ = str

    def argument(self) -> Any:
        """What a recorded call is given in place of this number."""
        return self.value if self.node is None else self.node

    def apply(self, function: Callable[..., Any], *others: RecordedNumber | int | None) -> RecordedNumber:
        given = (other for other in others if other is not None)  # of round(), digits are a plain number, or None
        numbers = (self, *(other if isinstance(other, RecordedNumber) else self.wrap_int(other) for other in given))
        value = function(*[number.value for number in numbers])
        args = tuple(number.argument() for number in numbers)
        return RecordedNumber(value, self.recorder.record_call(function, args, value), self.recorder)


def is_of_sizes(node: torch.fx.Node) -> bool:
    """Whether a number is computed from sizes of tensors alone."""
    frontier, seen = [node], set()
    while frontier:
        item = frontier.pop()
        if item in seen or item.target in ("size", "numel", "nelement", "dim", "stride"):
            continue
        if item.op != "call_function" or not item.all_input_nodes or isinstance(record_of(item).value, torch.Tensor):
            return False
        seen.add(item)
        frontier.extend(item.all_input_nodes)
    return True


@functools.lru_cache(maxsize=256)
def _operations(code: CodeType) -> Mapping[int, str]:
    return {instruction.offset: instruction.opname for instruction in instructions_of(code)}


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "lshift", "rshift")},
    "int_floordiv": operator.floordiv,
    **dict.fromkeys(("int_truediv", "float_truediv"), operator.truediv),
    **dict.fromkeys(("pow_by_natural", "float_pow"), operator.pow),
    **dict.fromkeys(("and_", "bitwise_and", "sym_and"), operator.and_),
    **dict.fromkeys(("or_", "bitwise_or", "sym_or"), operator.or_),
    "bitwise_xor": operator.xor,
    "sym_not": operator.not_,
    "sym_max": max,
    "sym_min": min,
    "sym_float": float,
    "sym_int": int,
    **{name: getattr(math, name) for name in ("ceil", "floor", "trunc")},
    "abs": abs,
    "round": round,
    "sym_sqrt": math.sqrt,
}
SYMBOLIC_FUNCTIONS = {
    name: _ARITHMETIC[name.lstrip("_")] for name in "sym_float sym_int sym_max sym_min sym_not _sym_sqrt".split()
}
"""What torch's functions of numbers compute, by name."""


for _name, _function in _ARITHMETIC.items():
    setattr(RecordedNumber, _name, functools.partialmethod(RecordedNumber.apply, _function))


def wrap(value: float | bool, node: torch.fx.Node | None, recorder: NumberRecorder) -> Any:
    """``value`` as a symbolic number that stands for ``node``."""
    number = RecordedNumber(value, node, recorder)
    if isinstance(value, bool):
        return torch.SymBool(number)
    return torch.SymInt(number) if isinstance(value, int) else torch.SymFloat(number)


def plain(value: Any) -> Any:
    """The Python number in a symbolic one; anything else unchanged."""
    return value.node.value if isinstance(value, SYMBOLIC) else value


class SymbolicSize(tuple[Any, ...]):
    """What ``tensor.shape`` returns during recording: a tuple, since `torch.Size` holds plain ints only."""

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        item = tuple.__getitem__(self, index)
        return SymbolicSize(item) if isinstance(index, slice) else item

    def __add__(self, other: Any) -> SymbolicSize:
        return SymbolicSize(tuple(self) + tuple(other))
