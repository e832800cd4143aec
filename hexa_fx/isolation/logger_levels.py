"""What loggers say of their levels, by name: whether a line would be written, not which level makes it so."""

from __future__ import annotations

import logging


def is_enabled(name: str, level: int) -> bool:
    """Whether the logger of that name writes lines of a level."""
    return logging.getLogger(name).isEnabledFor(level)


def effective_level(name: str) -> int:
    """The level of the logger of that name, or of the next one above it that has one."""
    return logging.getLogger(name).getEffectiveLevel()


ANSWERS = {"isEnabledFor": is_enabled, "getEffectiveLevel": effective_level}
"""The functions that stand for methods of loggers."""
