"""Argument structs of device code as the host packs them: fields by name, in the struct's order, from which its format follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A field, of so many numbers of a type as `struct` names it, or one pointer."""

    name: str
    code: str
    times: int


@dataclass(frozen=True)
class Args:
    """A struct: pointers first.

    Args:
        text: ``P x, y; q stride; i rows, columns; 2f constants``: types as `struct` has them ("P" pointer, "q" int64, "i" int32,
            "I" unsigned, "f" float, "d" double), with a number for fields of several, and fields as device code names them.
    """

    text: str

    def within(self, name: str) -> str:
        """The fields as those of a member of another struct."""
        groups = (group.split(maxsplit=1) for group in self.text.split(";"))
        return "; ".join(
            f"{kind} " + ", ".join(f"{name}.{each.strip()}" for each in names.split(",")) for kind, names in groups
        )

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """In order."""
        return tuple(self._parsed())

    def _parsed(self) -> Iterator[Field]:
        for group in self.text.split(";"):
            kind, names = group.split(maxsplit=1)
            yield from (Field(name.strip(), kind[-1], int(kind[:-1] or 1)) for name in names.split(","))

    @cached_property
    def layout(self) -> Struct:
        """The whole struct, in native alignment; a C++ struct is padded at its end."""
        return Struct("".join(f.code * f.times for f in self.fields) + "0P")

    @cached_property
    def _numbers(self) -> tuple[Struct, tuple[Field, ...]]:
        fields = tuple(f for f in self.fields if f.code != "P")
        return Struct("".join(f.code * f.times for f in fields) + "0P"), fields

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layout.size

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(f.name for f in self.fields)

    def piece(self, **given: Any) -> tuple[tuple[Any, ...], bytes]:
        """Pointers, and the numbers that follow them as they lie in memory. Fields that are not given are null or zero."""
        layout, numbers = self._numbers
        unknown = given.keys() - set(self.names)
        assert not unknown, f"no fields of the struct: {sorted(unknown)}"
        values: list[Any] = []
        for name, _, times in numbers:
            value = given.get(name, 0 if times == 1 else (0,) * times)
            values += [value] if times == 1 else value
        return tuple(given.get(f.name) for f in self.fields if f.code == "P"), layout.pack(*values)
