"""The check of a record's operands, written out as a function of its own: a small layer is checked in less time than it takes to
interpret what its operands have to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hexa_fx.errors import InputError
from hexa_fx.ops.forms import FLOATING, Operand, Term, shape


def check_of(
    fields: Sequence[str],
    operands: Sequence[Operand],
    choices: Mapping[str, tuple[str, ...]],
    counts: Sequence[str],
) -> Callable[[Any, str], None]:
    """A function of a record and the operator's name, which raises `InputError` unless the operands fit together.

    Args:
        fields: of the record.
        operands: those that are tensors of a form.
        choices: fields that have some values only.
        counts: fields that are 1 or more.
    """
    scope: dict[str, Any] = {"FLOATING": FLOATING, "refusal": _refusal, "InputError": InputError, "operands": operands}
    scope |= {"single": torch.float32, "double": torch.float64}
    scope |= {f"dtypes{n}": each.dtypes for n, each in enumerate(operands)}
    lines = ("def check(o, op):", f"{', '.join(fields)}, = o", *_of_values(choices, counts), *_of_tensors(operands))
    exec("\n ".join(lines), scope)
    check: Callable[[Any, str], None] = scope["check"]
    return check


def _of_values(choices: Mapping[str, tuple[str, ...]], counts: Sequence[str]) -> Iterator[str]:
    for name, values in choices.items():
        expected = " or ".join(map(repr, values))
        yield f'if {name} not in {values}: raise InputError(f"hexa::{{op}}: unknown {name} {{{name}!r}}; expected {expected}")'
    for name in counts:
        yield f'if {name} < 1: raise InputError(f"hexa::{{op}}: {name} is {{{name}}}; expected 1 or more")'


def _of_tensors(operands: Sequence[Operand]) -> Iterator[str]:
    first = next((each.name for each in operands if each.dtypes is None), None)
    if first is not None:
        yield f"dtype = {first}.dtype"
        expected = f"has dtype {{dtype}}; expected one of {FLOATING}"
        yield f'if dtype not in FLOATING: raise InputError(f"hexa::{{op}}: {first} {expected}")'
    for each in operands[:1]:
        yield f"device = {each.name}.device"
    known: dict[str, bool] = {}  # by symbol, whether it may be unknown
    later = {symbol for each in operands if each.optional for symbol, *_ in each.terms}
    yield from (f"size_{symbol} = None" for symbol in later if symbol.isidentifier())
    for number, each in enumerate(operands):
        indent = ""
        if each.optional:
            yield f"if {each.name} is not None:"
            indent = " "
        yield from (indent + line for line in _of_operand(number, each, known))
    yield 'if fault := o.faults(): raise InputError(f"hexa::{op}: {fault}")'


def _of_operand(number: int, each: Operand, known: dict[str, bool]) -> Iterator[str]:
    name, refused = each.name, f"raise refusal(op, operands, {number}, locals())"
    if each.dtypes is None:
        yield f"if {name}.dtype is not dtype: {refused}"
    elif each.form.wide:
        yield "wide = double if dtype is double else single"
        yield f"if {name}.dtype is not wide: {refused}"
    elif each.dtypes:
        yield f"if {name}.dtype not in dtypes{number}: {refused}"
    if number:
        yield f"if {name}.device != device: {refused}"
    if not each.terms:
        return
    yield f"sizes = {f'({name}.numel(),)' if each.form.flat else f'{name}.shape'}"
    yield f"if len(sizes) != {len(each.terms)}: {refused}"
    places = [f"s{n}" for n in range(len(each.terms))]
    yield f"{', '.join(places)}, = sizes"
    if each.form.layout:
        *_, row, column = places
        yield f"if {each.form.layout} == 'kn': {row}, {column} = {column}, {row}"
    for place, (symbol, per, plus, _) in zip(places, each.terms):
        size = f"({place} - {plus})" if plus else place
        size += f" * {per}" if per > 1 else ""
        if each.form.by and place == "s0":
            size += f" * (1 if {each.form.by} is None else top_k)"
        if not symbol.isidentifier():
            value = f"o.{symbol.removeprefix('.')}" if symbol.startswith(".") else symbol
            yield f"if {size} != {value}: {refused}" if symbol else "pass"
        elif symbol not in known:
            known[symbol] = each.optional
            yield f"size_{symbol} = {size}"
        elif known[symbol]:
            known[symbol] = each.optional
            yield f"if size_{symbol} is None: size_{symbol} = {size}"
            yield f"elif {size} != size_{symbol}: {refused}"
        else:
            yield f"if {size} != size_{symbol}: {refused}"


def _refusal(op: str, operands: Sequence[Operand], number: int, given: dict[str, Any]) -> InputError:
    """What is said of an operand that does not fit; given: the fields, and the sizes that are known."""
    each, first, t = operands[number], operands[0], given[operands[number].name]
    if t.device != given["device"]:
        return InputError(f"hexa::{op}: {each.name} is on {t.device}, {first.name} on {given['device']}")
    if each.dtypes is None and t.dtype != given["dtype"]:
        floating = next(other.name for other in operands if other.dtypes is None)
        mixed = f"{floating} is {given['dtype']} but {each.name} is {t.dtype}"
        return InputError(f"hexa::{op}: {mixed}; cast one of them, or run under torch.autocast")
    gathered = bool(each.form.by) and given[each.form.by] is not None
    said = [_size(term, given) if number or not gathered else term.text for number, term in enumerate(each.terms)]
    if each.form.layout and given[each.form.layout] == "kn":
        *lead, row, column = said
        said = [*lead, column, row]
    expected = f"{said[0]} numbers" if each.form.flat else f"({', '.join(said)}{',' * (len(said) == 1)})"
    beside = "" if first is each else f" beside {first.name} {shape(given[first.name])}"
    if gathered:
        beside += f", {given['top_k']} rows of {each.form.by} {shape(given[each.form.by])} for each"
    says = f"{given['wide']} " if each.form.wide else each.form.says
    return InputError(f"hexa::{op}: {each.name} is {shape(t)}; expected {says}{expected}{beside}")


def _size(term: Term, given: dict[str, Any]) -> str:
    symbol, per, plus, text = term
    known = getattr(given["o"], symbol.removeprefix(".")) if symbol.startswith(".") else given.get(f"size_{symbol}")
    return text if known is None else str(known // per + plus)
