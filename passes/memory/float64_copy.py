"""The float64 copy of a block that verification runs on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from hexa_fx import registry
from hexa_fx.capture.copies import deepcopied
from hexa_fx.isolation.module_tree import modules_of, named_tensors
from hexa_fx.isolation.size import is_large, is_out_of_memory, of_one_number, raises_in_pieces, whole_bytes


def float64_copy_or_none(block: nn.Module, analysis_bytes: int, as_it_is: bool = False) -> nn.Module | None:
    """The float64 copy, or None if the block holds something that cannot be copied, such as a process group or a lock.

    Every parameter wants a gradient. Parameters and buffers of one value, such as biases before training, get random ones: a term
    that is zero on the probe must not hide that it was lost.

    Args:
        block: to copy.
        analysis_bytes: memory that the analysis may hold. Of a block whose copy would take a good part of it, large weights
            are not copied but upcast where they are used (`hexa_fx.large_blocks`).
        as_it_is: keep parameters and buffers of one value.
    """
    try:
        return _float64_copy(block, raises_in_pieces(block, analysis_bytes), whole_bytes(analysis_bytes), as_it_is)
    except (TypeError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        return None


def _float64_copy(block: nn.Module, in_pieces: bool, limit: int, as_it_is: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    parameters = named_tensors(block, "_parameters").values()
    generator = torch.Generator().manual_seed(0)
    plain = set() if as_it_is else of_one_number(chain(parameters, _others(block)))
    for parameter in parameters:
        if parameter.is_floating_point():
            value = parameter.detach()
            in_parts = in_pieces and is_large(value)
            memo[id(parameter)] = nn.Parameter(
                registry.large_blocks().upcast(
                    _unlike_in_place(value, generator) if id(parameter) in plain else value, limit
                )
                if in_parts
                else _unlike(value.to(torch.float64, copy=True), generator, id(parameter) in plain)
            )
            _keep_settings(parameter, memo[id(parameter)])
    for value in _others(block):
        if id(value) not in memo:
            raised = value.detach().to(_upcast(value.dtype), copy=True)
            memo[id(value)] = _unlike(raised, generator, id(value) in plain)
            _keep_settings(value, memo[id(value)])
    return deepcopied(block, memo)


def _keep_settings(tensor: torch.Tensor, copied: torch.Tensor) -> None:
    """Gives a copy what was put on a tensor, which the code may ask for."""
    vars(copied).update({name: value for name, value in vars(tensor).items() if not isinstance(value, torch.Tensor)})


def _others(block: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers, and tensors in attributes."""
    for child in modules_of(block):
        for value in (*child._buffers.values(), *child.__dict__.values()):
            if isinstance(value, torch.Tensor):
                yield value


def _unlike(value: torch.Tensor, generator: torch.Generator, plain: bool) -> torch.Tensor:
    """A vector or matrix with random numbers added if all its elements are equal."""
    if not plain or value.numel() < 2:
        return value
    noise = torch.randn(value.shape, dtype=torch.float64, generator=generator, device="cpu")
    return value + noise.to(value.device) / 8


def _unlike_in_place(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """As `_unlike`, for a large weight: every row of it begins one random number after the row before."""
    rows = value.shape[:-1].numel()
    noise = torch.randn(rows + value.shape[-1], dtype=torch.float64, generator=generator, device="cpu") / 8
    numbers = noise.to(value) + value.flatten()[0]
    strides = [math.prod(value.shape[dim + 1 : -1]) for dim in range(value.dim() - 1)]
    return numbers.as_strided(value.shape, (*strides, 1))


def _upcast(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype
