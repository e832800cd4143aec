"""The arithmetic of the CPU kernels: matmuls of groups of rows, done in the way that suits a CPU best.

On a CPU a loop over experts is the right thing. What makes the usual loop slow is what surrounds its matmuls: a mask, a gather, a
scatter and half a dozen autograd nodes per expert. Here empty experts cost nothing, every matmul writes into its slice of one
output, and many small float32 matmuls go through torch's own grouped one, whose loop is in C++.

Without AMX or AVX512-BF16, torch's bfloat16 and float16 matmuls run at a fraction of float32's speed, and with AVX512-BF16 those of
few short rows do. Rows are then multiplied in float32, converting one expert's weight at a time, and results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from hexa_fx.ops.listed import Gradients, Listed
from hexa_fx.torch_private import _is_amx_fp16_supported, _is_amx_tile_supported, _is_avx512_bf16_supported, grouped_mm

Weight = Tensor | Listed
W = TypeVar("W", Tensor, Listed)
Group = tuple[int, int, int]
"""(expert, first row, end row) of an expert that has rows."""

_GROUPED_MM_FLOPS = 1 << 22
"""Multiply-adds an expert below which the loop's overhead counts and torch's grouped matmul is faster."""

_GROUPED_MM_EXPERTS = 8
"""Fewer experts than this are not worth preparing torch's grouped matmul for."""

SMALL = 1 << 14
"""Elements up to which another copy costs less than preparing slices to write into."""

_ELEMENTS_IN_BF16 = 1 << 14
"""Elements of an expert's rows from which torch's bfloat16 matmul beats float32's on a CPU with AVX512-BF16."""

_FEW_ROWS = 4
"""Fewer rows than this read a half-type weight once anyway: converting it first would only add traffic."""


def as_kn(weight: W, layout: str) -> W:
    """View (E, K, N) of a weight."""
    return weight.transpose(1, 2) if layout == "nk" else weight  # type: ignore[return-value]


def groups_of(bounds: list[int]) -> list[Group]:
    """The experts that have rows, each with its range."""
    return [(e, start, end) for e, (start, end) in enumerate(pairwise(bounds)) if start < end]


@lru_cache(maxsize=1)
def settle_allocator() -> None:
    """Makes glibc keep freed memory. Returning it and faulting it in again would take a tenth of a training step.

    glibc raises its thresholds when a large block is freed (mallopt, M_MMAP_THRESHOLD), as happens in most programs sooner or
    later. The block freed here is never touched, so it costs nothing.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


@lru_cache(maxsize=4)
def multiplies_in_float32(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies a 16-bit type faster by way of float32.

    Without AMX it does: torch compiles a 16-bit product for every number of rows, and groups of rows are of any size.
    """
    if dtype == torch.bfloat16:
        return not _is_amx_tile_supported()
    if dtype == torch.float16:
        return not _is_amx_fp16_supported()
    return False


def compute_dtype(dtype: torch.dtype, elements: int = 0) -> torch.dtype:
    """The dtype in which rows of ``dtype`` are multiplied, where an expert reached has so many ``elements`` in its rows."""
    if dtype == torch.bfloat16 and elements >= _ELEMENTS_IN_BF16 and _is_avx512_bf16_supported():
        return dtype
    return torch.float32 if multiplies_in_float32(dtype) else dtype


def multiply_groups(x: Tensor, weight: Weight, bias: Weight | None, groups: list[Group]) -> Tensor:
    """``x[p] @ weight[e(p)] + bias[e(p)]`` (n, N) in x's dtype.

    Args:
        x: (n, K), the groups' rows one after the other, in `compute_dtype` of the weight's.
        weight: (E, K, N), any strides.
        bias: (E, N) or None.
        groups: all rows of x.
    """
    if len(groups) == 1:
        return multiply(x, weight, bias, groups[0][0])
    if x.shape[0] * weight.shape[2] <= SMALL:
        rows = x.split_with_sizes([end - start for _, start, end in groups])
        return torch.cat([multiply(part, weight, bias, group[0]) for group, part in zip(groups, rows, strict=True)])
    out = x.new_empty((x.shape[0], weight.shape[2]))
    multiply_groups_into(x, weight, bias, groups, out)
    return out


def multiply_groups_into(x: Tensor, weight: Weight, bias: Weight | None, groups: list[Group], out: Tensor) -> None:
    """`multiply_groups` into ``out`` (n, N), which may be a part of wider rows."""
    other = not x.dtype == weight.dtype == out.dtype
    for (e, _, _), rows, y in split(groups, x, out):
        if other:
            y.copy_(multiply(rows, weight, bias, e))
        elif bias is None:
            torch.mm(rows, weight[e], out=y)
        else:
            torch.addmm(bias[e], rows, weight[e], out=y)


def multiply(x: Tensor, weight: Weight, bias: Weight | None, expert: int) -> Tensor:
    """One expert's ``x @ weight + bias`` in x's dtype."""
    w = weight[expert]
    if x.dtype == w.dtype:
        return torch.mm(x, w) if bias is None else torch.addmm(bias[expert], x, w)
    if x.shape[0] < _FEW_ROWS and (w.dtype == torch.bfloat16 or w.stride(0) == 1):
        y = torch.mm(x.to(w.dtype), w).float()
    else:
        y = torch.mm(x, w.float())
    return y if bias is None else y.add_(bias[expert])


def outer_groups(x: Tensor, g: Tensor, groups: list[Group], out: Tensor) -> None:
    """``out[e] = x_e^T g_e`` for every group.

    Args:
        x: (n, K), the groups' rows one after the other.
        g: (n, N), likewise.
        groups: all rows of x and g.
        out: (E, K, N), any strides; a half type where x and g are float32.
    """
    same = out.dtype == x.dtype
    for (e, _, _), x_rows, g_rows in split(groups, x, g):
        if same:
            torch.mm(x_rows.t(), g_rows, out=out[e])
        else:
            out[e].copy_(torch.mm(x_rows.t(), g_rows))


def give_outer_groups(x: Tensor, g: Tensor, groups: list[Group], into: Gradients) -> None:
    """``x_e^T g_e`` for every group, to who takes a tensor for each."""
    sizes = [end - start for _, start, end in groups]
    experts = (expert for expert, _, _ in groups)
    into.add_products(experts, x.t().split_with_sizes(sizes, 1), g.split_with_sizes(sizes))


def add_outer_groups(x: Tensor, g: Tensor, groups: list[Group], into: Tensor) -> None:
    """``into[e] += x_e^T g_e`` for every group, in into's dtype; as `outer_groups`."""
    for (e, _, _), x_rows, g_rows in split(groups, x, g):
        into[e].addmm_(x_rows.to(into.dtype).t(), g_rows.to(into.dtype))


def outer_products(x: Tensor, g: Tensor, groups: list[Group]) -> Tensor:
    """`outer_groups` where every expert has rows: (E, K, N) in x's dtype."""
    return torch.stack([torch.mm(x_rows.t(), g_rows) for _, x_rows, g_rows in split(groups, x, g)])


def split(groups: list[Group], a: Tensor, b: Tensor) -> Iterator[tuple[Group, Tensor, Tensor]]:
    """The rows of a and of b that belong to each group."""
    if len(groups) == 1:
        return iter(((groups[0], a, b),))
    sizes = [end - start for _, start, end in groups]
    return zip(groups, a.split_with_sizes(sizes), b.split_with_sizes(sizes), strict=True)


def has_loop_overhead(groups: list[Group], multiply_adds: int) -> bool:
    """Whether there are many small groups, so that torch's grouped matmul saves the overhead of a loop."""
    return len(groups) >= _GROUPED_MM_EXPERTS and multiply_adds < _GROUPED_MM_FLOPS * len(groups)


def grouped_mm_takes(*tensors: Tensor) -> bool:
    """Whether torch._grouped_mm takes these: float32, one unit stride among the last two, others multiples of 16 bytes."""
    return has_grouped_mm() and all(t.dtype == torch.float32 and _aligned(t) for t in tensors)


def _aligned(t: Tensor) -> bool:
    *outer, rows, columns = t.stride()
    if t.data_ptr() % 16 or 1 not in (rows, columns):
        return False
    return all(s % 4 == 0 for s in (*outer, rows if columns == 1 else columns))


@lru_cache(maxsize=1)
def has_grouped_mm() -> bool:
    """Whether this version of torch multiplies groups of float32 on a CPU; tried once on a few numbers."""
    try:
        y = grouped_mm(
            torch.ones(2, 4, device="cpu"),
            torch.ones(2, 4, 4, device="cpu"),
            offs=torch.tensor([1, 2], dtype=torch.int32, device="cpu"),
        )
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return bool((y == 4).all())
