"""Whose code it is: the user's and model libraries', or torch's, numpy's, Python's own and of logging, which is constant."""

from __future__ import annotations

import dis
import sys
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_LOGGING = frozenset({"logging", "loguru", "structlog", "absl", "tqdm"})
"""Libraries that write lines for people, with locks, handlers and counters of their own."""
_OTHERS = frozenset(
    {"torch", "numpy", "hexa_fx", "einops", "builtins", "functorch", *_LOGGING, *sys.stdlib_module_names}
)


@lru_cache(1 << 14)  # asked of all modules of the process in every recorded run
def is_users(module: str) -> bool:
    """Whether code of this Python module belongs to the user or to a model library."""
    return module.partition(".")[0] not in _OTHERS


def logs(module: str) -> bool:
    """Whether a Python module belongs to a library that writes logs: what it keeps for that makes no difference to results."""
    return module.partition(".")[0] in _LOGGING


def module_name(namespace: Mapping[str, Any]) -> str:
    """Of the Python module whose globals these are."""
    return str(namespace.get("__name__", ""))


def raised_by_user(error: BaseException) -> bool:
    """Whether a ``raise`` or an ``assert`` of the user's code made an error; else an operation that it called failed."""
    if isinstance(error, AssertionError):
        return True
    for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return instruction == "RAISE_VARARGS" and is_users(module_name(frame.f_globals))
    return False
