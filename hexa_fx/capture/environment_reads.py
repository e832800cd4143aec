"""Notes what the user's code asks of the environment and of loggers while a block is recorded."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from hexa_fx.capture.started_functions import of_this_thread
from hexa_fx.contexts import attributes_set
from hexa_fx.isolation import logger_levels
from hexa_fx.isolation.lookup import Answer
from hexa_fx.isolation.users_code import is_users, module_name

Read: TypeAlias = Callable[[Any, Any], Any]
"""Notes that a key of an object is read, and returns what lies there."""
Wrote: TypeAlias = Callable[[str], None]
"""Notes that a variable is set or deleted, told as code spells it."""

_OF_ENVIRONMENT = frozenset({"os", "_collections_abc", "collections.abc"})


@contextmanager
def asking_noted(read: Read, wrote: Wrote) -> Iterator[None]:
    """A context in which environment variables and levels of loggers that the user's code asks for, or sets, are noted."""
    levels = {method: _of_level(method, read) for method in logger_levels.ANSWERS}
    with (
        _variables_noted("environ", read, wrote),
        _variables_noted("environb", read, wrote),
        attributes_set(logging.Logger, **levels),
    ):
        yield


def _variables_noted(name: str, read: Read, wrote: Wrote) -> AbstractContextManager[None]:
    """By an attribute of the object: after a thousand changes of a class Python 3.13 goes on with an earlier ``__getitem__``."""
    environment: Any = getattr(os, name, None)
    if not isinstance(environment, os._Environ):  # somebody put a dict there
        return nullcontext()
    return attributes_set(environment, encodekey=_of_environment(environment.encodekey, name, environment, read, wrote))


def _of_environment(
    plain: Callable[[Any], Any], name: str, environment: Any, read: Read, wrote: Wrote
) -> Callable[[Any], Any]:
    """What is called with the key of every variable that is looked up, set or deleted."""

    @of_this_thread
    def note(key: Any) -> None:
        read(os, name)
        read(environment, key)

    def encodekey(key: Any) -> Any:
        frame = sys._getframe(1)
        if _is_asked_by_user(frame):
            if frame.f_code.co_name == "__getitem__":
                note(key)
            else:
                wrote(f"os.{name}[{key!r}]")
        return plain(key)

    return encodekey


def _of_level(method: str, read: Read) -> Callable[..., Any]:
    """Where the code itself asks a logger what it would write; lines that it has written are no results.

    A logger that is registered under no name has the level of the next one above it that has one, unless logging is off.
    """
    plain = vars(logging.Logger)[method]

    @of_this_thread
    def note(logger: logging.Logger, *args: Any) -> None:
        if logger in (logging.root, logging.root.manager.loggerDict.get(logger.name)):
            read(read(read(logger_levels, "ANSWERS"), method), Answer((logger.name, *args)))
            return
        read(logger, "disabled")
        read(read(logger, "manager"), "_disable")
        holder: Any = logger
        while holder is not None:
            read(holder, "level")
            holder = read(holder, "parent")

    def asked(logger: logging.Logger, *args: Any) -> Any:
        if is_users(module_name(sys._getframe(1).f_globals)):
            note(logger, *args)
        return plain(logger, *args)

    return asked


def _is_asked_by_user(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in _OF_ENVIRONMENT:
        frame = frame.f_back
    return frame is not None and is_users(module_name(frame.f_globals))
