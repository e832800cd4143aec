"""Decisions that only say whether the code raises an error, as an ``assert`` does.

The recorded run went past them, and so do calls in earnest: what cannot be checked of one is no reason to refuse a block.
"""

from __future__ import annotations

import dis
import functools
import sys
from bisect import bisect_left
from collections.abc import Sequence
from types import CodeType, FrameType

from hexa_fx.capture.instructions import Instruction, instructions_of
from hexa_fx.isolation.users_code import module_name

_ENDS = ("STORE", "POP_TOP", "RETURN", "YIELD", "FOR_ITER", "RAISE")
_PASSED_THROUGH = ("torch", "hexa_fx.")


def only_raises() -> bool:
    """Whether the code asks for a value right now in a condition, of which one side is nothing but a ``raise``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and module_name(frame.f_globals).startswith(_PASSED_THROUGH):
        frame = frame.f_back
    if frame is None:
        return False
    code, errors = _conditions(frame.f_code)
    for found in code[bisect_left(code, frame.f_lasti, key=_offset) :]:
        if _is_condition(found):
            return found.offset in errors
        if found.opname.startswith(_ENDS):
            return False
    return False


@functools.lru_cache(maxsize=256)
def _conditions(code: CodeType) -> tuple[Sequence[Instruction], frozenset[int]]:
    """The instructions, and where among them the conditions lie that only say whether an error is raised, which none may catch."""
    found = list(instructions_of(code))
    caught = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    errors = set()
    for place, jump in enumerate(found):
        if _is_condition(jump) and not any(entry.start <= jump.offset < entry.end for entry in caught):
            ways = found[place + 1 :], found[bisect_left(found, jump.argval, key=_offset) :]
            errors |= {jump.offset} if any(map(_raises, ways)) else set()
    return found, frozenset(errors)


def _is_condition(found: Instruction) -> bool:
    return "JUMP" in found.opname and "IF" in found.opname


def _raises(way: Sequence[Instruction]) -> bool:
    end = next(
        (i.opname for i in way if "JUMP" in i.opname or i.opname.startswith(("RAISE", "RETURN", "FOR_ITER"))), ""
    )
    return end == "RAISE_VARARGS"


def _offset(found: Instruction) -> int:
    return found.offset
