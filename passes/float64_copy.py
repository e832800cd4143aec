"""The float64 copy of a block that verification runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hexa_fx.capture.copies import deepcopied


def float64_bytes(block: nn.Module) -> int:
    """Bytes that the block's floating-point parameters and buffers take in float64."""
    return 8 * sum(tensor.numel() for tensor in (*block.parameters(), *block.buffers()) if tensor.is_floating_point())


def float64_copy_or_none(block: nn.Module) -> nn.Module | None:
    """The float64 copy, or None if the block holds something that cannot be copied, such as a process group or a lock."""
    try:
        return _float64_copy(block)
    except (TypeError, RuntimeError, AttributeError):
        return None


def _float64_copy(block: nn.Module) -> nn.Module:
    """A copy in float64 in which every parameter wants a gradient; tensors are converted while they are copied.

    Parameters and buffers of one value, such as biases before training, get random ones: a term that is zero on the probe must not
    hide that it was lost.
    """
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(_unlike(parameter.detach().to(torch.float64, copy=True), generator))
    for child in block.modules():
        for value in (*child._buffers.values(), *child.__dict__.values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _unlike(value.detach().to(_raised(value.dtype), copy=True), generator)
    return deepcopied(block, memo)


def _unlike(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A floating vector or matrix with random numbers added if all its elements are equal."""
    if not value.is_floating_point() or value.numel() < 2 or not bool((value == value.flatten()[0]).all()):
        return value
    noise = torch.randn(value.shape, dtype=torch.float64, generator=generator)
    return value + noise.to(value.device) / 8


def _raised(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype
