"""Records of operands: what an operator is given, said once. Its schema, check, fake, autocast and wrapper follow from that.

A record is a named tuple, so that it can be handed on as arguments. Its class says the operands in the order of the schema, with a
`Form` for each tensor, what comes out (`returns`, `results`) and what else must hold (`faults`). Variants inherit: the last base's
fields come first, as in dataclasses, and a class's own fields come last. The table is `hexa_fx.ops.table`.
"""

from __future__ import annotations

import typing
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from operator import itemgetter
from string import ascii_lowercase
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
)

import torch
from torch import Tensor

from hexa_fx.ops.checking import check_of
from hexa_fx.ops.forms import AtLeastOne, Form, Operand, Term

R = TypeVar("R", bound="Operands")

_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    Sequence[float]: "float[]",
    Sequence[bool]: "bool[]",
    Sequence[str]: "str[]",
}


@dataclass_transform(frozen_default=True)
class _Record(type):
    """Makes a class a named tuple of its fields and those of its bases."""

    def __new__(mcs, name: str, bases: tuple[Any, ...], body: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(mcs, name, (tuple,), {"__slots__": (), **body})
        inherited = [field for base in reversed(bases) for field in getattr(base, "_fields", ())]
        own = [field for field, kind in body.get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
        defaults = body.get("defaults", bases[0].defaults)
        made: Any = namedtuple(name, dict.fromkeys(inherited + own), defaults=defaults.values())  # type: ignore[misc]
        return super().__new__(mcs, name, (made, *bases), {"__slots__": (), **body})

    def __init__(cls, name: str, bases: tuple[Any, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        if bases:
            cls._declare()  # type: ignore[attr-defined]


class Operands(metaclass=_Record):
    """The operands of an operator. Fields are arguments of the schema."""

    returns: ClassVar[str] = "Tensor"
    """The results in the schema."""
    mixed: ClassVar[tuple[torch.dtype, ...] | None] = None
    """Dtypes that `floating` operands may have where they need not have the same."""
    checked: ClassVar[bool] = True
    """Whether kernels check them."""
    types: ClassVar[dict[str, Any]]
    """Of every field."""
    operands: ClassVar[tuple[Operand, ...]]
    """Those that are tensors of a form."""
    choices: ClassVar[dict[str, tuple[str, ...]]]
    counts: ClassVar[tuple[str, ...]]
    """Fields that have some values only, and those that are 1 or more."""
    defaults: ClassVar[dict[str, object]] = {}
    """Of the last arguments, which the schema makes optional, and torch leaves out where they are that."""
    _fields: ClassVar[tuple[str, ...]]

    if typing.TYPE_CHECKING:  # what named tuples have

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Self: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __getitem__(self, place: int) -> Any: ...
        def _replace(self, **changes: Any) -> Self: ...
        def _asdict(self) -> dict[str, Any]: ...

    @classmethod
    def _declare(cls) -> None:
        hints = typing.get_type_hints(cls, include_extras=True)
        parts = {
            name: get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            for name in cls._fields
        }
        cls.types = {name: str if get_origin(kind) is Literal else kind for name, (kind, *_) in parts.items()}
        cls.choices = {name: get_args(kind) for name, (kind, *_) in parts.items() if get_origin(kind) is Literal}
        cls.counts = tuple(name for name, marks in parts.items() if AtLeastOne in marks)
        forms = ((name, form) for name, marks in parts.items() for form in marks if isinstance(form, Form))
        cls.operands = tuple(
            Operand(
                name,
                form,
                cls.mixed if form.dtypes is None else form.dtypes,
                cls.types[name] == Tensor | None,
                tuple(map(Term.of, form.dims.split())),
            )
            for name, form in forms
        )

    @classmethod
    def pick(cls, *names: str) -> Callable[[Any], tuple[Any, ...]]:
        """A function of an operator's arguments that gives those of these names."""
        return itemgetter(*map(cls._fields.index, names))

    @classmethod
    def marks(cls, needs: Iterable[Any]) -> Self:
        """What autograd says of every argument, by name; more may follow, and torch leaves out what is a default."""
        return cls._make(islice(chain(needs, repeat(False)), len(cls._fields)))

    @classmethod
    def by_argument(cls, **found: Any) -> tuple[Any, ...]:
        """What a backward returns: gradients by name, and None for all other arguments."""
        return tuple(map(found.get, cls._fields))

    def to(self, record: type[R], **more: Any) -> R:
        """Another operator's operands, of this one's by name and of others; None where there is neither."""
        return record._make(map({**dict(zip(self._fields, self)), **more}.get, record._fields))

    def results(self) -> Any:
        """The results, empty; None if the operator only writes to operands."""

    def faults(self) -> str:
        """What does not fit besides sizes, dtypes and devices, in a sentence; empty if all does."""
        return ""

    def check(self, op: str) -> None:
        """Raises `InputError` unless the operands of ``hexa::<op>`` fit together."""
        check = _checks.get(type(self))
        if check is None:
            check = _checks[type(self)] = check_of(self._fields, self.operands, self.choices, self.counts)
        check(self, op)


_checks: dict[type[Operands], Callable[[Any, str], None]] = {}


def schema(record: type[Operands], name: str) -> str:
    """The schema of an operator."""
    letters, said, forms = iter(ascii_lowercase), [], {each.name: each.form for each in record.operands}
    for field, kind in record.types.items():
        text = _SCHEMA[kind]
        if field in forms and forms[field].written:
            text = text.replace("Tensor", f"Tensor({next(letters)}!)")
        default = f"={record.defaults[field]}" if field in record.defaults else ""
        said.append(f"{text} {field}{default}")
    return f"{name}({', '.join(said)}) -> {record.returns}"


def described(record: type[Operands]) -> str:
    """The operands of a record, one a line: shape, type, and how a weight or gathered rows lie."""
    said, operands = [], {each.name: each for each in record.operands}
    for field, kind in record.types.items():
        each = operands.get(field)
        if each is None:
            said.append(f"    {field}: {_SCHEMA[kind]}")
            continue
        dims = ", ".join(term.text for term in each.terms)
        lies = (
            f", as {each.form.layout} says"
            if each.form.layout
            else f", gathered by {each.form.by}"
            if each.form.by
            else ""
        )
        optional = " or None" if kind == Tensor | None else ""
        said.append(f"    {field}: {each.form.says or 'floating '}({dims}){lies}{optional}")
    return "\n".join(said)
