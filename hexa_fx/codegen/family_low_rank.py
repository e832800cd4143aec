"""low_rank: products with factors of a few columns and these factors' gradients on Hopper; see kernels/low_rank_sm90.cuh."""

from __future__ import annotations

from collections.abc import Iterable

from hexa_fx.codegen.family import FLOATS, HALVES, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.family_gemm_sm90 import expert_tables, whole_kib
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.formats.format import ceil_div

FAMILY = "low_rank"
BOTH = "low_rank_gradients"
PARTS = "low_rank_parts"
"""The operator of the second launch, which adds up what blocks leave of experts that they share."""

STEP_COLUMNS = 128
"""Columns of the rows that pass through shared memory at a time, half of them for each consuming warpgroup."""

TILE_ROWS = 64
RANKS = (16, 32)
"""What ranks are rounded up to."""

PART_NUMBERS = 256 * 8
"""Of an expert's gradient, that a block of the second launch adds up."""

PART_SIDE = 64
"""Of an expert's gradient, and of experts, that change places in a block of it."""

MOST_ACCUMULATORS = 184
"""Of an expert's gradient, for which a consuming thread has registers."""

WEIGHTS = ("bf16", "f16", "f32")
"""Types of weights that rows of u are multiplied by."""

_MOST_STAGES, _FEWEST_STAGES = 8, 3


def padded_rank(rank: int) -> int:
    """Columns that a factor of this rank is multiplied as; 0 if it has too many."""
    return next((each for each in RANKS if rank <= each), 0)


def steps_of(op: str, columns: int, rank: int, experts: int, most: int) -> int:
    """Steps that columns pass in, of each of the launches that they are dealt to: as few as have registers for their part of an
    expert's gradient, and shared memory for that of its factor. 0 if these are too many, or sizes no multiples of 8.

    Args:
        op: which products it gives.
        columns, rank: of a factor.
        experts: that the tables hold.
        most: launches.
    """
    wide = padded_rank(rank)
    if not wide or columns % 8 or rank % 8:
        return 0
    dealt = (ceil_div(ceil_div(columns, STEP_COLUMNS), launches) for launches in range(1, most + 1))
    return next((steps for steps in dealt if not any(_lacks(op, steps, wide, experts))), 0)


def stages_of(op: str, steps: int, wide: int, experts: int) -> int:
    """Stages of shared memory, as many as fit."""
    fits = (n for n in range(_MOST_STAGES, 0, -1) if _smem_bytes(op, n, steps, wide, experts) <= shared_limit(90))
    return next(fits, 0)


def _lacks(op: str, steps: int, wide: int, experts: int) -> Iterable[str]:
    numbers = steps * wide // 2
    if _sums(op) and numbers > MOST_ACCUMULATORS:
        yield f"{steps} steps of rank {wide}: {numbers} accumulators a thread, {MOST_ACCUMULATORS} fit"
    if stages_of(op, steps, wide, experts) < _FEWEST_STAGES:
        yield f"{steps} steps of rank {wide} leave no room for {_FEWEST_STAGES} stages"


def _multiplies(op: str) -> bool:
    return op in (BOTH, "esmm")


def _sums(op: str) -> bool:
    return op in (BOTH, "estmm")


def _smem_bytes(op: str, stages: int, steps: int, wide: int, experts: int) -> int:
    """sizeof(LowRankSmem): stages, the factor, rows of u, half of du by turns, barriers and the expert tables."""
    pitch = 2 * wide
    factor = steps * STEP_COLUMNS * pitch if _multiplies(op) else 1024
    u = (stages // steps + 2) * TILE_ROWS * pitch if _sums(op) else 1024
    du, barriers, tables = wide * STEP_COLUMNS * 4, 16 * stages + 8 * (stages // steps + 4), 8 * (experts + 1)
    return whole_kib(stages * TILE_ROWS * STEP_COLUMNS * 2 + factor + u + du + barriers + tables)


def _shape(spec: KernelSpec) -> LaunchShape:
    if spec.op == PARTS:
        return LaunchShape(threads=256, dependent=True)
    sizes = (spec.stages, int(spec.option("steps")), int(spec.option("rank")), expert_tables(spec))
    return LaunchShape(threads=384, shared_bytes=_smem_bytes(spec.op, *sizes))


def _values(spec: KernelSpec) -> dict[str, object]:
    order = "rank_major" if spec.layout == "nk" else "rank_minor"
    return {
        "rank_major": spec.layout == "nk",
        "order": "experts_last" if spec.option("experts_last") else order,
        "multiplies": _multiplies(spec.op),
        "sums": _sums(spec.op),
        "experts": expert_tables(spec),
        "tile_rows": TILE_ROWS,
        "part_numbers": PART_NUMBERS,
        "part_side": PART_SIDE,
    }


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.op == PARTS:
        return
    if spec.dtype not in HALVES:
        yield f"{spec.dtype.name}: wgmma here multiplies bf16 and f16"
    rank, steps = int(spec.option("rank")), int(spec.option("steps"))
    if rank not in RANKS or steps < 1:
        yield f"{steps} steps of rank {rank}; expected one or more, and one of {RANKS}"
        return
    if spec.option("weights") and (spec.option("weights") not in WEIGHTS or not spec.gather):
        yield f"weights are {spec.option('weights')}; expected {' or '.join(WEIGHTS)}, of slots that rows are gathered by"
    yield from _lacks(spec.op, steps, rank, expert_tables(spec))


ARGS = Args(
    "P v, offs, rows, u, weights, du, dc, parts, before, beyond; q stride; i n, experts, N, R, columns, blocks; "
    "I div_mul, div_shift; f scale"
)

FAMILIES = (
    Family(
        name=FAMILY,
        ops=(BOTH, "esmm", "estmm", PARTS),
        args=ARGS,
        shape=_shape,
        values=_values,
        takes={"dtype": FLOATS[:3], "aligned": (True,)},
        check=_check,
        min_arch=90,
        arch_specific=True,
    ),
)
