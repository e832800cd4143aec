"""Whose code it is, and what code may do that no graph and no condition holds, told by what it calls: it is refused with its line.

Code of torch, numpy and the rest of the standard library gives the same for the same, or writes lines for people: it is constant.
"""

from __future__ import annotations

import datetime
import dis
import inspect
import random
import sys
import traceback
import types
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


def is_of_users(function: types.FunctionType) -> bool:
    """Whether a function is the user's, or wraps one that is: `functools.wraps` gives it the name of what it wraps."""
    return is_users(module_name(function.__globals__)) or is_users(function.__module__ or "")


def logs(module: str) -> bool:
    """Whether a Python module belongs to a library that writes logs: what it keeps for that makes no difference to results."""
    return module.partition(".")[0] in _LOGGING


def module_name(namespace: Mapping[str, Any]) -> str:
    """Of the Python module whose globals these are."""
    return str(namespace.get("__name__", ""))


def asking_frame(passed: tuple[str, ...]) -> types.FrameType | None:
    """The innermost frame that is not of these Python modules, or of those inside: of the code that asks something right now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and f"{module_name(frame.f_globals)}.".startswith(passed):
        frame = frame.f_back
    return frame


def raised_by_user(error: BaseException) -> bool:
    """Whether a ``raise`` or an ``assert`` of the user's code made an error; else an operation that it called failed."""
    if isinstance(error, AssertionError):
        return True
    for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return instruction == "RAISE_VARARGS" and is_users(module_name(frame.f_globals))
    return False


CLOCK, SYSTEM, RANDOM = "clock", "part of the system", "stream of random numbers"
LOOK_UP = "look-up of names"
HOOK, DATA, ATTRIBUTE = "hook", "memory of a tensor", "attribute of a tensor"
"""What code does to tensors that no graph shows."""
COLLECTIVE, NUMBER = "collective", "number of the run"
_KINDS = {
    CLOCK: "time",
    SYSTEM: "posix nt _io io genericpath pathlib glob shutil tempfile subprocess socket _socket uuid secrets platform resource sys "
    "threading _thread traceback hashlib _hashlib _md5 _sha1 _sha2 _sha3 _sha256 _sha512 _blake2 hmac zlib binascii base64 pickle "
    "_pickle struct _struct marshal",
}
_OF_MODULE = {module: kind for kind, modules in _KINDS.items() for module in modules.split()}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_SYSTEM = (hash, id, inspect.stack, inspect.currentframe)


def hidden_source(value: Any) -> str:
    """What kind of source a function or class is that the code calls, in words; empty if it is none."""
    if value is datetime.datetime or value is datetime.date:
        return CLOCK
    # No ==, which is recorded of a tensor.
    if any(value is each for each in _SYSTEM):
        return SYSTEM
    if is_stream(getattr(value, "__self__", None)) if callable(value) and not isinstance(value, type) else False:
        return RANDOM
    if not isinstance(value, _FUNCTIONS) or (value.__module__ == "time" and isinstance(value, type)):
        return ""
    return _OF_MODULE.get(str(value.__module__), "")


def is_stream(value: Any) -> bool:
    """Whether it draws random numbers from a state of its own; torch's default generators are the graph's."""
    if isinstance(value, random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.RandomState, numpy.random.Generator))
