"""Whose code it is: the user's and model libraries', or torch's, numpy's and Python's own, which counts as constant."""

from __future__ import annotations

import sys

_OTHERS = frozenset({"torch", "numpy", "hexa_fx", "einops", "builtins", "functorch", *sys.stdlib_module_names})


def is_users(module: str) -> bool:
    """Whether code of this Python module belongs to the user or to a model library."""
    return module.partition(".")[0] not in _OTHERS
