"""Attributes that code puts on tensors, ``weight.scale`` say: torch tells of no read of them, and of few that are set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hexa_fx.isolation.users_code import is_users, module_name


@contextmanager
def asked_and_set_ones_noted(
    known: Mapping[int, Any], note: Callable[[torch.Tensor, str], Any], note_set: Callable[[torch.Tensor, str], Any]
) -> Iterator[None]:
    """A context in which ``note`` is told of attributes that are not there when the user's code asks a tensor for them, and
    ``note_set`` of those that it sets.

    Args:
        known: the tensors of which it counts what is asked, by id.
    """

    def __getattr__(tensor: torch.Tensor, name: str) -> Any:
        if id(tensor) in known and not name.startswith("__") and is_users(module_name(sys._getframe(1).f_globals)):
            note(tensor, name)
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    def __setattr__(tensor: torch.Tensor, name: str, value: Any) -> None:
        if is_users(module_name(sys._getframe(1).f_globals)):
            note_set(tensor, name)
        object.__setattr__(tensor, name, value)

    methods = {method.__name__: method for method in (__getattr__, __setattr__)}
    ours = {name: method for name, method in methods.items() if name not in vars(torch.Tensor)}  # else somebody else's
    for name, method in ours.items():
        setattr(torch.Tensor, name, method)
    try:
        yield
    finally:
        for name in ours:
            delattr(torch.Tensor, name)


def present_ones(values: Iterable[Any], mention: Callable[[str], set[str]]) -> Iterator[tuple[torch.Tensor, str, str]]:
    """Tensors among ``values``, what was put on them that code mentions, and the modules whose code does."""
    for tensor in [value for value in values if isinstance(value, torch.Tensor)]:
        for name in vars(tensor):
            yield from ((tensor, name, scope) for scope in mention(name))
