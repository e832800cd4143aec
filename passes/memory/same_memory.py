"""Parameters that are different objects in one memory (``a.data = b.data``): listed experts, laid side by side, would part them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hexa_fx.isolation.module_tree import named_tensors

_REASON = (
    "{} lie in the same memory, which experts of a list do not keep when they are laid side by side; a block is rewritten if they "
    "are one nn.Parameter (a.weight = b.weight, without .data)"
)


def in_same_memory(model: nn.Module) -> dict[int, str]:
    """By the id of every parameter that has memory in common with another one, the names of the two."""
    plain = [
        (name, p)
        for name, p in named_tensors(model, "_parameters").items()
        if type(p) is nn.Parameter and not p.is_meta
    ]
    dense = [(name, p) for name, p in plain if p.layout is torch.strided and p.is_contiguous() and p.numel()]
    found: dict[int, str] = {}
    ends: dict[torch.device, tuple[int, str, nn.Parameter]] = {}
    for name, parameter in sorted(dense, key=lambda item: item[1].data_ptr()):
        start = parameter.data_ptr()
        stop, last, other = ends.get(parameter.device, (0, "", parameter))
        if start < stop:
            found[id(parameter)] = found[id(other)] = f"{last} and {name}"
        end = start + parameter.numel() * parameter.element_size()
        if end > stop:
            ends[parameter.device] = end, name, parameter
    return found


def why_not_parted(block: nn.Module, found: Mapping[int, str]) -> str:
    """A sentence if a block of listed experts has such parameters; else empty. Stacked ones stay where they are."""
    parameters = list(block.parameters()) if found else []
    if any(parameter.dim() > 2 for parameter in parameters):
        return ""
    names = next((found[id(parameter)] for parameter in parameters if id(parameter) in found), "")
    return _REASON.format(names) if names else ""
