"""A code object's instructions under the names of Python 3.11, whatever interpreter runs.

Later ones merge and rename some: 3.13 loads and stores two local variables at once, 3.14 borrows what it loads and subscripts by
``BINARY_OP``.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_SILENT = frozenset("CACHE PRECALL EXTENDED_ARG PUSH_NULL NOT_TAKEN TO_BOOL".split())


class Instruction(NamedTuple):
    """One operation, what it is about, and where in the code it lies."""

    opname: str
    argval: Any
    offset: int


def instructions_of(code: types.CodeType) -> Iterator[Instruction]:
    """The instructions of ``code``, without those of functions inside it and those that do nothing of their own."""
    for found in dis.get_instructions(code):
        if found.opname not in _SILENT:
            yield from plain(found.opname, found.argval, found.argrepr, found.offset)


def plain(opname: str, argval: Any, argrepr: str, offset: int) -> Iterator[Instruction]:
    """One instruction of any interpreter as those of 3.11."""
    if opname == "BINARY_OP" and argrepr == "[]":
        yield Instruction("BINARY_SUBSCR", argval, offset)
        return
    parts = (
        opname.replace("_BORROW", "").replace("_FAST_LOAD", "_FAST LOAD").replace("_FAST_STORE", "_FAST STORE").split()
    )
    values = argval if len(parts) == 2 and isinstance(argval, tuple) else [argval] * len(parts)
    for part, value in zip(parts, values):
        yield Instruction(part, value, offset)
