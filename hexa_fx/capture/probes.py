"""The inputs that a block is recorded on: those of the example, cut to a size at which experiments are cheap."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from hexa_fx.capture.records import record_of


def probe_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], max_tokens: int, scale: float = 1.0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with at most about ``max_tokens`` rows, float tensors multiplied by ``scale``.

    Cut along the first dimension where all tensors share it, then along the second dimension of a lone (B, S, D) input. Inputs
    that do not allow it are used whole.
    """
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
    cut = {key: _scaled(value, scale) for key, value in _cut(tensors, max_tokens).items()}
    return tuple(cut.get(i, value) for i, value in enumerate(args)), {
        key: cut.get(key, value) for key, value in kwargs.items()
    }


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor * scale if tensor.is_floating_point() and scale != 1.0 else tensor


def _cut(tensors: dict[Any, torch.Tensor], max_tokens: int) -> dict[Any, torch.Tensor]:
    if not tensors or any(tensor.dim() == 0 for tensor in tensors.values()):
        return tensors
    if len({tensor.shape[0] for tensor in tensors.values()}) != 1:
        return tensors
    rows_each = max(_rows(tensor) for tensor in tensors.values()) // max(1, next(iter(tensors.values())).shape[0])
    keep = max(1, max_tokens // max(1, rows_each))
    tensors = {key: tensor[:keep] for key, tensor in tensors.items()}
    if len(tensors) == 1:
        ((key, tensor),) = tensors.items()
        if tensor.dim() == 3 and tensor.shape[0] == 1 and tensor.is_floating_point():
            return {key: tensor[:, :max_tokens]}
    return tensors


def _rows(tensor: torch.Tensor) -> int:
    """Number of rows of a float tensor; an index tensor has one for each first index."""
    return tensor.shape[:-1].numel() if tensor.is_floating_point() else tensor.shape[0]


CROWD = 160
"""Tokens in a crowded probe, unless the code names a larger capacity."""

_COMPARISONS = frozenset("le lt ge gt clamp clamp_ clip min minimum".split())


def crowd_of(graph: torch.fx.Graph, least: int = CROWD) -> int:
    """More tokens than any limit that the code compares with: twice the largest whole number below 2048 in a comparison
    or where a list of integers is cut, or ``least``.
    """
    limits = [
        item
        for node in graph.nodes
        if str(getattr(node.target, "__name__", node.target)) in _COMPARISONS
        for item in (*node.args, *node.kwargs.values(), *_cuts_of(node))
        if isinstance(item, int) and not isinstance(item, bool) and 1 < item < 2048
    ]
    return max([least, *(2 * limit for limit in limits)])


def _cuts_of(node: torch.fx.Node) -> list[Any]:
    """Where ``indices[:cut]`` ends."""
    if node.op == "output" or node.target is not operator.getitem or not isinstance(node.args[1], slice):
        return []
    value = record_of(node).value
    return [] if not isinstance(value, torch.Tensor) or value.is_floating_point() else [node.args[1].stop]


def crowded_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of which half of the tokens are nearly alike and half random, if the block takes one float tensor; else unchanged."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
    if len(tensors) != 1:
        return args, kwargs
    ((key, example),) = tensors.items()
    if not example.is_floating_point() or example.dim() not in (2, 3) or not example.numel():
        return args, kwargs
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(tokens, example.shape[-1], generator=generator).to(example) * example.std()
    one = example.reshape(-1, example.shape[-1])[0]
    alike = torch.arange(tokens, device=example.device)[:, None] % 2 == 0
    crowd = torch.where(alike, one + 0.01 * noise, noise)
    named[key] = crowd if example.dim() == 2 else crowd.unsqueeze(0)
    return tuple(named[i] for i in range(len(args))), {name: named[name] for name in kwargs}
