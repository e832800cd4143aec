"""The inputs a block is recorded on: the example's, cut to a size at which asking questions is cheap."""

from __future__ import annotations

from typing import Any

import torch


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
    """Rows of a float tensor; an index tensor has a row for each first index."""
    return tensor.shape[:-1].numel() if tensor.is_floating_point() else tensor.shape[0]
