"""What the modules of a tree keep, saved before a trial run and put back after it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.lookup import REGISTRIES
from hexa_fx.isolation.module_tree import named_modules

_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


class ModuleSnapshot:
    """Attributes, buffers and hooks of all modules of a tree, as they are now.

    Values are saved of buffers, and of attributes that are tensors like them; not of parameters.
    Parameters, buffers and modules that a run registers under a new name stay: a first call registers them in any
    case, and a block is analysed as it is from then on.

    Args:
        root: of the tree.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = [module for _, module in named_modules(root)]
        self._kept = {id(module): _kept_by(module) for module in modules}
        # All dicts of all modules in one row, so that a look at whether anything changed is no loop of Python's.
        dicts = [held for kept in self._kept.values() for held in kept.dicts]
        self._empty = [held for held in dicts if not held]  # nearly all of those for hooks
        self._dicts = [*filter(None, dicts)]
        self._keys = [*map(tuple, self._dicts)]
        self._items = [*itertools.chain.from_iterable(map(dict.values, self._dicts))]
        buffers = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
        self._buffers = [buffer for buffer in buffers.values() if not _overlaps_itself(buffer)]
        self._held = [*{id(v): v for v in self.values() if type(v) is torch.Tensor and _is_store(v)}.values()]
        self.save_values()

    def save_values(self) -> None:
        """Of buffers and of tensors like them, as they are now."""
        self._values = [(buffer, buffer.detach().clone()) for buffer in self._buffers]
        self._stores = [(tensor, tensor.clone()) for tensor in self._held]

    def attributes(self, module: nn.Module) -> Mapping[str, Any]:
        """The ``__dict__`` that ``module`` had; empty if it was not in the tree."""
        kept = self._kept.get(id(module))
        return kept.attributes if kept else {}

    def buffers(self, module: nn.Module) -> Mapping[str, torch.Tensor | None]:
        """The buffers that ``module`` had, by name; empty if it was not in the tree."""
        kept = self._kept.get(id(module))
        return next((before for held, before in kept.registered if held is module._buffers), {}) if kept else {}

    def values(self) -> Iterator[Any]:
        """What the attributes of all modules were."""
        return itertools.chain.from_iterable(kept.attributes.values() for kept in self._kept.values())

    def changed(self) -> set[int]:
        """Ids of the modules with other attributes, hooks, parameters, buffers or modules, or with these in another order."""
        now = itertools.chain.from_iterable(map(dict.values, self._dicts))
        if (
            not any(self._empty)
            and [*map(tuple, self._dicts)] == self._keys
            and all(map(operator.is_, now, self._items))
        ):
            return set()
        return {number for number, kept in self._kept.items() if kept.is_changed()}

    def restore(self) -> bool:
        """Puts everything back, into the same objects: others may hold the buffers too, and handles of hooks their dicts.

        Returns whether no module had changed: then what is registered in the tree is what was.
        """
        changed = self.changed()
        for number in changed:
            self._kept[number].put_back()
        for buffer, value in self._values:
            fill(buffer, value)
        for tensor, value in self._stores:
            if not (is_like(tensor, value) and torch.equal(tensor, value)):
                fill(tensor, value)
        return not changed


@contextmanager
def restored(root: nn.Module) -> Iterator[ModuleSnapshot]:
    """A context at whose end everything is as it was. Yields what is saved."""
    snapshot = ModuleSnapshot(root)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def same_items(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two dicts hold the very same objects under the same keys in the same order."""
    if not now and not before:  # as most of torch's own dicts are
        return True
    return now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values()))


@dataclass(frozen=True)
class _Kept:
    """What one module keeps: its ``__dict__``, and what torch's own dicts in there contain."""

    module: nn.Module
    attributes: dict[str, Any]
    registered: list[tuple[dict[str, Any], dict[str, Any]]]
    hooks: list[dict[Any, Any]]
    hooked: list[tuple[dict[Any, Any], dict[Any, Any]]]
    """Those of ``hooks`` that had contents, with these. Copies of all the empty ones would take time."""

    @property
    def dicts(self) -> list[dict[Any, Any]]:
        """All that may change: the module's own, torch's in it, and those of hooks."""
        return [self.module.__dict__, *(held for held, _ in self.registered), *self.hooks]

    def is_changed(self) -> bool:
        """Whether one of them holds something else, or in another order."""
        if not same_items(self.module.__dict__, self.attributes):
            return True
        if not all(same_items(held, before) for held, before in self.registered):
            return True
        filled = [held for held in self.hooks if held]
        return len(filled) != len(self.hooked) or not all(same_items(held, before) for held, before in self.hooked)

    def put_back(self) -> None:
        own = self.module.__dict__
        if not same_items(own, self.attributes):
            for name in own.keys() - self.attributes.keys():
                del own[name]
            own.update(self.attributes)
        for registry, before in self.registered:
            if same_items(registry, before):
                continue
            for name in registry.keys() & own.keys():  # it was a plain attribute, such as None, which hides it now
                del registry[name]
            registry.update(before)
        # A model may install hooks of its own in its first call, and remember that it did: both are undone.
        for held in self.hooks if any(self.hooks) else ():
            held.clear()
        for held, contents in self.hooked:
            held.update(contents)


def _kept_by(module: nn.Module) -> _Kept:
    own = module.__dict__
    registries = _dicts(map(own.get, REGISTRIES))  # TorchScript has its own
    hooks = _dicts(map(own.get, _HOOKS))
    registered = [(held, dict(held)) for held in registries]
    return _Kept(module, dict(own), registered, hooks, [(held, dict(held)) for held in hooks if held])


def _dicts(values: Iterable[Any]) -> list[dict[Any, Any]]:
    """The dicts among them, without a call of Python's for each."""
    return [*filter(dict.__instancecheck__, values)]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after `expand`. Nothing can be written into such a tensor, by us or by a run."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())
    )


def _is_store(value: torch.Tensor) -> bool:
    """Whether it is a tensor that code may keep counts in, though it is no buffer: no result, and no view of anything."""
    if value.is_meta or value.layout is not torch.strided:
        return False
    return value.is_leaf and not value.requires_grad and value._base is None and not _overlaps_itself(value)


def is_like(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``value`` can be written into ``tensor`` as it is."""
    return (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)


def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor the numbers that it had."""
    if is_like(tensor, value):
        tensor.detach().copy_(value)
    else:  # resized, or cast through its data
        tensor.data = value.clone()
