"""Notes what the user's code asks of the environment and of loggers while a block is recorded."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from hexa_fx.isolation.users_code import is_users

Read: TypeAlias = Callable[[Any, Any], Any]
"""Notes that a key of an object is read, and returns what lies there."""

_OF_ENVIRONMENT = frozenset({"os", "_collections_abc", "collections.abc"})
_OF_LEVELS = ("isEnabledFor", "getEffectiveLevel")


@contextmanager
def asking_noted(read: Read) -> Iterator[None]:
    """A context in which environment variables and levels of loggers that the user's code asks for are noted."""
    kinds: dict[type, dict[str, Callable[..., Any]]] = {
        os._Environ: {"__getitem__": _of_environment(os._Environ.__getitem__, read)},
        logging.Logger: {name: _of_level(getattr(logging.Logger, name), read) for name in _OF_LEVELS},
    }
    before = {kind: {name: vars(kind)[name] for name in noting} for kind, noting in kinds.items()}
    try:
        for kind, noting in kinds.items():
            for name, function in noting.items():
                setattr(kind, name, function)
        yield
    finally:
        for kind, plain in before.items():
            for name, function in plain.items():
                setattr(kind, name, function)


def _of_environment(plain: Callable[..., Any], read: Read) -> Callable[..., Any]:
    def __getitem__(environment: Any, key: str) -> Any:
        if _is_asked_by_user(sys._getframe(1), _OF_ENVIRONMENT):
            read(os, "environ")
            read(os.environ, key)
        return plain(environment, key)

    return __getitem__


def _of_level(plain: Callable[..., Any], read: Read) -> Callable[..., Any]:
    """A logger has the level of the next one above it that has one, unless logging is off."""

    def asked(logger: logging.Logger, *args: Any) -> Any:
        if _is_asked_by_user(sys._getframe(1), frozenset()):
            read(logger, "disabled")
            read(read(logger, "manager"), "_disable")
            holder: Any = logger
            while holder is not None:
                read(holder, "level")
                holder = read(holder, "parent")
        return plain(logger, *args)

    return asked


def _is_asked_by_user(frame: types.FrameType | None, between: frozenset[str]) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    return frame is not None and is_users(str(frame.f_globals.get("__name__")))
