"""Records of operands: what an operator is given, said once. Its schema, check, fake, autocast and wrapper follow from that.

A record is a named tuple, so that it can be handed on as arguments. Its class says the operands in the order of the schema, with a
`Form` for each tensor (its dtypes, its sizes, how it lies), what comes out (`returns`, `results`), and what else must hold
(`faults`). Variants inherit: the last base's fields come first, as in dataclasses, and a class's own fields come last, or before
all others where they are ``leading``. The table is `hexa_fx.ops.table`.
"""

from __future__ import annotations

import typing
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from operator import itemgetter
from string import ascii_lowercase
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from hexa_fx.errors import InputError

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def shape(t: Tensor) -> str:
    """``torch.float32 (4, 8)`` for an error message."""
    return f"{t.dtype} {tuple(t.shape)}"


DENSE = "dense"
"""The format of a weight that is a tensor of numbers."""


def experts_last(factor: Tensor) -> bool:
    """Whether a factor (E, N, r) lies as (N, r, E), which is how PEFT stores those of its second linear layer."""
    experts, _, rank = factor.shape
    return experts > 1 and factor.stride() == (1, rank * experts, experts)


@dataclass(frozen=True)
class Form:
    """What a tensor operand has to be.

    Args:
        dims: sizes: a letter that all operands agree on, ``E+1``, ``N/128`` (as many blocks of 128), ``*`` for any, or ``.inner``
            for the record's attribute. Empty where anything will do.
        dtypes: that it may have, empty for any; None for that of the record's first floating operand.
        says: of these dtypes, in a sentence.
        layout: the field that tells in which layout a weight lies; ``dims`` are those of ``nk``.
        by: the field of an index that gathers its rows, ``top_k`` times each, where one is given.
        flat: ``dims`` tells how many elements it has, in whatever shape.
        written: the operator writes to it.
        cast: autocast casts it.
        wide: it has the accumulators' type, float32, or float64 for float64, or that of the record's first floating operand.
    """

    dims: str = ""
    dtypes: tuple[torch.dtype, ...] | None = ()
    says: str = ""
    layout: str = ""
    by: str = ""
    flat: bool = False
    written: bool = False
    cast: bool = False
    wide: bool = False


def floating(dims: str, layout: str = "", by: str = "") -> Form:
    """Floating, in the dtype of the first such operand."""
    return Form(dims, None, layout=layout, by=by, cast=True)


def numbers(dims: str, flat: bool = False, cast: bool = False) -> Form:
    """In any floating dtype."""
    return Form(dims, FLOATING, "floating ", flat=flat, cast=cast)


def exactly(dtype: torch.dtype, dims: str, by: str = "", written: bool = False) -> Form:
    """In one dtype."""
    return Form(dims, (dtype,), f"{dtype} ", by=by, written=written)


def added_to(dims: str, layout: str = "") -> Form:
    """A buffer that the operator adds to, in the accumulators' type or the operands'."""
    return Form(dims, layout=layout, written=True, wide=True)


def index(dims: str) -> Form:
    """As `hexa::reindex` makes it."""
    return exactly(torch.int32, dims)


def integers(dims: str) -> Form:
    """Whole numbers of any width."""
    return Form(dims, INTEGER, "integer ")


class AtLeastOne:
    """Marks a number that is 1 or more."""


Count: TypeAlias = Annotated[int, AtLeastOne]


class Term(NamedTuple):
    """A size: ``symbol / per + plus``. No symbol: any size. One that begins with a dot: an attribute of the record."""

    symbol: str
    per: int
    plus: int
    text: str

    @classmethod
    def of(cls, text: str) -> Term:
        symbol, _, plus = text.partition("+")
        symbol, _, per = symbol.partition("/")
        return cls(symbol.removeprefix("*"), int(per or 1), int(plus or 0), text.removeprefix("."))


class Operand(NamedTuple):
    """A tensor operand as the check looks at it."""

    name: str
    form: Form
    dtypes: tuple[torch.dtype, ...] | None
    optional: bool
    terms: tuple[Term, ...]


def _fits(o: Any, each: Operand, t: Any, known: dict[str, int]) -> bool:
    """Whether an operand has its sizes. known: by symbol, those that others have, which grow by its own."""
    form, terms = each.form, each.terms
    found: tuple[int, ...] = (t.numel(),) if form.flat else t.shape
    if len(found) != len(terms):
        return not terms
    if form.layout and getattr(o, form.layout) == "kn":
        *outer, column, row = found
        found = (*outer, row, column)
    if form.by and getattr(o, form.by) is not None:
        found = (found[0] * o.top_k, *found[1:])
    for (symbol, per, plus, _), size in zip(terms, found):
        if per != 1 or plus:
            size = (size - plus) * per
        if symbol.isidentifier():
            if known.setdefault(symbol, size) != size:
                return False
        elif symbol and size != (getattr(o, symbol[1:]) if symbol[0] == "." else int(symbol)):
            return False
    return True


def _refusal(op: str, o: Any, each: Operand, dtype: torch.dtype | None, known: dict[str, int]) -> InputError:
    """What is said of an operand that does not fit. dtype: of floating ones."""
    form, first, t = each.form, o.operands[0], getattr(o, each.name)
    beside = getattr(o, first.name)
    if t.device != beside.device:
        return InputError(f"hexa::{op}: {each.name} is on {t.device}, {first.name} on {beside.device}")
    if each.dtypes is None and t.dtype != dtype:
        mixed = f"{o.floating} is {dtype} but {each.name} is {t.dtype}"
        return InputError(f"hexa::{op}: {mixed}; cast one of them, or run under torch.autocast")
    gathered = bool(form.by) and getattr(o, form.by) is not None
    said = [_size(term, o, known) if place or not gathered else term.text for place, term in enumerate(each.terms)]
    if form.layout and getattr(o, form.layout) == "kn":
        *lead, row, column = said
        said = [*lead, column, row]
    expected = f"{said[0]} numbers" if form.flat else f"({', '.join(said)}{',' * (len(said) == 1)})"
    others = "" if first is each else f" beside {first.name} {shape(beside)}"
    if gathered:
        others += f", {o.top_k} rows of {form.by} {shape(getattr(o, form.by))} for each"
    says = f"{' or '.join(dict.fromkeys(map(str, _wide(dtype))))} " if form.wide else form.says
    return InputError(f"hexa::{op}: {each.name} is {shape(t)}; expected {says}{expected}{others}")


def _size(term: Term, o: Any, known: dict[str, int]) -> str:
    symbol, per, plus, text = term
    size = getattr(o, symbol[1:]) if symbol.startswith(".") else known.get(symbol)
    return text if size is None else str(size // per + plus)


def _wide(dtype: torch.dtype | None) -> tuple[torch.dtype | None, ...]:
    """What a buffer for sums of a dtype may have."""
    return torch.float64 if dtype == torch.float64 else torch.float32, dtype


R = TypeVar("R", bound="Operands")
T = TypeVar("T")


if typing.TYPE_CHECKING:

    class Derived(Generic[T]):
        """What follows from a record's operands."""

        def __init__(self, of: Callable[[Any], T]) -> None: ...
        def __get__(self, record: Any, owner: Any = None) -> T: ...

else:
    Derived = property


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


@typing.dataclass_transform(frozen_default=True)
class _Record(type):
    """Makes a class a named tuple of its fields and those of its bases."""

    def __new__(mcs, name: str, bases: tuple[Any, ...], body: dict[str, Any], leading: bool = False) -> Any:
        if not bases:
            return super().__new__(mcs, name, (tuple,), {"__slots__": (), **body})
        inherited = [field for base in reversed(bases) for field in getattr(base, "_fields", ())]
        own = [field for field, kind in body.get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
        defaults = body.get("defaults", bases[0].defaults)
        in_order = dict.fromkeys(own + inherited if leading else inherited + own)
        made: Any = namedtuple(name, in_order, defaults=defaults.values())  # type: ignore[misc]
        return super().__new__(mcs, name, (made, *bases), {"__slots__": (), **body})

    def __init__(cls, name: str, bases: tuple[Any, ...], body: dict[str, Any], leading: bool = False) -> None:
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
    tensors_and_numbers: ClassVar[tuple[list[int], list[int]]]
    """Places of `operands`, and of what else their sizes depend on."""
    floating: ClassVar[str]
    """The first operand whose dtype others have, too; empty if there is none."""
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
            name: typing.get_args(hints[name]) if typing.get_origin(hints[name]) is Annotated else (hints[name],)
            for name in cls._fields
        }
        cls.types = {name: str if typing.get_origin(kind) is Literal else kind for name, (kind, *_) in parts.items()}
        cls.choices = {
            name: typing.get_args(kind) for name, (kind, *_) in parts.items() if typing.get_origin(kind) is Literal
        }
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
        tensors, numbers = [each.name for each in cls.operands], (int, str, bool)
        cls.tensors_and_numbers = (
            [place for place, name in enumerate(cls._fields) if name in tensors],
            [place for place, name in enumerate(cls._fields) if cls.types[name] in numbers],
        )
        cls.floating = next((each.name for each in cls.operands if each.dtypes is None), "")

    @classmethod
    def pick(cls, *names: str) -> Callable[[Any], tuple[Any, ...]]:
        """A function of an operator's arguments that gives those of these names."""
        return itemgetter(*map(cls._fields.index, names))

    @classmethod
    def split(cls, args: Sequence[Any]) -> tuple[Self, tuple[Any, ...]]:
        """The operands, and what follows them."""
        if len(args) == len(cls._fields):
            return cls._make(args), ()
        given = iter(args)
        return cls._make(islice(given, len(cls._fields))), tuple(given)

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
        kind = type(self), record, *more
        places = _places.get(kind) or _places.setdefault(kind, _places_of(self._fields, more, record._fields))
        values = *self, *more.values(), None
        return record._make([values[place] for place in places])

    def results(self) -> Any:
        """The results, empty; None if the operator only writes to operands."""

    def faults(self) -> str:
        """What does not fit besides sizes, dtypes and devices, in a sentence; empty if all does."""
        return ""

    def check(self, op: str) -> None:
        """Raises `InputError` unless the operands of ``hexa::<op>`` fit together."""
        tensors, numbers = self.tensors_and_numbers
        each = [None if (t := self[place]) is None else (t.shape, t.dtype, t.device) for place in tensors]
        kind = type(self), *each, *[self[place] for place in numbers]
        try:
            seen = kind in _accepted
        except TypeError:  # sizes that stand for any while a call is traced
            seen, kind = False, ()
        if not seen:
            self._check(op)
            if len(_accepted) >= _MOST:
                _accepted.clear()
            _accepted.add(kind)
        if fault := self.faults():
            raise InputError(f"hexa::{op}: {fault}")

    def _check(self, op: str) -> None:
        """Sizes, types and devices."""
        for name, values in self.choices.items():
            if (value := getattr(self, name)) not in values:
                expected = " or ".join(map(repr, values))
                raise InputError(f"hexa::{op}: unknown {name} {value!r}; expected {expected}")
        for name in self.counts:
            if (count := getattr(self, name)) < 1:
                raise InputError(f"hexa::{op}: {name} is {count}; expected 1 or more")
        dtype = getattr(self, self.floating).dtype if self.floating else None
        if dtype is not None and dtype not in FLOATING:
            raise InputError(f"hexa::{op}: {self.floating} has dtype {dtype}; expected one of {FLOATING}")
        device, known = getattr(self, self.operands[0].name).device, dict[str, int]()
        for each in self.operands:
            t = getattr(self, each.name)
            if t is None and each.optional:
                continue
            allowed = _wide(dtype) if each.form.wide else (dtype,) if each.dtypes is None else each.dtypes
            if (allowed and t.dtype not in allowed) or t.device != device or not _fits(self, each, t, known):
                raise _refusal(op, self, each, dtype, known)


_accepted: set[tuple[Any, ...]] = set()
"""Kinds of calls whose operands fit together: a call of a few microseconds waits for the question."""
_MOST = 4096
_places: dict[tuple[Any, ...], list[int]] = {}
"""Of `Operands.to`, by the records and the names of other operands: a layer of a few microseconds waits for it."""


def _places_of(own: Sequence[str], more: Iterable[str], wanted: Sequence[str]) -> list[int]:
    """Places of the wanted ones among operands, others, which are preferred, and None."""
    found = {name: place for place, name in enumerate((*own, *more))}
    none = len(own) + len([*more])
    return [found.get(name, none) for name in wanted]


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
        dims, form = ", ".join(term.text for term in each.terms), each.form
        lies = f", as {form.layout} says" if form.layout else f", gathered by {form.by}" if form.by else ""
        optional = " or None" if kind == Tensor | None else ""
        said.append(f"    {field}: {form.says or 'floating '}({dims}){lies}{optional}")
    return "\n".join(said)
