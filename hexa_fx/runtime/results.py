"""Leaves what a rewritten forward computes beside its output: as attributes of modules and objects, in lists, deques and dicts.

Users replace and clear such lists between steps (``model.losses = []``). A list or object is therefore looked up in every call,
and what was put into it is not kept here. If it is gone, or is something else now, the block's own code runs: it says what is
to happen, even if that is an error.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from hexa_fx.ir import Container, ContainerItem, Destination, ModuleAttribute, ObjectAttribute
from hexa_fx.isolation.contents import Holder
from hexa_fx.isolation.lookup import MISSING, step
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.runtime.guards import GuardMiss


def check(module: nn.Module, destinations: Iterable[Destination]) -> None:
    """Raises `GuardMiss` if a list, deque, dict or object is not where it was, so that nothing is computed in vain."""
    for place in destinations:
        if isinstance(place, ContainerItem | ObjectAttribute):
            _found(module, place.container if isinstance(place, ContainerItem) else place.way)


def leave(module: nn.Module, destinations: Sequence[Destination], values: Sequence[Any]) -> None:
    """Sets, appends or inserts ``values``, in the order of the original."""
    for destination, value in zip(destinations, values):
        if not isinstance(destination, ContainerItem):
            _set(_owner(module, destination), destination.name, value)
            continue
        container = _found(module, destination.container)
        if destination.container.kind is dict:
            container[destination.key] = value
        else:
            container.append(value)


def values_left(module: nn.Module, destinations: Sequence[Destination]) -> tuple[Any, ...]:
    """What lies there after a run. What was appended to one list or deque is the last that it holds."""
    values, appended = list[Any](), Counter[Container]()
    for place in reversed(destinations):
        if not isinstance(place, ContainerItem):
            values.append(getattr(_owner(module, place), place.name))
            continue
        appended[place.container] += 1
        is_dict = place.container.kind is dict
        values.append(_found(module, place.container)[place.key if is_dict else -appended[place.container]])
    return tuple(reversed(values))


def state_of(module: nn.Module, stored: Iterable[Destination], changed: Sequence[str]) -> ModuleState:
    """What calls of a rewritten block may change, as it is now: where they put results, and named parameters that they write to."""
    return ModuleState(module, _shared_holders(module, stored), changed)


def _shared_holders(module: nn.Module, destinations: Iterable[Destination]) -> Iterator[Holder]:
    """The lists, deques, dicts and objects among ``destinations`` that modules need not hold, each once.

    These are globals, and objects. Those that are gone are left out.
    """
    places = list(destinations)
    containers = [item.container for item in places if isinstance(item, ContainerItem) and item.container.is_global]
    containers += [item.way for item in places if isinstance(item, ObjectAttribute)]
    for container in dict.fromkeys(containers):
        try:
            yield Holder(str(container), _found(module, container))
        except GuardMiss:
            continue


def _owner(module: nn.Module, place: ModuleAttribute | ObjectAttribute) -> Any:
    return module.get_submodule(place.path) if isinstance(place, ModuleAttribute) else _found(module, place.way)


def _set(owner: Any, name: str, value: Any) -> None:
    """What lies in an object lies there after its class has done with it, so that this is not asked again."""
    kind: Any = type(owner)
    if isinstance(owner, nn.Module) or kind.__setattr__ is object.__setattr__:
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


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
