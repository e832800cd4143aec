"""Attributes that code puts on parameters and buffers, ``weight.scale`` say: torch tells of no read of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hexa_fx.isolation.users_code import is_users, module_name


@contextmanager
def missing_ones_noted(known: Mapping[int, Any], note: Callable[[torch.Tensor, str], Any]) -> Iterator[None]:
    """A context in which ``note`` is told of attributes that are not there when the user's code asks a tensor for them.

    Args:
        known: the tensors of interest, by id.
    """

    def __getattr__(tensor: torch.Tensor, name: str) -> Any:
        if id(tensor) in known and not name.startswith("__") and is_users(module_name(sys._getframe(1).f_globals)):
            note(tensor, name)
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    if hasattr(torch.Tensor, "__getattr__"):  # somebody else's, which says what there is
        yield
        return
    torch.Tensor.__getattr__ = __getattr__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.__getattr__  # type: ignore[attr-defined]


def present_ones(values: Iterable[Any], mention: Callable[[str], set[str]]) -> Iterator[tuple[torch.Tensor, str, str]]:
    """Tensors among ``values``, what was put on them that code mentions, and the modules whose code does."""
    for tensor in [value for value in values if isinstance(value, torch.Tensor)]:
        for name in vars(tensor):
            yield from ((tensor, name, scope) for scope in mention(name))
