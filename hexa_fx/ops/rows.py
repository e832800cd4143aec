"""Sizes and index arithmetic that operators of every device share. Plain torch, any device, no host read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import TypeVar

import torch
from torch import Tensor

from hexa_fx.ir import Layout

L = TypeVar("L", Layout, str)


def flip(layout: L) -> L:
    """The layout under which the same memory reads as the transposed weight."""
    return "kn" if layout == "nk" else "nk"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def invert(v: Tensor) -> Tensor:
    """The permutation ``inv`` (n,) int32 with ``inv[v[p]] == p``."""
    rows = torch.arange(v.shape[0], dtype=v.dtype, device=v.device)
    return torch.empty_like(v).scatter_(0, v.long(), rows)


def expert_of_row(offs: Tensor, n: int) -> Tensor:
    """Expert (n,) int64 of every row; E for rows at and after ``offs[E]``."""
    rows = torch.arange(n, dtype=offs.dtype, device=offs.device)
    return torch.searchsorted(offs[1:].contiguous(), rows, right=True)


def routed_rows(offs: Tensor, n: int) -> Tensor:
    """Mask (n, 1) of the rows that have an expert: those before ``offs[E]``."""
    return (torch.arange(n, dtype=offs.dtype, device=offs.device) < offs[-1]).unsqueeze(1)


def gather_rows(x: Tensor, v: Tensor | None, top_k: int) -> Tensor:
    """The row operand (n, C): x itself, or ``x[v // top_k]``."""
    return x if v is None else x.index_select(0, v.div(top_k, rounding_mode="floor"))


def row_count(x: Tensor, v: Tensor | None) -> int:
    """n, the rows of an operand: its own, or those that ``v`` gathers from it."""
    return x.shape[0] if v is None else v.shape[0]


def columns_of(weight: Tensor, layout: str) -> int:
    """N of a stacked weight."""
    return weight.shape[1] if layout == "nk" else weight.shape[2]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def expert_rows(table: Tensor, offs: Tensor, n: int) -> Tensor:
    """(n, C): ``table[e(p)]`` of an (E, C) table, zero for rows without an expert."""
    padded = torch.cat((table, table.new_zeros((1, table.shape[1]))))
    return padded.index_select(0, expert_of_row(offs, n))
