"""Dropout on routed rows with the random numbers of code that runs one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hexa_fx.torch_private import _disable_dynamo


# What is drawn depends on how many rows each expert has. `torch.compiler.disable` would import all of dynamo now.
@_disable_dynamo
def kept_rows(
    like: Tensor,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    slots_first: bool,
    kinds: Sequence[tuple[tuple[int, ...], torch.dtype | None, float]],
) -> list[Tensor]:
    """What the dropouts of all experts keep, drawn for one expert after the other, in each for one dropout after the other.

    Reads ``offs`` on the host.

    Args:
        like: of the device, and of the dtype of rows where none is named.
        v, offs: of `hexa_fx.ops.reindex.reindex`.
        top_k: k.
        slots_first: whether the code lists an expert's rows by slot and then by token; else by token.
        kinds: of each dropout the shape of a row, the dtype of the rows and the probability.

    Returns:
        for each dropout (n, *shape) bool; true in rows of sentinel ids.
    """
    masks = [torch.ones((len(v), *shape), dtype=torch.bool, device=like.device) for shape, _, _ in kinds]
    ends = offs.tolist()
    for start, end in pairwise(ends):
        for mask, (shape, dtype, p) in zip(masks, kinds if end > start else ()):
            ones = torch.ones((end - start, *shape), dtype=dtype or like.dtype, device=like.device)
            mask[start:end] = F.dropout(ones, p) != 0
    if not slots_first:
        return masks
    group = torch.searchsorted(
        offs[1:].contiguous(), torch.arange(len(v), device=v.device, dtype=offs.dtype), right=True
    )
    order = (group * top_k + v % top_k).argsort(stable=True)
    return [torch.empty_like(mask).index_copy_(0, order, mask) for mask in masks]


def drop(rows: Tensor, kept: Tensor, p: float) -> Tensor:
    """``F.dropout(rows, p)`` that keeps what ``kept``, of the shape of the rows, says; with torch's own rounding on the device."""
    if rows.is_cuda:
        dropped: Tensor = torch.ops.aten.native_dropout_backward(rows, kept, 0.0 if p == 1 else 1 / (1 - p))
        return dropped
    factor = kept.to(rows.dtype)
    return rows * (factor if p == 1 else factor.div_(1 - p))
