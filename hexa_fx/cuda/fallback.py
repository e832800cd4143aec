"""When an operator on CUDA runs torch's own operators instead of kernels: there is no compiler, or no kernel for its operands."""

from __future__ import annotations

import logging

from hexa_fx.codegen.spec import SpecError
from hexa_fx.errors import KernelError

log = logging.getLogger(__name__)

fallbacks: dict[str, str] = {}
"""Operators that fell back to another implementation in this process, and why. Each reason was logged."""

_permanent: set[str] = set()


class Unsupported(KernelError):
    """We have no kernel for these operands; the operator's generic implementation takes them."""


def record_fallback(name: str, error: KernelError) -> None:
    """Notes why an operator fell back. Unless only its operands were to blame, it does so from now on. A reason is said once."""
    reason = str(error)
    if name not in fallbacks:
        level = logging.DEBUG if reason in _permanent else logging.WARNING
        log.log(level, "hexa::%s falls back to torch's own operators: %s", name, reason)
    if not isinstance(error, Unsupported | SpecError):
        _permanent.add(reason)
    fallbacks[name] = reason


def some_fall_back_for_good() -> bool:
    """Whether some operator runs torch's implementation for good, because its kernels cannot be built."""
    return bool(_permanent)


def falls_back_for_good(name: str) -> bool:
    """Whether this one does."""
    return name in fallbacks and fallbacks[name] in _permanent
