"""The modules and tensors of a tree by name, without the generators inside generators with which torch walks it."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def named_modules(root: nn.Module, every: bool = False) -> list[tuple[str, nn.Module]]:
    """What ``root.named_modules()`` gives: every module once, with its first name, outer ones first; or under ``every`` name."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    left = [("", root)]
    while left:
        name, module = left.pop()
        if id(module) in seen and not every:
            continue
        seen.add(id(module))
        found.append((name, module))
        if module._modules:
            prefix = f"{name}." if name else ""
            inner = [(f"{prefix}{key}", child) for key, child in module._modules.items() if child is not None]
            left += reversed(inner)
    return found


def one_by_another(named: Iterable[tuple[str, object]]) -> tuple[tuple[str, str], ...]:
    """Names of what has an earlier name too, with that: those of an expert's layer that all experts have, say."""
    first: dict[int, str] = {}
    names = ((name, first.setdefault(id(value), name)) for name, value in named)
    return tuple((name, earlier) for name, earlier in names if name != earlier)


def has_parametrizations(holder: Any) -> bool:
    """As torch's `is_parametrized`, without the cost of an attribute that is nearly always missing."""
    return isinstance(holder, nn.Module) and "parametrizations" in holder._modules


def class_of(holder: Any) -> type:
    """The class of a module, before torch made another of it for this instance, which is parametrized or sharded by FSDP2."""
    kind = type(holder)
    if has_parametrizations(holder):
        return kind.__bases__[0]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(holder, nn.Module) and kind.__bases__[0] is fsdp.FSDPModule:
        return kind.__bases__[1]
    return kind


def rebuilds(module: nn.Module) -> bool:
    """Whether torch makes a new dict of its submodules when one is taken out; what comes later is only in that."""
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def modules_of(root: nn.Module) -> list[nn.Module]:
    """What ``root.modules()`` gives."""
    return [module for _, module in named_modules(root)]


def named_tensors(root: nn.Module, registry: str, every: bool = False) -> dict[str, torch.Tensor]:
    """What ``root.named_parameters()`` gives, or `named_buffers`, for a ``registry`` of ``_parameters`` or ``_buffers``: every
    tensor once, with its first name; or under ``every`` name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, module in named_modules(root, every):
        tensors = getattr(module, registry)
        if tensors:
            prefix = f"{name}." if name else ""
            for key, tensor in tensors.items():
                if tensor is not None and (every or id(tensor) not in seen):
                    seen.add(id(tensor))
                    found[f"{prefix}{key}"] = tensor
    return found


def tensors_by_name(root: nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers, by every name."""
    return named_tensors(root, "_parameters", every=True) | named_tensors(root, "_buffers", every=True)


def tensors_of(root: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, each of both once."""
    return [tensor for registry in ("_parameters", "_buffers") for tensor in named_tensors(root, registry).values()]


def device_of(root: nn.Module) -> torch.device | None:
    """The CUDA device of its parameters; None if none is on one."""
    return next((p.device for p in named_tensors(root, "_parameters").values() if p.is_cuda), None)


def kept_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules hold as plain attributes, by name: each the only one there on its memory, so that its name tells it."""
    kept = {
        inside(path, name): value
        for path, module in named_modules(root)
        for name, value in vars(module).items()
        if type(value) is torch.Tensor and value.layout == torch.strided
    }
    held = tree_leaves([vars(module) for module in modules_of(root)]) if kept else []
    plain = (leaf for leaf in held if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout == torch.strided)
    lying = Counter(tensor.untyped_storage()._cdata for tensor in plain)
    return {name: tensor for name, tensor in kept.items() if lying[tensor.untyped_storage()._cdata] == 1}


def referenced(module: weakref.ref[nn.Module]) -> nn.Module:
    """The user's module behind a weak reference; raises `ReferenceError` once it is gone."""
    found = module()
    if found is None:
        raise ReferenceError("the module of this rewritten forward no longer exists; keep a reference to the model")
    return found


def inside(path: str, name: str) -> str:
    """Path of a module in a model, of which the part at ``path`` has it as ``name``."""
    return f"{path}.{name}".strip(".")


def is_inside(path: str, other: str) -> bool:
    """Whether the module at ``path`` is one of those in the module at ``other``, which is the model if it is empty."""
    return path != other and path.startswith(f"{other}." if other else "")


def with_ancestors(path: str) -> Iterator[str]:
    """The dotted path of a module, then of everything that holds it, the model (an empty path) last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def is_unit_of_fsdp(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` was applied to this module itself. Asks without an import of torch.distributed.fsdp."""
    return any(kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.") for kind in type(module).__mro__)
