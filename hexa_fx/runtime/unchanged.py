"""Checks that what a rewritten forward took from its module, besides parameters and inputs, is still the same.

A graph contains settings such as the number of experts per token and their activation as they were when the block was recorded.
If someone sets ``block.top_k``, appends an expert or replaces an activation later, the original forward runs instead, so that
nobody gets a stale result.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.compiler import is_compiling

from hexa_fx.ir import HeldValue
from hexa_fx.isolation.held_objects import MISSING, MODULE_STATE, PLAIN, is_collection, step
from hexa_fx.runtime.guards import HOOKS, GuardMiss
from hexa_fx.runtime.reads import methods_of_forward, read_by_forward

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_AGAIN = "call hexa_fx.undo_ and hexa_fx.optimize_ on the model to have it rewritten as it is now"


class Unchanged:
    """The plain attributes, small submodules and number of experts that a rewritten forward relies on.

    It watches the block and those modules in it that the graph reads instead of calling: the attributes that their code
    mentions, methods that were put on the instance, and what the recorded run read from objects that they hold
    (``self.config.top_k``). Globals and classes are not watched, and under a compiler nothing is.

    Args:
        block: the module as it was recorded; referenced weakly.
        called: paths of submodules that the graph calls, which always do what they currently do.
        stored: (path, name) of attributes that a forward sets.
        held: what the recorded runs read from objects that modules hold.
    """

    def __init__(
        self,
        block: nn.Module,
        called: Iterable[str],
        stored: Iterable[tuple[str, str]],
        held: Iterable[HeldValue] = (),
    ) -> None:
        modules = dict(_read(block, "", frozenset(called)))
        written = {*stored, ("", "forward")}
        self.kinds = tuple((path, type(module)) for path, module in modules.items() if path)
        self.patched = frozenset(path for path, module in modules.items() if "forward" in vars(module))
        self.attributes = tuple(
            (path, name, value)
            for path, module in modules.items()
            if type(module) is not nn.Linear and not isinstance(module, _CONTAINERS)
            for name, value in vars(module).items()
            if name not in MODULE_STATE
            and isinstance(value, PLAIN)
            and (path, name) not in written
            and (path in self.patched or name in read_by_forward(type(module)))  # type: ignore[arg-type]
        )
        self.methods = tuple(
            (path, name)
            for path, module in modules.items()
            if not isinstance(module, (nn.Linear, *_CONTAINERS)) and path not in self.patched
            for name in sorted(methods_of_forward(type(module)))  # type: ignore[arg-type]
            if name not in vars(module)
        )
        self.held = tuple(
            value for value in held if value.path in modules and (value.path, value.steps[0]) not in written
        )
        self.lengths = tuple((path, _length(m)) for path, m in modules.items() if isinstance(m, _CONTAINERS))
        self.bind(block)

    def bind(self, block: nn.Module) -> None:
        """Watches ``block`` from now on: the same one, or a copy that may still be incomplete."""
        self._block = weakref.ref(block)
        self._ready = False

    def check(self) -> None:
        """Raises `GuardMiss` if anything changed."""
        if is_compiling():
            return
        if not self._ready or not all(map(operator.is_, map(dict.get, self._above, self._names), self._holders)):
            self._resolve()  # resolved anew for another config object, which may hold the same values
        try:
            if list(map(dict.get, self._places, self._keys)) != self._values:
                raise GuardMiss(self._difference())
            if self._others and [step(*place) for place in self._others] != self._other_values:
                raise GuardMiss(self._difference())
        except (RuntimeError, ValueError):  # an attribute is a tensor or an array now
            raise GuardMiss(self._difference()) from None
        if self._lists and list(map(_length, self._lists)) != self._counts:
            raise GuardMiss(f"the number of modules in {self._other_length()!r} has changed; {_AGAIN}")
        if self._hooks and any(self._hooks):
            raise GuardMiss("an expert has hooks, which only its own code calls")

    def _resolve(self) -> None:
        block, self._ready = self._block(), False
        assert block is not None
        modules = {"": block, **{path: self._found(block, path, kind) for path, kind in self.kinds}}
        entries: list[tuple[str, dict[str, Any], str, Any]] = []
        for path, name, value in self.attributes:
            entries.append((f"{path}.{name}".lstrip("."), vars(modules[path]), name, value))
        for path, kind in self.kinds:
            owner, _, name = path.rpartition(".")
            if not any(True for _ in modules[path].parameters()):  # those with parameters are checked with these
                entries.append((path, modules[owner]._modules, name, modules[path]))
            if not kind.__module__.startswith("torch.") and path not in self.patched:
                entries.append((f"{path}.forward", vars(modules[path]), "forward", None))
        entries += [(f"{path}.{name}".lstrip("."), vars(modules[path]), name, None) for path, name in self.methods]
        self._resolve_held(modules, entries)
        self._labels = [entry[0] for entry in entries]
        self._places = [entry[1] for entry in entries]
        self._keys = [entry[2] for entry in entries]
        self._values = [entry[3] for entry in entries]
        self._lists = [modules[path] for path, _ in self.lengths]
        self._counts = [count for _, count in self.lengths]
        inner = [modules[path] for path, kind in self.kinds if not issubclass(kind, (*_CONTAINERS, nn.Linear))]
        self._hooks = [getattr(module, hooks) for module in inner for hooks in HOOKS]
        self._ready = True

    def _resolve_held(self, modules: dict[str, nn.Module], entries: list[tuple[str, dict[str, Any], str, Any]]) -> None:
        """Finds where held values lie, mostly in a dict; valid as long as the objects on the way are the same."""
        holders: dict[tuple[int, Any], tuple[dict[str, Any], Any, Any]] = {}
        places: dict[tuple[int, Any], HeldValue] = {}
        self._others: list[tuple[Any, Any]] = []
        self._other_labels: list[str] = []
        self._other_values: list[Any] = []
        for value in self.held:
            holder: Any = modules[value.path]
            for key in value.steps[:-1]:
                inside, above = step(holder, key), _dict_of(holder)
                if inside is MISSING:
                    raise GuardMiss(f"{str(value)!r} is no longer there; {_AGAIN}")
                if key in above:
                    holders[id(above), key] = (above, key, inside)
                holder = inside
            key, place = value.steps[-1], _dict_of(holder)
            if places.setdefault((id(holder), key), value).value != value.value:
                raise GuardMiss(f"{str(value)!r} changes from call to call")
            if places[id(holder), key] is not value:
                continue
            if key in place:
                entries.append((str(value), place, key, value.value))
            else:
                self._others.append((holder, key))
                self._other_labels.append(str(value))
                self._other_values.append(value.value)
        self._above = [above for above, _, _ in holders.values()]
        self._names = [key for _, key, _ in holders.values()]
        self._holders = [inside for _, _, inside in holders.values()]

    def _found(self, block: nn.Module, path: str, kind: type) -> nn.Module:
        try:
            module = block.get_submodule(path)
        except AttributeError:
            raise GuardMiss(f"there is no longer a submodule {path!r}; {_AGAIN}") from None
        if type(module) is not kind:
            raise GuardMiss(f"{path!r} was exchanged: a {_name(kind)} for a {_name(type(module))}; {_AGAIN}")
        return module

    def _difference(self) -> str:
        now_there = [*map(dict.get, self._places, self._keys), *(step(*place) for place in self._others)]
        labels, values = self._labels + self._other_labels, self._values + self._other_values
        for label, now, value in zip(labels, now_there, values):
            if now is not value and (type(now) is not type(value) or not _equal(now, value)):
                return f"{label!r} is not what it was when the block was rewritten; {_AGAIN}"
        return "an attribute is not what it was when the block was rewritten"

    def _other_length(self) -> str:
        pairs = zip(self.lengths, self._lists)
        return next(path for (path, count), module in pairs if _length(module) != count)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kinds", "patched", "attributes", "methods", "held", "lengths")}


def hooked(block: nn.Module, graph: torch.fx.Graph) -> str:
    """Path of a module that has hooks but that the graph reads instead of calling; empty if there is none."""
    inner = ((path, module) for path, module in _read(block, "", called_in(graph)) if path)
    return next((path for path, module in inner if any(getattr(module, hooks) for hooks in HOOKS)), "")


def called_in(*graphs: torch.fx.Graph) -> frozenset[str]:
    """Paths of the submodules that the graphs call."""
    return frozenset(str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_module")


def _equal(now: Any, value: Any) -> bool:
    try:
        return bool(now == value)
    except (RuntimeError, ValueError):  # a list of tensors or arrays now
        return False


def _dict_of(holder: Any) -> dict[Any, Any]:
    """The dict that holds an object's values; empty if there is none."""
    if is_collection(holder):
        return holder if isinstance(holder, dict) else {}
    return getattr(holder, "__dict__", None) or {}


def _length(container: nn.Module) -> int:
    return len(container._modules) + len(container._parameters)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _read(module: nn.Module, path: str, called: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """The block and those of its modules that are neither called nor inside one that is."""
    yield path, module
    for name, child in module._modules.items():
        below = f"{path}.{name}".lstrip(".")
        if child is not None and below not in called:
            yield from _read(child, below, called)
