"""What a recorded run writes to the terminal: a rewritten block would be silent. Lines of logs are left out, and that is said.

Only what is really written counts. ``if self.verbose: print(...)`` is a condition like any other, and a warning that Python shows
once has been shown by then.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hexa_fx.capture.started_functions import of_this_thread
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.users_code import is_users, module_name

LOGS = logging.Logger.handle.__code__
"""Runs for every record that is not filtered out by its level."""

logger = logging.getLogger(__name__)


@contextmanager
def noted_output(note: Callable[[str, types.FrameType], None]) -> Iterator[None]:
    """A context in which ``note`` is told what code of the user's writes with, and its frame, if this thread prints or warns."""
    before = {name: stream for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
    heard = {name: _Heard(stream, note) for name, stream in before.items()}
    for name, stream in heard.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in heard.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


def writer(frame: types.FrameType | None) -> tuple[str, types.FrameType] | None:
    """By what code of the user's writes and its frame, if that is whose code calls the standard library here; else None."""
    name = "print"
    while frame is not None:
        module = module_name(frame.f_globals)
        if module.partition(".")[0] not in sys.stdlib_module_names:
            return (name, frame) if is_users(module) else None
        name, frame = module.partition(".")[0], frame.f_back
    return None


@functools.lru_cache
def say_left_out(place: SourceLocation) -> None:
    """Says once of a line of the user's code that what it logs is left out."""
    logger.warning("%s logs in its calls; a block that is rewritten leaves the line out", place)


class _Heard:
    """A stream that tells of what is written to it."""

    def __init__(self, stream: Any, note: Callable[[str, types.FrameType], None]) -> None:
        self._stream, self._note = stream, of_this_thread(note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        if found := writer(sys._getframe(1)):
            self._note(*found)
        return self._stream.write(text)
