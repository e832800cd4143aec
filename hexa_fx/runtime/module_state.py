"""What a module tree keeps besides its parameters: to start every call from the same state, and to compare what calls leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hexa_fx.runtime.contents import Contents, Holder, contents, held_by_modules

_PLAIN = (torch.Tensor, int, float, str)


class ModuleState:
    """The buffers and plain attributes of a module tree, so that every call starts from the same state.

    Parameters are left alone; that a forward changed one shows in `facts`.

    Args:
        module: the root of the tree.
        shared: lists, dicts and objects outside of it whose contents count too.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Holder] = ()) -> None:
        self._module = module
        # torch's own layers keep nothing but their sizes beside buffers
        self._named = [
            (path, child)
            for path, child in module.named_modules()
            if child._buffers or not type(child).__module__.startswith("torch.nn.")
        ]
        self._modules = [child for _, child in self._named]
        self._buffers = [dict(child._buffers) for child in self._modules]
        self._saved = [
            {name: buffer.detach().clone() for name, buffer in buffers.items() if buffer is not None}
            for buffers in self._buffers
        ]
        self._attributes = [dict(child.__dict__) for child in self._modules]
        self._contents = Contents([*held_by_modules(module), *shared])

    def restore(self) -> None:
        """Puts the saved values back, into the same buffer objects."""
        for child, buffers, saved, attributes in zip(self._modules, self._buffers, self._saved, self._attributes):
            child._buffers.update(buffers)
            for name, value in saved.items():
                buffers[name].detach().copy_(value)  # type: ignore[union-attr]
            for name in child.__dict__.keys() - attributes.keys():
                del child.__dict__[name]
            child.__dict__.update(attributes)
        self._contents.restore()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all buffers, tensor attributes and tensors in lists and dicts that changed, by dotted name."""
        found = {f"buffer {name}": buffer for name, buffer in self._module.named_buffers()}
        for path, name, value in self._listed():
            if isinstance(value, torch.Tensor):
                found[f"attribute {path}.{name}"] = value
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def facts(self) -> dict[str, Any]:
        """Plain attributes by dotted name."""
        return {f"attribute {path}.{name}": v for path, name, v in self._listed() if not isinstance(v, torch.Tensor)}

    def fresh_tensors(self) -> list[torch.Tensor]:
        """Tensors that were set as attributes or put into lists and dicts since `restore`, ordered by name."""
        before = {id(value) for attributes in self._attributes for value in attributes.values()}
        before |= {id(leaf) for value in self._contents.items() for _, leaf in _leaves("", value)}
        found = [item for item in self._listed() if isinstance(item[2], torch.Tensor)]
        return [value for _, _, value in sorted(found, key=lambda item: item[:2]) if id(value) not in before]

    def _listed(self) -> Iterable[tuple[str, str, Any]]:
        """Plain attributes and tensors, and what is in lists and dicts that were set or changed since `restore`."""
        for (path, child), before in zip(self._named, self._attributes):
            for name, value in _plain_attributes(child).items():
                yield path, name, value
            for name, value in child.__dict__.items():
                if type(value) in (list, tuple, dict) and value is not before.get(name):
                    yield from ((path, label, item) for label, item in _plain_contents(name, value))
        for holder, _ in self._contents.changed():
            yield from (("", label, item) for label, item in _plain_contents(holder.label, holder.value))


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
