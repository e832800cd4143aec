"""Texts that code makes of tensors and their numbers: lines for people mostly, but it may go by them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from hexa_fx.isolation.users_code import module_name

_FOR_PEOPLE = frozenset("print debug info warning warn error exception critical log write".split())


def noted_text(text: str, used: Callable[[], None]) -> str:
    """A text that code makes of a number. Tells ``used`` that the code may go by it, unless that code prints or logs something, as
    what is written for people is no result.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_name(frame.f_globals).startswith(("torch", "hexa_fx.")):
        frame = frame.f_back
    if frame is None or _FOR_PEOPLE.isdisjoint(frame.f_code.co_names):
        used()
    return text
