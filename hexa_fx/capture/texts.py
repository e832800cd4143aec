"""Texts that code makes of tensors and their numbers: lines of logs mostly, but it may go by them."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from hexa_fx.isolation.users_code import module_name

_LOGS = frozenset("debug info warning warn error exception critical log".split())


def noted_text(text: str, used: Callable[[], None]) -> str:
    """A text that code makes of a number. Tells ``used`` that the code may go by it, unless that only goes to a logger: once it is
    a part of a longer text, nothing tells of what becomes of it.
    """
    if not _is_only_logged(sys._getframe(2)):
        used()
    return text


def _is_only_logged(frame: FrameType | None) -> bool:
    """Whether the text that code of the user's makes right now, in or above ``frame``, goes to a logger and nowhere else."""
    while frame is not None and module_name(frame.f_globals).startswith(("torch", "hexa_fx.")):
        frame = frame.f_back
    return frame is not None and any(start <= frame.f_lasti < end for start, end in _logged(frame.f_code))


@functools.lru_cache(maxsize=256)
def _logged(code: CodeType) -> tuple[tuple[int, int], ...]:
    return tuple(_found_logged(code))


def _found_logged(code: CodeType) -> Iterator[tuple[int, int]]:
    """Where calls like ``log.debug(...)`` lie in the code whose results nobody takes, their arguments included."""
    asked: dict[object, int] = {}
    for found, after in itertools.pairwise(i for i in dis.get_instructions(code) if i.opname != "CACHE"):
        begins = found.positions and (found.positions.lineno, found.positions.col_offset)
        if found.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            asked.pop(begins, None)
            if found.argval in _LOGS:
                asked[begins] = found.offset
        elif found.opname.startswith("CALL") and after.opname == "POP_TOP" and begins in asked:
            yield asked.pop(begins), found.offset
