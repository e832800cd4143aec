"""Finds many parameters of a block quickly at every forward, and notices when a module was replaced."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from operator import is_
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_compiling

from hexa_fx.ir import PackedWeight
from hexa_fx.isolation.module_tree import class_of, rebuilds, referenced
from hexa_fx.ops.listed import in_parts
from hexa_fx.runtime.guards import ADAPTED, AGAIN, HOOKS, GuardMiss, OwnCodeOnly

T = TypeVar("T")


def base_of(module: Any) -> Any:
    """What lies under a module of PEFT; any other module itself. By plain access, which a tracer follows."""
    held = module._modules
    return held["base_layer"] if "base_layer" in held else module  # noqa: SIM401  # TorchScript's has no `get`


def first_parameter(block: nn.Module, weight: PackedWeight) -> torch.Tensor | None:
    """The first of a stacked weight's parameters, under adapters too."""
    path, _, name = weight.parts[0][0].rpartition(".")
    found: torch.Tensor | None = base_of(block.get_submodule(path))._parameters.get(name)
    return found


MOVING = threading.RLock()
"""Held while a reader looks where everything lies, and while codes move into one storage: two first calls do not do so at once."""


class WeightReader:
    """One stacked weight of a block. Calling it returns the current one.

    It is no nn.Module, so that it appears in no ``state_dict`` and no ``named_*`` listing of the block that it is set on.

    The walk down the module tree to its parameters is done once. `check` compares every module on the way with the one that was
    there: an expert that was wrapped by an adapter (LoRA, say), or hooked, must not be read as if it were bare. The block, which
    owns this object, is referenced weakly.
    """

    def __init__(self, block: nn.Module, weight: PackedWeight) -> None:
        self.weight = weight
        self._bind(block)

    def _bind(self, block: nn.Module) -> None:
        self._block = weakref.ref(block)
        self.paths = tuple(tuple(path.split(".")) for part in self.weight.parts for path in part)
        self.see_through({})

    def see_through(self, bases: Mapping[int, nn.Module]) -> None:
        """Walks anew, and takes ``bases[id(module)]`` for a module that is there in place of a parameter's owner."""
        self._bases = bases
        self._ready = False
        self._children: list[nn.Module] = []
        self._kinds, self._classes = list[type](), list[type]()

    @property
    def block(self) -> nn.Module:
        return referenced(self._block)

    def check(self) -> None:
        """Raises `GuardMiss` if an expert was replaced, hooked, or made another class's."""
        if not self._ready:
            self._walk_once()
        if not all(map(is_, map(dict.get, self._holders, self._names_there), self._there)):
            with MOVING:
                # the modules that it is compared with, and their classes, stay those that were there first
                first, classes = self._children, self._classes
                self._walk()
                self._children, self._classes, self._kinds = first, classes, []
        if list(map(dict.get, self._parents, self._keys)) != self._children:
            raise GuardMiss(self._said_of_exchanged())
        if (kinds := list(map(type, self._children))) != self._kinds:
            for place, child, before in zip(self._passed, self._children, self._classes):
                if class_of(child) is not before:  # its code is not what was recorded
                    raise GuardMiss(f"{place!r} is a {type(child).__name__} now, and was a {before.__name__}; {AGAIN}")
            self._kinds = kinds
        if any(self._hooks):
            raise OwnCodeOnly("an expert has hooks, which only its own code calls")

    def tensors(self) -> list[torch.Tensor]:
        """The current parameters, in the order of the paths. Raises `GuardMiss` if one is gone, as by a parametrization."""
        if not self._ready:
            self._walk_once()
        found: list[Any] = list(map(dict.get, self._owners, self._names))
        if NoneType in map(type, found):
            gone = self.paths[[value is None for value in found].index(True)]
            raise GuardMiss(f"there is no longer a parameter {'.'.join(gone)!r}")
        return found

    def tensors_in_trace(self) -> list[torch.Tensor]:
        """As `tensors`, by plain attribute access all the way, which tracers can follow."""
        return [self.found_in_trace(path) for path in self.paths]

    def found_in_trace(self, path: Sequence[str]) -> torch.Tensor:
        """One of `tensors_in_trace`."""
        *modules, name = path
        owner: Any = self.block
        for key in modules:
            owner = getattr(owner, key)
        if is_compiling():
            owner = base_of(owner)
        elif self._bases:
            owner = self._bases.get(id(owner), owner)
        if name not in owner._parameters and name not in owner._buffers:
            raise GuardMiss("an expert's parameter is gone")
        found: torch.Tensor = getattr(owner, name)
        return found

    def _walk_once(self) -> None:
        with MOVING:
            if not self._ready:  # another thread may have walked meanwhile
                self._walk()

    def _walk(self) -> None:
        edges: dict[tuple[int, str], tuple[str, dict[str, Any], str, nn.Module]] = {}
        owners: dict[int, nn.Module] = {}
        passed: dict[int, nn.Module] = {}
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        for *modules, name in self.paths:
            owner = self.block
            for depth, key in enumerate(modules, 1):
                child = owner._modules.get(key)
                if child is None:
                    raise GuardMiss(f"there is no submodule {key!r} on the way to {'.'.join([*modules, name])!r}")
                edges[id(owner), key] = (".".join(modules[:depth]), owner._modules, key, child)
                passed[id(owner)], owner = owner, child
            if id(owner) in self._bases:
                base = self._bases[id(owner)]
                edges[id(owner), ""] = (".".join(modules), owner._modules, "base_layer", base)
                owner = base
            owners[id(owner)] = owner
            listed: Any = owner._parameters if name in owner._parameters else owner._buffers
            self._owners.append(listed)
            self._names.append(name)
        self._passed = [place for place, _, _, _ in edges.values()]
        self._parents = [parent for _, parent, _, _ in edges.values()]
        self._keys = [key for _, _, key, _ in edges.values()]
        self._children = [child for _, _, _, child in edges.values()]
        # The rewritten graph may call the container of the experts, and then calls its hooks too.
        inner = [owner for owner in owners.values() if owner is not self.block]
        self._hooks = [getattr(owner, hooks) for hooks in HOOKS for owner in inner]
        # Code that drops all hooks puts new dicts in their place, and later hooks come into those; one kind tells.
        lasting = [(vars(owner), HOOKS[0]) for owner in inner]
        lasting += [(vars(owner), "_modules") for owner in passed.values() if rebuilds(owner)]
        self._holders, self._names_there = [held for held, _ in lasting], [name for _, name in lasting]
        self._there = list(map(dict.get, self._holders, self._names_there))
        self._kinds, self._classes = list(map(type, self._children)), list(map(class_of, self._children))
        self._ready = True

    def owner_of(self, path: Sequence[str]) -> nn.Module:
        """The module that holds the parameter."""
        owner = self.block.get_submodule(".".join(path[:-1]))
        return self._bases.get(id(owner), owner)

    def reads_exchanged(self) -> bool:
        """Whether an expert was replaced, taken out or made another class's since the weight was first read."""
        try:
            if self._ready:
                self.check()
        except OwnCodeOnly:  # it is hooked
            return False
        except GuardMiss:
            return True
        return False

    def _said_of_exchanged(self) -> str:
        edges = zip(self._passed, self._parents, self._keys, self._children)
        place, now = next(
            ((place, parent.get(key)) for place, parent, key, child in edges if parent.get(key) is not child),
            (self._passed[0], None),  # as many as there were are no longer passed on the way
        )
        if now is not None and base_of(now) is not now:
            kind = f"{type(now).__module__}.{type(now).__name__}"
            return f"{place!r} is under an adapter since the block was rewritten ({kind}); {ADAPTED}"
        return f"the submodule {place!r} was exchanged after the block was rewritten; {AGAIN}"

    def in_parts(self, tensors: Sequence[T]) -> list[Sequence[T]]:
        """What is in the order of the paths as parts of the weight, each of all experts."""
        return in_parts(tensors, len(self.weight.parts[0]))

    def __getstate__(self) -> dict[str, Any]:
        return {"weight": self.weight, "block": self.block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]
        self._bind(state["block"])
