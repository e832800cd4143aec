"""``hexa::low_rank_gradients`` on CUDA: one reading of dy's rows on Hopper, where an expert's gradient fits into registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family_gemm_sm90 import MAX_EXPERTS, TABLES
from hexa_fx.codegen.family_low_rank import (
    FAMILY,
    PART_NUMBERS,
    PARTS,
    STEP_COLUMNS,
    TILE_ROWS,
    holds,
    padded_rank,
    stages_of,
    steps_of,
)
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda import gemm_sm90 as sm90
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.gemm import esfk, esmm, estmm
from hexa_fx.cuda.kernel import kernel_of
from hexa_fx.cuda.operands import DTYPES, division, numbers_of
from hexa_fx.cuda.planning import TensorMap, planning_of
from hexa_fx.formats.format import ceil_div
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.low_rank_gradients import LowRankGradients

FEWEST_ROWS = 2 * TILE_ROWS
"""Rows an expert on average from which one reading is faster: its factor is read and its gradient written once a block."""


@cuda_kernel("low_rank_gradients")
def low_rank_gradients(*args: Any) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.low_rank_gradients."""
    o = LowRankGradients(*args)
    if _reads_once(o):
        return _of_one_reading(o)
    if o.v is None:
        du, dc, _ = esfk(o.u, o.dy, o.c, None, o.offs, 1, "nk", False)
        return du, dc
    rows = (o.v, o.offs, o.top_k)
    return esmm(o.dy, o.c, None, *rows, "kn"), estmm(o.u, o.dy, None, *rows, "nk")


def _reads_once(o: LowRankGradients) -> bool:
    """Whether the kernel of this module takes these operands. In a fixed order products do not go by the number of rows."""
    experts, rows = o.offs.shape[0] - 1, o.u.shape[0]
    if not planning_of(o.offs).card.is_hopper or is_fixed() or experts > MAX_EXPERTS:
        return False
    if rows < FEWEST_ROWS * experts or not holds(*o.c.shape[1:]):
        return False
    return o.u.is_contiguous() and o.c.is_contiguous() and not sm90.unsupported(o.dy, o.u, o.c, experts=experts)


def _of_one_reading(o: LowRankGradients) -> tuple[Tensor, Tensor]:
    planning, (experts, columns, rank) = planning_of(o.dy), o.c.shape
    blocks, rows = planning.card.multiprocessors, o.u.shape[0]
    du, dc = o.u.new_empty((rows, rank)), o.c.new_empty((experts, columns, rank))
    parts = o.u.new_empty((2 * blocks, columns, rank), dtype=torch.float32)
    wide, steps, table = padded_rank(rank), steps_of(columns), next(size for size in TABLES if experts <= size)
    assert wide is not None
    dtype, arch = DTYPES[o.dy.dtype], planning.card.arch
    spec = KernelSpec(FAMILY, FAMILY, arch, dtype=dtype, gather=o.v is not None, stages=stages_of(steps, wide, table))
    numbers = (o.dy.stride()[0], rows, experts, columns, rank, blocks, *division(o.top_k))
    piece = ((o.v, o.offs, o.dy, o.u, du, dc, parts), numbers_of(get_family(FAMILY).args).pack(*numbers))
    kernel = kernel_of(spec.with_options(rank=wide, steps=steps, experts=table))
    planning.launch(kernel, (blocks, 1, 1), (piece,), (_factor_map(o.c, wide),))
    finish = kernel_of(KernelSpec(FAMILY, PARTS, arch, dtype=dtype))
    planning.launch(finish, (ceil_div(columns * rank, PART_NUMBERS), experts + 1, 1), (piece,))
    return du, dc


def _factor_map(c: Tensor, wide: int) -> TensorMap:
    """(E, N, r) in boxes of a step's columns, each a line of `wide` numbers in shared memory."""
    experts, columns, rank = c.shape
    by_expert, by_row, _ = c.stride()
    box, swizzle = (wide, STEP_COLUMNS, 1), wide * c.element_size()
    return TensorMap(c, (DTYPES[c.dtype], (rank, columns, experts), (by_row, by_expert), box, swizzle))
