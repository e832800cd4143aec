"""What the CPU kernels share: gathers, and the loop over experts that writes into slices of one output.

A loop over experts is the right shape on a CPU. What makes the usual one slow is around the matmuls: a mask, a gather,
a scatter and half a dozen autograd nodes an expert. Here there is one gather, one matmul an expert (empty experts cost
nothing) and one combine; offsets are read once as Python integers, which is free on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_of_row(v: Tensor, top_k: int) -> Tensor:
    """Token of every row: ``v // top_k``."""
    return v if top_k == 1 else v.div(top_k, rounding_mode="floor")


def gather_rows(x: Tensor, v: Tensor | None, top_k: int) -> Tensor:
    """The row operand (n, C): x itself, or ``x[v // top_k]``."""
    return x if v is None else x.index_select(0, token_of_row(v, top_k))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_kn(weight: Tensor, layout: str) -> Tensor:
    """View (E, K, N) of a weight."""
    return weight.transpose(1, 2) if layout == "nk" else weight


def grouped_mm(x: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int]) -> Tensor:
    """``x[p] @ weight[e(p)] + bias[e(p)]``, rows without an expert zero.

    Args:
        x: (n, K) in expert order.
        weight: (E, K, N), any strides.
        bias: (E, N) or None.
        bounds: E + 1 row offsets.
    """
    y = x.new_empty((x.shape[0], weight.shape[2]))
    for e in range(len(bounds) - 1):
        start, end = bounds[e], bounds[e + 1]
        if start == end:
            continue
        if bias is None:
            torch.mm(x[start:end], weight[e], out=y[start:end])
        else:
            torch.addmm(bias[e], x[start:end], weight[e], out=y[start:end])
    y[bounds[-1] :].zero_()
    return y


def grouped_outer(x: Tensor, g: Tensor, bounds: list[int]) -> Tensor:
    """(E, K, N): ``x_e^T g_e`` of every expert's rows, zero where it has none."""
    y = x.new_empty((len(bounds) - 1, x.shape[1], g.shape[1]))
    for e in range(len(bounds) - 1):
        start, end = bounds[e], bounds[e + 1]
        if start == end:
            y[e].zero_()
        else:
            torch.mm(x[start:end].t(), g[start:end], out=y[e])
    return y
