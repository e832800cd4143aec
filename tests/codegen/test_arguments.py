"""Argument structs: the host names the fields that device code has, in its order."""

import re
from pathlib import Path

import pytest

import hexa_fx.templates
from hexa_fx.codegen import family_names, get_family
from hexa_fx.codegen.family import PLACES, Args

TEMPLATES = Path(hexa_fx.templates.__path__[0])
HEADERS = "\n".join(path.read_text() for path in sorted(TEMPLATES.rglob("*.cuh")))
NUMBERS = {"int": "i", "unsigned": "I", "long long": "q", "float": "f", "double": "d"}
MEMBERS = {"Divisor": "3I", "ActParams": "2f"}


def struct(name: str) -> str:
    """The fields of a struct of device code, as `Args` names them."""
    base, body = re.findall(rf"struct {name}(?: : (\w+))? {{\n(.*?)\n}};", HEADERS, re.DOTALL)[0]
    found = [struct(base)] if base else []
    for declared in re.sub(r"//.*", "", body).split(";")[:-1]:
        kind, names = re.fullmatch(r"(?:const )?([\w ]+?\*?) (\w+(?:\[\d+\])?(?:, \w+)*)", declared.strip()).groups()  # type: ignore[union-attr]
        for field in map(str.strip, names.split(",")):
            field, _, count = field.partition("[")
            if kind.endswith("*"):
                found.append(f"P {field}")
            elif kind in NUMBERS:
                found.append(f"{count.rstrip(']')}{NUMBERS[kind]} {field}")
            else:
                kind = kind.replace("RowParams", "GemmParams")  # of a template
                found.append(f"{MEMBERS[kind]} {field}" if kind in MEMBERS else Args(struct(kind)).within(field))
    return "; ".join(found)


@pytest.mark.parametrize("name", family_names())
def test_fields_are_those_of_device_code(name: str) -> None:
    family = get_family(name)
    template = (TEMPLATES / family.template).read_text()
    (argument,) = set(re.findall(r"sizeof\((?:hexa::)?(\w+)(?:<.*?>)?\) == {{ args_bytes", template))
    assert family.args.fields == Args(struct(argument)).fields


def test_places_are_those_of_device_code() -> None:
    assert PLACES.fields == Args(struct("MatrixPlaces")).fields


def test_what_is_not_given_is_null_or_zero_and_what_is_unknown_is_refused() -> None:
    args = Args("P x, y; q stride; 2I by; f scale")
    pointers, numbers = args.piece(y="there", by=(3, 4), scale=0.5)
    assert pointers == (None, "there")
    assert args.layout.unpack(bytes(16) + numbers) == (0, 0, 0, 3, 4, 0.5)
    with pytest.raises(AssertionError, match=r"no fields of the struct: \['z'\]"):
        args.piece(z=1)
