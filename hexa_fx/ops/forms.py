"""What an operand of a record has to be: its dtypes, its sizes, how it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
        wide: it has the accumulators' type, float32, or float64 for float64.
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
    """A buffer that the operator adds to, in the accumulators' type."""
    return Form(dims, layout=layout, written=True, wide=True)


def index(dims: str) -> Form:
    """As `hexa::reindex` makes it."""
    return exactly(torch.int32, dims)


class AtLeastOne:
    """Marks a number that is 1 or more."""


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
