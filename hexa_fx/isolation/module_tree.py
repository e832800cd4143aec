"""The modules and tensors of a tree by name, without the generators inside generators with which torch walks it."""

from __future__ import annotations

import torch
from torch import nn


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``root.named_modules()`` gives: every module once, with its first name, outer ones first."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    left = [("", root)]
    while left:
        name, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        if module._modules:
            prefix = f"{name}." if name else ""
            inner = [(f"{prefix}{key}", child) for key, child in module._modules.items() if child is not None]
            left += reversed(inner)
    return found


def named_tensors(root: nn.Module, registry: str) -> dict[str, torch.Tensor]:
    """What ``root.named_parameters()`` gives, or `named_buffers`: every tensor once, with its first name.

    Args:
        registry: ``_parameters`` or ``_buffers``.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, module in named_modules(root):
        tensors = getattr(module, registry)
        if tensors:
            prefix = f"{name}." if name else ""
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in found:
                    found[id(tensor)] = f"{prefix}{key}", tensor
    return dict(found.values())


def tensors_of(root: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, each of both once."""
    return [tensor for registry in ("_parameters", "_buffers") for tensor in named_tensors(root, registry).values()]
