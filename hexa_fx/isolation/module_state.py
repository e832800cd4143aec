"""What a module tree keeps besides its parameters: to start every call from the same state, and to compare what calls leave."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.contents import Contents, Holder, contents, held_by_modules
from hexa_fx.isolation.module_snapshot import ModuleSnapshot, same_items

_PLAIN = (torch.Tensor, int, float, str)


@dataclass(frozen=True)
class KeptState:
    """What a module tree keeps after a call.

    Args:
        tensors: copies of all buffers, tensor attributes and tensors in lists and dicts that changed, by dotted name.
        facts: plain attributes by dotted name.
        fresh: tensors that were set as attributes or put into lists and dicts since `ModuleState.restore`, ordered by name.
    """

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    fresh: list[torch.Tensor]


class ModuleState:
    """What a module tree keeps besides the values of its parameters, so that every call starts from the same state.

    That a forward changed a parameter shows in `hexa_fx.isolation.outcome.Outcome.facts`.

    Args:
        module: the root of the tree.
        shared: lists, dicts and objects outside of it whose contents count too.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Holder] = ()) -> None:
        self._module = module
        self._named = [(path, child, _keeps_sizes_only(child)) for path, child in module.named_modules()]
        self._snapshot = ModuleSnapshot(module)
        self._tensors_before = {id(value) for value in self._snapshot.values() if isinstance(value, torch.Tensor)}
        self._contents = Contents([*held_by_modules(module), *shared])

    def restore(self) -> None:
        """Puts the saved values back, into the same buffers, lists, dicts and objects."""
        self._snapshot.restore()
        self._contents.restore()

    def now(self) -> KeptState:
        """What the tree keeps now, beside what it kept before."""
        listed = list(self._listed())
        found = {f"buffer {name}": buffer for name, buffer in self._module.named_buffers()}
        set_now = sorted((item for item in listed if isinstance(item[2], torch.Tensor)), key=lambda item: item[:2])
        found |= {f"attribute {path}.{name}": value for path, name, value in set_now}
        before = self._tensors_before | {id(leaf) for value in self._contents.items() for _, leaf in _leaves("", value)}
        return KeptState(
            {name: tensor.detach().clone() for name, tensor in found.items()},
            {f"attribute {path}.{name}": v for path, name, v in listed if not isinstance(v, torch.Tensor)},
            [value for _, _, value in set_now if id(value) not in before],
        )

    def _listed(self) -> Iterable[tuple[str, str, Any]]:
        """Plain attributes and tensors, and what is in lists and dicts that were set or changed since `restore`."""
        for path, child, quiet in self._named:
            before = self._snapshot.attributes(child)
            if quiet and same_items(child.__dict__, before):
                continue
            for name, value in _plain_attributes(child).items():
                if not (quiet and value is before.get(name)):
                    yield path, name, value
            for name, value in child.__dict__.items():
                if type(value) in (list, tuple, dict) and value is not before.get(name):
                    yield from ((path, label, item) for label, item in _plain_contents(name, value))
        for holder, _ in self._contents.changed():
            yield from (("", label, item) for label, item in _plain_contents(holder.label, holder.value))


def _keeps_sizes_only(module: nn.Module) -> bool:
    """Whether it is a layer of torch's own, so that of its attributes only those count that somebody else sets."""
    tensors = module._buffers or any(isinstance(value, torch.Tensor) for value in module.__dict__.values())
    return type(module).__module__.startswith("torch.nn.") and not tensors


def _plain_contents(label: str, holder: Any) -> Iterable[tuple[str, Any]]:
    found = contents(holder)
    yield f"{label} holds", f"{len(found)} in a {type(holder).__name__}"
    for key, value in found:
        yield from _leaves(f"{label}[{key}]", value)


def _leaves(label: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The tensors, numbers and texts in a value, and how it is made of them."""
    if type(value) in (list, tuple, dict):
        yield from _plain_contents(label, value)
    elif isinstance(value, _PLAIN):
        yield label, value
    elif value is None:
        yield label, "None"


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Tensors, numbers and strings that a module keeps besides its buffers, such as its last auxiliary loss."""
    return {name: value for name, value in module.__dict__.items() if name != "training" and isinstance(value, _PLAIN)}
