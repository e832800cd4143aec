"""Tells of every Python function that starts in this thread, at little cost for those that nobody wants to hear of again.

By `sys.monitoring`, which forgets code that was disabled; before Python 3.12 by a trace function. A profile function would be told
of every return and of all C code too, which makes a recorded run three times as long.
"""

from __future__ import annotations

import functools
import sys
import threading
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


def of_this_thread(function: Callable[Parameters, object]) -> Callable[Parameters, None]:
    """A function that does nothing when another thread calls it, such as one that draws a progress bar or loads data."""
    thread = threading.get_ident()

    @functools.wraps(function)
    def here(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        if threading.get_ident() == thread:
            function(*args, **kwargs)

    return here


@contextmanager
def told_of_starts(wanted: Wanted) -> Iterator[None]:
    """A context in which ``wanted`` is called for every function that starts."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = next((n for n in range(6) if monitoring.get_tool(n) is None), None) if monitoring else None
    if tool is None:
        before = sys.gettrace()
        sys.settrace(_tracing(wanted))
        try:
            yield
        finally:
            sys.settrace(before)
        return
    starts, resumes = monitoring.events.PY_START, monitoring.events.PY_RESUME
    thread = threading.get_ident()

    def started(code: types.CodeType, offset: int) -> Any:
        heard = threading.get_ident() != thread or wanted(sys._getframe(1))
        return None if heard else monitoring.DISABLE

    monitoring.use_tool_id(tool, __name__)
    try:
        for event in (starts, resumes):
            monitoring.register_callback(tool, event, started)
        monitoring.restart_events()  # what an earlier run did not want to hear of
        monitoring.set_events(tool, starts | resumes)
        yield
    finally:
        monitoring.set_events(tool, 0)
        # Python 3.12 and 3.13 keep the callbacks of a tool that is freed, and all they refer to
        for event in (starts, resumes):
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


def _tracing(wanted: Wanted) -> Callable[[types.FrameType, str, Any], None]:
    left: dict[int, types.CodeType] = {}  # by id: hashing code reads all of it

    def started(frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if id(code) not in left and not wanted(frame):
            left[id(code)] = code

    return started
