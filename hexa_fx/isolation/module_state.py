"""What a module tree keeps besides its parameters: to start every call from the same state, and to compare what calls leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.contents import Contents, Holder, contents, held_by_modules
from hexa_fx.isolation.held_objects import MISSING
from hexa_fx.isolation.module_snapshot import ModuleSnapshot
from hexa_fx.isolation.module_tree import named_modules, named_tensors
from hexa_fx.isolation.upcast_weight import stored

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
        self._contents = Contents([*held_by_modules(module), *shared])
        kinds = {kind for kind in {*map(type, self._snapshot.values())} if issubclass(kind, torch.Tensor)}
        self._with_tensors = {
            id(child) for _, child in self._named if not kinds.isdisjoint(map(type, child.__dict__.values()))
        }
        self._tensors_before = {id(value) for value in self._snapshot.values() if type(value) in kinds}
        self._tensors_before |= {id(leaf) for value in self._contents.items() for _, leaf in _leaves("", value)}
        self._registered = named_tensors(module, "_parameters"), named_tensors(module, "_buffers")
        self._parameters = self._registered[0]
        self._changed = {f"parameter {name}": self._parameters[name] for name in changed}
        self._save_parameters()

    def _save_parameters(self) -> None:
        self._saved = [(p, p.data, p.data.clone()) for p in map(stored, self._changed.values())]

    def restore(self) -> None:
        """Puts the saved values back, into the same buffers, lists, dicts and objects."""
        as_it_was = self._snapshot.restore()  # else what a run registered anew stays
        self._parameters = self._registered[0] if as_it_was else named_tensors(self._module, "_parameters")
        self._contents.restore()
        for parameter, data, value in self._saved:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            data.copy_(value)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The tree's parameters by name, as of `restore`."""
        return self._parameters

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
            before = self._snapshot.attributes(child)
            for name, value in child.__dict__.items():
                if isinstance(value, torch.Tensor) or not _is_as(value, before.get(name, MISSING)):
                    yield from _plain_attribute(path, name, value)
            for name in before if id(child) in changed else ():
                if isinstance(before[name], _PLAIN) and not isinstance(child.__dict__.get(name), _PLAIN):
                    yield path, f"{name}, which is gone", True
        for holder, _ in self._contents.changed():
            yield from (("", label, item) for label, item in _plain_contents(holder.label, holder.value))


def _is_as(value: Any, before: Any) -> bool:
    """Whether it is what it was; a number or text may be another equal object."""
    if value is before:
        return True
    return type(value) is type(before) and isinstance(value, (int, float, str)) and bool(value == before)


def _plain_attribute(path: str, name: str, value: Any) -> Iterable[tuple[str, str, Any]]:
    """Tensors, numbers and strings that a module keeps besides its buffers, such as its last auxiliary loss; also inside others."""
    if isinstance(value, _PLAIN) and name != "training":
        yield path, name, value
    elif type(value) in (list, tuple, dict, torch.Size):
        yield from ((path, label, item) for label, item in _plain_contents(name, value))


def _plain_contents(label: str, holder: Any) -> Iterable[tuple[str, Any]]:
    found = contents(holder)
    yield f"{label} holds", f"{len(found)} in a {type(holder).__name__}"
    for key, value in found:
        yield from _leaves(f"{label}[{key}]", value)


def _leaves(label: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The tensors, numbers and texts in a value, and how it is made of them."""
    if type(value) in (list, tuple, dict, torch.Size):
        yield from _plain_contents(label, value)
    elif isinstance(value, _PLAIN):
        yield label, value
    elif value is None:
        yield label, "None"
