"""Leaves what a rewritten forward computes beside its output: as attributes of modules, in lists, deques and dicts.

Users replace and clear such lists between steps (``model.losses = []``). A list is therefore looked up in every call, and what
was put into it is not kept here. If it is gone, or is something else now, the block's own code runs: it says what is to
happen, even if that is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hexa_fx.ir import Container, ContainerItem, Destination, ModuleCounter
from hexa_fx.isolation.contents import Holder
from hexa_fx.isolation.held_objects import MISSING, step
from hexa_fx.runtime.guards import GuardMiss


def check(module: nn.Module, destinations: Iterable[Destination]) -> None:
    """Raises `GuardMiss` if a list, deque or dict is not where it was, so that nothing is computed in vain."""
    for destination in destinations:
        if isinstance(destination, ContainerItem):
            _found(module, destination.container)


@contextmanager
def counted(module: nn.Module, destinations: Iterable[Destination]) -> Iterator[None]:
    """A context that takes counters further as it begins, as code mostly does: checkpointing ends a run early that it makes again.

    Where the run ends with a `GuardMiss`, the block's own code counts.
    """
    before = []
    for counter in destinations:
        if isinstance(counter, ModuleCounter):
            owner = module.get_submodule(counter.path)
            before.append((owner, counter.name, getattr(owner, counter.name)))
            setattr(owner, counter.name, counter.function(getattr(owner, counter.name), counter.by))
    try:
        yield
    except GuardMiss:
        for owner, name, value in before:
            setattr(owner, name, value)
        raise


def leave(module: nn.Module, destinations: Sequence[Destination], values: Sequence[Any]) -> None:
    """Sets, appends or inserts ``values``, in the order of the original."""
    for destination, value in zip(destinations, values):
        if isinstance(destination, ModuleCounter):
            continue
        if not isinstance(destination, ContainerItem):
            setattr(module.get_submodule(destination.path), destination.name, value)
            continue
        container = _found(module, destination.container)
        if destination.container.kind is dict:
            container[destination.key] = value
        else:
            container.append(value)


def values_left(module: nn.Module, destinations: Iterable[Destination]) -> tuple[Any, ...]:
    """What lies there after a run: the values of attributes, and None for what is in lists and dicts."""
    return tuple(
        None if isinstance(item, ContainerItem) else getattr(module.get_submodule(item.path), item.name)
        for item in destinations
    )


def shared_holders(module: nn.Module, destinations: Iterable[Destination]) -> Iterator[Holder]:
    """The lists, deques and dicts among ``destinations`` that are globals, each once. Those that are gone are left out."""
    containers = dict.fromkeys(item.container for item in destinations if isinstance(item, ContainerItem))
    for container in containers:
        if not container.is_global:
            continue
        try:
            yield Holder(str(container), _found(module, container))
        except GuardMiss:
            continue


def _found(module: nn.Module, container: Container) -> Any:
    try:
        holder: Any = sys.modules[container.root] if container.is_global else module.get_submodule(container.root)
    except (KeyError, AttributeError):
        raise GuardMiss(f"{container} is no longer there") from None
    for key in container.steps:
        holder = step(holder, key)
        if holder is MISSING:
            raise GuardMiss(f"{container} is no longer there")
    if type(holder) is not container.kind:
        raise GuardMiss(f"{container} was a {container.kind.__name__} and is now a {type(holder).__name__}")
    return holder
