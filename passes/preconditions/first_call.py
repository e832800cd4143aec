"""A block as its first call leaves it: what code sets up then and reads later, such as a cache, is there in every other call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.isolation.module_snapshot import restored
from hexa_fx.isolation.module_tree import modules_of
from hexa_fx.isolation.sandbox import Sandbox
from hexa_fx.isolation.written_tensors import tensors_restored

log = logging.getLogger(__name__)

_Place: TypeAlias = tuple[int, str]
_Kept: TypeAlias = dict[_Place, tuple[dict[str, Any], Any]]
"""What modules hold, by module and name: the dict that it lies in, and what lies there."""


@contextmanager
def set_up(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[bool]:
    """A context in which modules of the block hold what a call sets and later calls leave alone. Gives whether there is any."""
    found: _Kept = {}
    try:
        found = _left_alone(block, args, kwargs)
    except Exception as error:
        log.debug("%s raises in a call of its own: %s", type(block).__name__, error)
    with restored(block):
        for (_, name), (holder, value) in found.items():
            holder[name] = value
        yield bool(found)


def _left_alone(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kept:
    """What the first call set and the second one did not; nothing if gradients are to go through it."""
    effects = Sandbox(block)
    with tensors_restored(block, effects.restore), restored(block):
        try:
            before, first, second = (_called(block, args, kwargs, times) for times in (0, 1, 1))
        finally:
            effects.restore()
    same = {place: kept for place, kept in first.items() if place in second and kept[1] is second[place][1]}
    found = {place: kept for place, kept in same.items() if place not in before or kept[1] is not before[place][1]}
    leaves = pytree.tree_leaves([value for _, value in found.values()])
    return {} if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves) else found


def _called(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], times: int) -> _Kept:
    """What modules hold after so many calls."""
    for _ in range(times):
        with torch.enable_grad():
            given_args, given_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            block(*given_args, **given_kwargs)
    held = ((id(module), holder) for module in modules_of(block) for holder in (module.__dict__, module._buffers))
    return {(module, name): (holder, value) for module, holder in held for name, value in holder.items()}
