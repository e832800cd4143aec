"""Tells of every Python function that starts in this thread, by a trace function, which is told of nothing else.

A profile function would be told of every return and of all C code too, which makes a recorded run three times as long.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias, TypeVar

Wanted: TypeAlias = Callable[[types.FrameType], bool]
"""Called with the frame of a function that starts; whether it wants to hear of the same code again."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def untold(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function of which nothing is told, nor of what it calls: a trace function makes all Python code twice as slow."""

    @functools.wraps(function)
    def silent(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        trace = sys.gettrace()
        if trace is None:
            return function(*args, **kwargs)
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(trace)

    return silent


@contextmanager
def told_of_starts(wanted: Wanted) -> Iterator[None]:
    """A context in which ``wanted`` is called for every function that starts."""
    left: dict[int, types.CodeType] = {}  # by id: hashing code reads all of it

    def started(frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if id(code) not in left and not wanted(frame):
            left[id(code)] = code

    before = sys.gettrace()
    sys.settrace(started)
    try:
        yield
    finally:
        sys.settrace(before)
