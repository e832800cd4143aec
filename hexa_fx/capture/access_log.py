"""The ways in which a block's code can reach a list, deque or dict: from its modules and by global names."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hexa_fx.ir import Container
from hexa_fx.isolation.contents import contents
from hexa_fx.isolation.held_objects import MODULE_STATE, Steps, is_object, objects_in, step
from hexa_fx.isolation.users_code import module_name

KINDS = (list, deque, dict)
"""Of containers; their subclasses may do something else when something is added."""


@dataclass(frozen=True)
class AccessPath:
    """One path to a container: it is ``value``, and lies in ``parent`` under ``key``."""

    container: Container
    parent: dict[Any, Any]
    key: Any
    value: Any


def access_paths_to(wanted: set[int], block: nn.Module, namespaces: Iterable[dict[str, Any]]) -> Iterator[AccessPath]:
    """All ways to the containers with these ids that can be followed again in a later call.

    Those through lists and tuples, which shift, or through classes, whose instances may have their own, cannot.
    """
    if not wanted:
        return
    for path, module in block.named_modules():
        for steps, value in objects_in(module, lambda name: name not in MODULE_STATE):
            if id(value) in wanted:
                yield from _access(Container(path, steps, type(value)), module, value)
    for namespace in namespaces:
        python_module = sys.modules.get(module_name(namespace))
        if python_module is None or vars(python_module) is not namespace:
            continue
        for steps, value in _named(namespace):
            if id(value) in wanted:
                yield from _access(Container(python_module.__name__, steps, type(value), True), python_module, value)


def _named(namespace: dict[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """Global objects, and what lies right in them."""
    for name, value in list(namespace.items()):
        if name.startswith("__") or not is_object(value):
            continue
        yield (name,), value
        yield from (((name, key), inner) for key, inner in contents(value))


def _access(container: Container, holder: Any, value: Any) -> Iterator[AccessPath]:
    for key in container.steps[:-1]:
        holder = step(holder, key)
        if isinstance(holder, (list, tuple)):
            return
    parent, key = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {}), container.steps[-1]
    if parent.get(key) is value:
        yield AccessPath(container, parent, key, value)
