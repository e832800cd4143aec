"""low_rank_gradients: both gradients of a product with a factor of a few columns, on Hopper; see its header in kernels/."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import Family, LaunchShape, shared_limit
from hexa_fx.codegen.family_gemm_sm90 import TABLES, expert_tables, whole_kib
from hexa_fx.codegen.spec import KernelSpec

FAMILY = "low_rank_gradients"
PARTS = "low_rank_parts"
"""The operator of the second launch, which adds up what blocks leave of experts that they share."""

STEP_COLUMNS = 128
"""Columns of dy that pass through shared memory at a time, half of them for each consuming warpgroup."""

RANKS = (16, 32, 64)
"""What ranks are rounded up to."""

TILE_ROWS = 64
PART_NUMBERS = 256 * 8
"""Of an expert's gradient, that a block of the second launch adds up."""

MOST_ACCUMULATORS = 184
"""Of an expert's gradient, for which a consuming thread has registers."""

_MOST_STAGES = 8


def padded_rank(rank: int) -> int | None:
    """Columns that a factor of this rank is multiplied as; None if it has too many."""
    return next((each for each in RANKS if rank <= each), None)


def holds(columns: int, rank: int) -> bool:
    """Whether consuming threads have registers for an expert's gradient (columns, rank), and a block memory for its factor."""
    wide = padded_rank(rank)
    if wide is None or columns % 8 or rank % 8:
        return False
    return (
        _accumulators(steps_of(columns), wide) <= MOST_ACCUMULATORS
        and stages_of(steps_of(columns), wide, TABLES[-1]) > 2
    )


def steps_of(columns: int) -> int:
    """Steps that columns pass in."""
    return -(-columns // STEP_COLUMNS)


def stages_of(steps: int, wide: int, experts: int) -> int:
    """Stages of shared memory, as many as fit."""
    fits = (n for n in range(_MOST_STAGES, 0, -1) if _smem_bytes(n, steps, wide, experts) <= shared_limit(90))
    return next(fits, 0)


def _accumulators(steps: int, wide: int) -> int:
    return steps * wide // 2


def _smem_bytes(stages: int, steps: int, wide: int, experts: int) -> int:
    """sizeof(LowRankSmem): stages, the factor, rows of u, half of du by turns, barriers and the expert tables."""
    pitch = 2 * wide
    slots = stages // steps + 2
    tiles = whole_kib(stages * TILE_ROWS * STEP_COLUMNS * 2 + steps * STEP_COLUMNS * pitch)
    others = 2 * (wide // 2) * 128 * 4 + 16 * stages + 8 + 8 * (experts + 1)
    return tiles + whole_kib(slots * TILE_ROWS * pitch + others)


def _shape(spec: KernelSpec) -> LaunchShape:
    if spec.op == PARTS:
        return LaunchShape(threads=256)
    sizes = (spec.stages, int(spec.option("steps")), int(spec.option("rank")), expert_tables(spec))
    return LaunchShape(threads=384, shared_bytes=_smem_bytes(*sizes))


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.dtype not in (DataType.bf16, DataType.f16) or spec.out is not spec.dtype:
        yield f"{spec.dtype.name} -> {spec.out.name}: wgmma here multiplies bf16 and f16, and stores the same type"
    if not spec.aligned:
        yield "rows are read by 16 bytes"
    if spec.op == PARTS:
        return
    rank, steps = int(spec.option("rank")), int(spec.option("steps"))
    if rank not in RANKS:
        yield f"a rank of {rank}; expected one of {RANKS}"
    if not 0 < _accumulators(steps, rank) <= MOST_ACCUMULATORS:
        yield f"{steps} steps of rank {rank}: {_accumulators(steps, rank)} accumulators a thread, {MOST_ACCUMULATORS} fit"
    if not spec.stages > 2:
        yield f"{spec.stages} stages; expected 3 or more"


FAMILIES = (
    Family(
        name=FAMILY,
        template="low_rank_gradients.cu.j2",
        ops=(FAMILY, PARTS),
        args=struct.Struct("7Pq5i2I0P"),
        shape=_shape,
        values=lambda spec: {"experts": expert_tables(spec)},
        check=_check,
        min_arch=90,
        max_arch=90,
        arch_specific=True,
    ),
)
