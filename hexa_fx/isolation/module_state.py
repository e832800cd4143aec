"""What a module tree keeps besides its parameters: to start every call from the same state, and to compare what calls leave."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.contents import Contents, Holder, contents, held_by_modules, is_as
from hexa_fx.isolation.lookup import MISSING, REGISTRIES, is_data
from hexa_fx.isolation.module_tree import named_modules, named_tensors
from hexa_fx.isolation.size import stored

_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_SMALL = 1 << 16


class ModuleSnapshot:
    """Attributes, buffers and hooks of all modules of a tree, as they are now.

    Values are saved of buffers, and of attributes that are tensors like them, small arrays or generators; not of parameters.
    Parameters, buffers and modules that a run registers under a new name stay: a first call registers them in any
    case, and a block is analysed as it is from then on.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module for _, module in named_modules(root)]
        holders = [Holder("", held, grows=True) for module in self._modules for held in _dicts_at(module, REGISTRIES)]
        others = ((vars(module), *_dicts_at(module, _HOOKS)) for module in self._modules)
        holders += [Holder("", held) for held in itertools.chain.from_iterable(others)]
        self._contents = Contents(holders)
        self._before: dict[int, dict[Any, Any]] = {id(held): held.copy() for _, held, _ in holders if held}
        buffers = {id(b): b for module in self._modules for b in module._buffers.values() if b is not None}
        values = [*self.values()]
        held = {id(v): v for v in values if type(v) is torch.Tensor and _is_store(v)}
        self._values = [(b, b.detach().clone()) for b in buffers.values() if not _overlaps_itself(b)]
        self._stores = [(tensor, tensor.detach().clone()) for tensor in held.values()]
        arrays = sys.modules["numpy"].ndarray if "numpy" in sys.modules else ()
        self._arrays = [(v, v.copy()) for v in values if isinstance(v, arrays) and v.size <= _SMALL]
        self._generators = [(v, v.get_state()) for v in values if isinstance(v, torch.Generator)]
        self._without_graph = [t for t, _ in (*self._values, *self._stores) if not t.requires_grad and t._base is None]

    def before(self, held: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a module's ``__dict__`` or registry held; nothing if the module was not in the tree."""
        return self._before.get(id(held), {})

    def values(self) -> Iterator[Any]:
        """What the attributes of all modules were."""
        return itertools.chain.from_iterable(self.before(vars(module)).values() for module in self._modules)

    def changed(self) -> set[int]:
        """Ids of the modules with other attributes, hooks, parameters, buffers or modules, or with these in another order."""
        return self._modules_of(self._contents.changed())

    def _modules_of(self, holders: list[Holder]) -> set[int]:
        dicts = {id(holder.value) for holder in holders}
        modules = self._modules if dicts else ()
        return {id(module) for module in modules if not dicts.isdisjoint(map(id, _dicts_of(module)))}

    def restore(self) -> bool:
        """Puts everything back, into the same objects: others may hold the buffers too, and handles of hooks their dicts.

        Returns whether no module had changed: then what is registered in the tree is what was.
        """
        # A model may install hooks of its own in its first call, and remember that it did: both are undone.
        changed = self._modules_of(self._contents.restore())
        for own, module in ((vars(module), module) for module in self._modules if id(module) in changed):
            for registry in _dicts_at(module, REGISTRIES):
                # was a plain attribute, such as None, which hides it now
                for name in (registry.keys() & own.keys()) - self.before(registry).keys():
                    del registry[name]
        for generator, state in self._generators:
            generator.set_state(state)
        for array, value in self._arrays:
            if array.shape == value.shape and array.flags.writeable:
                array[...] = value
        for tensor in self._without_graph:
            if tensor.requires_grad:  # a run wrote to it what depends on parameters
                tensor.detach_()
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


def _dicts_of(module: nn.Module) -> list[dict[Any, Any]]:
    """All that may change: the module's own dict, torch's in it, and those of hooks."""
    return [module.__dict__, *_dicts_at(module, REGISTRIES), *_dicts_at(module, _HOOKS)]


def _dicts_at(module: nn.Module, names: Iterable[str]) -> list[dict[Any, Any]]:
    """The dicts among attributes of a module, of which TorchScript has others, without a call of Python's for each."""
    held: Iterable[Any] = map(module.__dict__.get, names)
    return [*filter(dict.__instancecheck__, held)]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after `expand`. Nothing can be written into such a tensor, by us or by a run."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())
    )


def _is_store(value: torch.Tensor) -> bool:
    """Whether it is a tensor that code may keep counts or losses in, though it is no buffer: no large result, weight or view."""
    if value.is_meta or value.layout is not torch.strided:
        return False
    counts = value.is_leaf and not value.requires_grad and value._base is None
    return not _overlaps_itself(value) and (counts or value.numel() <= _SMALL)


def is_like(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``value`` can be written into ``tensor`` as it is."""
    return (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)


def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor the numbers that it had."""
    if is_like(tensor, value):  # a result that nobody wrote to may hold NaN, and its graph goes by its version
        (tensor.detach() if tensor.grad_fn is None else tensor.data).copy_(value)
    else:  # resized, or cast through its data
        tensor.data = value.clone()


_PLAIN = (torch.Tensor, int, float, str)


@dataclass(frozen=True)
class KeptState:
    """What a module tree keeps after a call.

    Args:
        tensors: copies of all buffers, changed parameters, tensor attributes and tensors in lists and dicts that changed, by dotted
            name.
        facts: plain attributes by dotted name.
        fresh: tensors that were set as attributes or put into lists and dicts since `ModuleState.restore`, ordered by name.
    """

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    fresh: list[torch.Tensor]


class ModuleState:
    """What a module tree keeps besides the values of most parameters, so that every call starts from the same state.

    That a forward changed a parameter shows in `hexa_fx.isolation.outcome.Outcome.facts`.

    Args:
        module: the root of the tree.
        shared: lists, dicts and objects outside of it whose contents count too.
        changed: names of parameters that forwards write to, which count like buffers.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Holder] = (), changed: Sequence[str] = ()) -> None:
        self._module, self._named = module, named_modules(module)
        self._snapshot = ModuleSnapshot(module)
        # These are listed always: in its own dtype one run may set to what it was what another one changes.
        self._shared = [*shared]
        self._contents = Contents([*held_by_modules(module), *self._shared])
        kinds = {kind for kind in {*map(type, self._snapshot.values())} if issubclass(kind, torch.Tensor)}
        self._with_tensors = {
            id(child) for _, child in self._named if not kinds.isdisjoint(map(type, child.__dict__.values()))
        }
        self._tensors_before = {id(value) for value in self._snapshot.values() if type(value) in kinds}
        self._tensors_before |= {id(leaf) for value in self._contents.items() for _, leaf in _leaves("", value)}
        self._registered = named_tensors(module, "_parameters"), named_tensors(module, "_buffers")
        self.parameters = self._registered[0]  # as of `restore`
        self._changed = {f"parameter {name}": self.parameters[name] for name in changed}
        self._saved = [(p, p.data, p.data.clone()) for p in map(stored, self._changed.values())]

    def restore(self) -> None:
        """Puts the saved values back, into the same buffers, lists, dicts and objects."""
        as_it_was = self._snapshot.restore()  # else what a run registered anew stays
        self.parameters = self._registered[0] if as_it_was else named_tensors(self._module, "_parameters")
        self._contents.restore()
        for parameter, data, value in self._saved:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            data.copy_(value)

    def now(self) -> KeptState:
        """What the tree keeps now, beside what it kept before."""
        changed = self._snapshot.changed()
        listed = list(self._listed(changed))
        buffers = named_tensors(self._module, "_buffers") if changed else self._registered[1]
        found = {f"buffer {name}": buffer for name, buffer in buffers.items()}
        set_now = sorted((item for item in listed if isinstance(item[2], torch.Tensor)), key=lambda item: item[:2])
        found |= {f"attribute {path}.{name}": value for path, name, value in set_now} | self._changed
        return KeptState(
            {name: tensor.detach().clone() for name, tensor in found.items()},
            {f"attribute {path}.{name}": v for path, name, v in listed if not isinstance(v, torch.Tensor)},
            [value for _, _, value in set_now if id(value) not in self._tensors_before],
        )

    def _listed(self, changed: set[int]) -> Iterable[tuple[str, str, Any]]:
        """Tensors in attributes, plain attributes that are not what they were, and what is in lists and dicts set or changed."""
        for path, child in self._named if changed or self._with_tensors else ():
            if id(child) not in changed and id(child) not in self._with_tensors:
                continue
            before = self._snapshot.before(child.__dict__)
            for name, value in child.__dict__.items():
                # such as the last auxiliary loss, also inside others
                changed_now = isinstance(value, torch.Tensor) or not is_as(value, before.get(name, MISSING))
                if changed_now and value is not None and name != "training":
                    yield from ((path, label, item) for label, item in _leaves(name, value))
            for name in before if id(child) in changed else ():
                if isinstance(before[name], _PLAIN) and not isinstance(child.__dict__.get(name), _PLAIN):
                    yield path, f"{name}, which is gone", True
        found = [*self._shared, *self._contents.changed()]
        for holder in {id(holder.value): holder for holder in found}.values():
            yield from (("", label, item) for label, item in _plain_contents(holder.label, holder.value))


def _plain_contents(label: str, holder: Any) -> Iterable[tuple[str, Any]]:
    found = contents(holder)
    yield f"{label} holds", f"{len(found)} in a {type(holder).__name__}"
    for key, value in found:
        yield from _leaves(f"{label}[{key}]", value)


def _leaves(label: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The tensors, numbers and texts in a value, and how it is made of them; of data, how much there is."""
    if type(value) in (list, dict) and is_data(value):
        yield label, f"{len(value)} in a {type(value).__name__}"
    elif type(value) in (list, tuple, dict, torch.Size):
        yield from _plain_contents(label, value)
    elif isinstance(value, _PLAIN):
        yield label, value
    elif value is None:
        yield label, "None"
