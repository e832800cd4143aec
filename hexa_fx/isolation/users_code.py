"""Whose code it is: the user's and model libraries', or torch's, numpy's and Python's own, which counts as constant."""

from __future__ import annotations

import dis
import sys
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_OTHERS = frozenset({"torch", "numpy", "hexa_fx", "einops", "builtins", "functorch", *sys.stdlib_module_names})


@lru_cache(1 << 14)  # asked of all modules of the process in every recorded run
def is_users(module: str) -> bool:
    """Whether code of this Python module belongs to the user or to a model library."""
    return module.partition(".")[0] not in _OTHERS


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
