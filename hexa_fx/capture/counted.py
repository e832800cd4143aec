"""Counters that a block keeps for others: ``self.steps += 1`` and ``self.scale *= 0.99``, where nothing else reads the number."""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Iterator
from typing import Any

from hexa_fx.capture.instructions import instructions_of
from hexa_fx.capture.python_reads import PythonReads
from hexa_fx.capture.stored import Step

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_FUNCTIONS = {
    found.arg: function
    for sign, function in _SIGNS.items()
    for text in (f"a {sign} b", f"a {sign}= b")
    for found in dis.get_instructions(compile(text, "", "exec"))
    if found.opname == "BINARY_OP"
}


def step_of(reads: PythonReads, holder: Any, name: str, before: Any, now: Any, scopes: frozenset[str]) -> Step | None:
    """How an attribute came from one number to the next by the code of ``scopes``.

    None if anything else read it, or if no line of the code, or more than one, says how.
    """
    counts = type(before) is type(now) and type(now) in (int, float) and reads.edges.is_read_once(holder, name, scopes)
    found = {step for code in reads.ran.codes() for step in _steps(code, name)} if counts else set()
    if len(found) != 1:
        return None
    ((function, by),) = found
    return (function, by) if function(before, by) == now else None


@functools.lru_cache(maxsize=4096)
def _steps(code: types.CodeType, name: str) -> tuple[Step, ...]:
    return tuple(_found_steps(code, name))


def _found_steps(code: types.CodeType, name: str) -> Iterator[Step]:
    """Of ``holder.name += 1`` and ``holder.name = holder.name + 1``, with a number in the code."""
    instructions = list(instructions_of(code))
    for loaded, number, made, _, stored in zip(*(instructions[n:] for n in range(5))):
        of_name = (loaded.opname, loaded.argval, stored.opname, stored.argval) == (
            "LOAD_ATTR",
            name,
            "STORE_ATTR",
            name,
        )
        by_number = number.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and type(number.argval) in (int, float)
        if of_name and by_number and made.opname == "BINARY_OP" and made.argval in _FUNCTIONS:
            yield _FUNCTIONS[made.argval], number.argval
