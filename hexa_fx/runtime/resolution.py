"""Where the values that a recorded run read lie now, so that they can be compared again quickly."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hexa_fx.ir import PythonRead
from hexa_fx.isolation import torch_state
from hexa_fx.isolation.lookup import CALLED, Place, getattr_plain, lookup, own_names, place
from hexa_fx.isolation.module_tree import named_modules, rebuilds
from hexa_fx.isolation.read_values import Array, IsA, Keys, Names, alike
from hexa_fx.isolation.shadow import InPlace
from hexa_fx.isolation.users_code import is_users
from hexa_fx.runtime.decoding import is_switch_of_generate
from hexa_fx.runtime.guards import AGAIN, ON_A_STACK, GuardMiss, ReadMiss

_COPIES = (list, set, dict, deque, bytearray)


@dataclass(frozen=True)
class StandIn:
    """In place of the block, which keeps the checks and would never be freed if these kept it; ``name``: that of it in them."""

    name: str


BLOCK, OWN_DICT = StandIn("block"), StandIn("own")


class Resolution:
    """Where the values of ``reads`` lie in ``block`` now; ``bases[id(module)]`` counts in place of a module.

    Tensors have to be of the kind that was noted, and one of the ``other_names`` to stay the same object.

    The block itself and its ``__dict__`` are `BLOCK` and `OWN_DICT`.

    Raises:
        GuardMiss: one of them is not what was noted.
    """

    def __init__(
        self,
        block: nn.Module,
        reads: Sequence[PythonRead],
        packed: frozenset[str] = frozenset(),
        own_forward: Callable[..., Any] | None = None,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        bases: Mapping[int, nn.Module] = MappingProxyType({}),
        other_names: frozenset[str] = frozenset(),
    ) -> None:
        self.dicts: list[tuple[dict[Any, Any], Any, Any]] = []
        self.owners: list[tuple[Any, str, Any]] = []
        self.objects: list[tuple[Any, type]] = []
        self.counted: list[tuple[Any, int]] = []
        self.whole: list[tuple[Any, Any]] = []
        self.slow: list[tuple[Any, Any, Any]] = []
        self._bases, self._packed, self._other_names = bases, packed, other_names
        self._modules = {name: self._seen_through(m) for name, m in named_modules(block, every=True)}
        self._holders: dict[tuple[bool, str, tuple[Any, ...]], Any] = {}
        if own_forward is not None:  # in its place there is a rewritten one now
            self._holders[False, "", ("forward",)] = own_forward
        self._seen: dict[tuple[int, Any], Any] = {}
        self._entered: set[tuple[int, Any]] = set()
        self._through = {(read.is_global, read.root, read.steps[:-1]) for read in reads}
        for read in sorted(reads, key=lambda read: len(read.steps)):
            self._add(read)
        self.dtypes = [found for path, dtype in dtypes.items() if (found := self._of_dtype(path, dtype))]
        stand_ins = {id(block): BLOCK, id(getattr_plain(block)): OWN_DICT}
        lists: list[list[Any]] = [self.dicts, self.owners, self.objects, self.counted, self.whole, self.slow]
        for entries in lists:
            entries[:] = [tuple(stand_ins.get(id(item), item) for item in entry) for entry in entries]
        # what stays keeps no module alive that is in no place itself
        del self._modules, self._holders, self._seen, self._bases

    def _add(self, read: PythonRead) -> None:
        holder, key = self._at(read.is_global, read.root, read.steps[:-1]), read.steps[-1]
        if isinstance(read.value, Names):
            self._add_names(holder, key, read)
            return
        if (id(holder), key) in self._seen:
            if not _is_like(self._seen[id(holder), key], read.value):
                raise GuardMiss(f"{str(read)!r} changes from call to call")
            return
        own = _own_class(holder) if key == "__class__" else None
        if own is not None and alike(own, read.value):  # what was read of the class is looked up in this one
            self._holders[read.is_global, read.root, read.steps] = own
            return
        if key != "__class__" and _is_parametrized(holder) and _is_computed(holder, key, read.value):
            return
        found = place(holder, key)
        if isinstance(found.value, InPlace):  # on a module inside, for other calls: as its class has it
            found = Place(getattr(type(holder), key), found.dicts, type(holder))
        value = self._seen_through(found.value)
        self._seen[id(holder), key] = value
        if not _is_like(value, read.value) and not is_switch_of_generate(key, read.value, value):
            raise _miss(read, value)
        through = (read.is_global, read.root, read.steps) in self._through
        path = f"{read.root}.{key}".lstrip(".")
        if isinstance(found.value, torch.Tensor) and not through and path not in self._other_names:
            return
        if isinstance(found.value, nn.Module) and path in self._packed:
            return
        if key == "__class__":
            self.objects.append((holder, found.value))
        for where, value in found.dicts:
            self._enter(self.dicts, where, key, value)
        self._enter_registry(holder)
        if found.owner is not None:
            self._enter(self.owners, found.owner, key, found.value)
        if found.slow:
            exact = isinstance(read.value, (IsA, Keys))
            self.slow.append((holder, key, _Same(found.value) if exact else read.value))
        self._add_inside(read, value)

    def _seen_through(self, value: Any) -> Any:
        return self._bases.get(id(value), value) if self._bases else value

    def _add_inside(self, read: PythonRead, value: Any) -> None:
        """What the object at a place contains, or is."""
        if isinstance(value, nn.Module):
            self.objects.append((value, type(value)))
        elif isinstance(read.value, Array):
            self.slow.append((value, ..., read.value))
        elif isinstance(read.value, Keys) and not isinstance(value, tuple):
            self.counted.append((value, len(value)))
        elif type(value) in _COPIES:
            self.whole.append((value, read.value))

    def _add_names(self, module: Any, key: str, read: PythonRead) -> None:
        now = own_names(module) if key == "__dict__" else frozenset(vars(module)[key])
        if now != read.value.names:
            raise _miss(read, now)
        self._enter_registry(module)
        if key != "__dict__":
            self.counted.append((vars(module)[key], len(now)))
        else:
            self.slow.append((module, "__dict__", read.value))

    def _of_dtype(self, path: str, dtype: torch.dtype) -> tuple[dict[str, Any], str, torch.dtype] | None:
        """Where a parameter or buffer lies, and its dtype; nothing if it is no longer there, as under an adapter."""
        path_of_owner, _, name = path.rpartition(".")
        owner = self._modules.get(path_of_owner)
        registries = () if owner is None else (owner._parameters, owner._buffers, vars(owner))
        registry, now = next(((held, held[name]) for held in registries if held.get(name) is not None), ({}, None))
        if not isinstance(now, torch.Tensor):
            return None
        if now.dtype != dtype:
            raise GuardMiss(
                f"{path!r} is {now.dtype}; the block was recorded with {dtype}, which its code asks for; {AGAIN}"
            )
        return registry, name, dtype

    def _enter_registry(self, holder: Any) -> None:
        if isinstance(holder, nn.Module) and rebuilds(holder):
            self._enter(self.dicts, getattr_plain(holder), "_modules", holder._modules)

    def _enter(self, entries: list[tuple[Any, Any, Any]], where: Any, key: Any, value: Any) -> None:
        if (id(where), key) not in self._entered:
            self._entered.add((id(where), key))
            entries.append((where, key, value))

    def _at(self, is_global: bool, root: str, steps: tuple[Any, ...]) -> Any:
        """The object at the end of ``steps``."""
        place_of = (is_global, root, steps)
        if place_of not in self._holders:
            if steps:
                holder = self._at(is_global, root, steps[:-1])
                found = self._seen_through(lookup(holder, steps[-1]))
                found = getattr(type(holder), steps[-1]) if isinstance(found, InPlace) else found
            else:
                found = sys.modules.get(root) if is_global else submodule(self._modules, root)
            self._holders[place_of] = found
        return self._holders[place_of]


def _is_parametrized(holder: Any) -> bool:
    """As torch's, without the cost of an attribute that is nearly always missing."""
    return isinstance(holder, nn.Module) and "parametrizations" in holder._modules


def _is_computed(module: nn.Module, key: Any, noted: Any) -> bool:
    """Whether it is a weight of a parametrized module (PEFT's adapters on parameters, say).

    The rewritten forward reads the weight as the module's code does, so it gets what is computed now.
    """
    return bool(noted == IsA(torch.Tensor)) and is_parametrized(module, key)


def _own_class(holder: Any) -> type | None:
    """The class that torch has made another of for this instance: of a parametrized module, and of one that FSDP2 shards."""
    if _is_parametrized(holder):
        return type(holder).__bases__[0]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(holder, nn.Module) and type(holder).__bases__[0] is fsdp.FSDPModule:
        return type(holder).__bases__[1]
    return None


def _is_like(now: Any, noted: Any) -> bool:
    """Whether ``now`` is what was noted, or a function that the same ``def`` or ``lambda`` made, as one makes wrappers of several
    modules. What functions of the user's code keep is among the reads (`hexa_fx.isolation.read_values.keys_inside`), if anything.
    """
    if not (isinstance(now, FunctionType) and isinstance(noted, FunctionType) and is_users(noted.__module__ or "")):
        return alike(now, noted)
    alike_made = now.__code__ == noted.__code__ and now.__globals__ is noted.__globals__
    return alike_made and all(bool(getattr(now, name)) == bool(getattr(noted, name)) for name in _KEPT)


_KEPT = ("__defaults__", "__kwdefaults__", "__dict__")


class _Same:
    """Stands for an object that has to lie at a place."""

    def __init__(self, value: Any) -> None:
        self.value = value


def is_still(holder: Any, key: Any, value: Any) -> bool:
    if key is ...:
        return alike(holder, value)
    if isinstance(value, Names):
        return own_names(holder) == value.names
    now = lookup(holder, key)
    return now is value.value if isinstance(value, _Same) else alike(now, value)


def holds(block: nn.Module, reads: Sequence[PythonRead]) -> bool:
    """Whether ``block`` gives everything that was read as it was."""
    try:
        Resolution(block, reads)
    except GuardMiss:
        return False
    return True


def _miss(read: PythonRead, now: Any) -> GuardMiss:
    if isinstance(read.value, IsA) and issubclass(read.value.kind, nn.Module):
        if not isinstance(now, nn.Module):
            return GuardMiss(f"there is no longer a submodule {str(read)!r}; {AGAIN}")
        kinds = f"a {_name(read.value.kind)} for a {_name(type(now))}"
        on_a_stack = hasattr(now, "parameter_name") and getattr(now, "num_experts", 1) > 1
        return GuardMiss(f"{str(read)!r} was exchanged: {kinds}; {ON_A_STACK if on_a_stack else AGAIN}")
    return ReadMiss(f"torch.{read.steps[1]}()" if asks_torch(read) else str(read))


def asks_torch(read: PythonRead) -> bool:
    """Whether it is what a function says of a state of torch."""
    return read.root == torch_state.__name__ and read.steps[-1] == CALLED


def submodule(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """The module at ``path``, of those by name."""
    if path not in modules:
        raise GuardMiss(f"there is no longer a submodule {path!r}; {AGAIN}")
    return modules[path]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
