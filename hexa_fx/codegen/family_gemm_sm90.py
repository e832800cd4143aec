"""gather_gemm_sm90: ESMM, ESTMM and ESFK for Hopper. Persistent, warp-specialised wgmma; see the header for the algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

from hexa_fx.codegen.cutlass import DataType, DataTypeSize, KernelScheduleType
from hexa_fx.codegen.family import HALVES, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.spec import KernelSpec


@dataclass(frozen=True)
class TileSm90:
    """Tile of one launch.

    Args:
        bm, bn: rows and columns a tile.
        stages: shared-memory stages.
        pingpong: each consumer warpgroup has its own tile; else they share one.
        cluster: CTAs that share a weight tile, or of a weight's gradient the operand that is not gathered, 1 or 2.
        group_m: tiles along M that take one weight tile together (no part of the kernel's identity).
        split: esfk as two launches, dX and then dW, if there is no bias (no part of the kernel's identity).
        swapped: the rows are the columns of wgmma, which go by 16, and the weight's columns its rows. Experts of up to `bm` rows
            are one tile, the rows of larger ones are split evenly. For row products only.
        once: of swapped tiles, weights are the first to leave L2, and stages are given back at once.
    """

    bm: int = 128
    bn: int = 256
    stages: int = 4
    pingpong: bool = False
    cluster: int = 1
    group_m: int = 8
    split: bool = False
    swapped: bool = False
    once: bool = False

    @property
    def row_box(self) -> int:
        """Rows that the copy engine brings at a time, where they are not gathered."""
        return 32 if self.swapped else 64

    @property
    def fetch(self) -> int:
        """Bytes of a weight that come to L2 at a time. A swapped tile is often the only one that reads its weights: what it reads
        next is best fetched with what it reads. Not what leaves L2 first, which may be gone before it is read.
        """
        return 256 if self.swapped and not self.once else 128

    @property
    def kernel_schedule(self) -> KernelScheduleType:
        """CUTLASS's name of the schedule."""
        if self.pingpong:
            return KernelScheduleType.TmaWarpSpecializedPingpong
        return KernelScheduleType.TmaWarpSpecializedCooperative


COOPERATIVE = TileSm90()
PINGPONG = TileSm90(bm=64, stages=3, pingpong=True)
SWAPPED = TileSm90(bm=288, bn=128, swapped=True)


MANY_EXPERTS = 256
"""Experts beyond which the tables in shared memory leave less room for tiles."""

FEW_ROWS = 56
"""Rows an expert up to which the activation's backward is fastest by 64 rows. The other products never are: one tile of 128 reads
the weights once for an expert of 65 rows.
"""

STREAMED = replace(SWAPPED, bm=128, stages=6)

FAST_MEMORY = "H200"
"""Cards on which streamed weights leave L2 first: layers of few tokens take 0.5 to 5 % less time there. On an H100, whose memory is
slower by 30 %, they take up to 4 % more. Tuning tries both.
"""
STREAMED_TILES = (STREAMED, replace(STREAMED, once=True))

NARROW = replace(COOPERATIVE, bn=64, stages=8)
"""For products of up to `NARROW_COLUMNS` columns, such as low-rank factors, which only stream their rows."""

NARROW_COLUMNS = 64

WHOLE = {128: replace(SWAPPED, bm=160, stages=5), 256: SWAPPED}
"""By rows an expert, about a multiple of 128: many experts have a few more then, which would be a tile of 128 of their own."""

ABOUT = 16
"""How many rows off those still are."""

CLUSTER_ROWS = 128
"""Rows an expert beyond which two tiles of one expert share what they can: fewer reads from L2, and so less power."""

CLUSTER_DEPTH = 1024
"""Contraction from which plain products gain by that. Blocks of a cluster wait for each other at every tile."""

STREAMED_ROWS = {"esmm": min(WHOLE) - ABOUT, "esmm_act": CLUSTER_ROWS}
"""Rows an expert up to which a product streams weights rather than multiplies: as columns of wgmma its rows go by 16, not by 64,
and most experts are one tile."""


_WIDE = (COOPERATIVE, replace(COOPERATIVE, group_m=16))
_PAIRED = replace(COOPERATIVE, cluster=2)
_ROWS = (*_WIDE, _PAIRED)
CANDIDATES = {
    "esmm": (*_ROWS, SWAPPED, replace(SWAPPED, cluster=2)),
    "esmm_act": (*_ROWS, SWAPPED),
    "esmm_act_backward": (*_ROWS, PINGPONG),
    "estmm": _ROWS,
    "esfk": (COOPERATIVE, _PAIRED, replace(_PAIRED, split=True)),
}
"""Tiles worth timing, by operator."""

NARROW_CANDIDATES = (NARROW, replace(NARROW, bn=128, stages=6), COOPERATIVE)
"""Those of products of up to `NARROW_COLUMNS` columns."""

NARROW_OPS = ("esmm", "estmm", "esfk")
"""Operators that have them."""

ROW_LIMITS = (FEW_ROWS, CLUSTER_ROWS, *(rows + off for rows in WHOLE for off in (-ABOUT, ABOUT)))
"""Rows an expert at which rules change besides the limits of buckets."""


def why_not_swapped(op: str, glu: str, layout: str) -> Iterator[str]:
    """Why a product has no swapped tiles, if it has none."""
    if op not in ("esmm", "esmm_act"):
        yield f"{op} has no swapped tile; esmm and esmm_act have"
    if glu in ("interleaved", "split"):
        yield f"{glu} gate and up columns: a swapped tile takes them side by side (concat)"
    if glu == "concat" and layout == "kn":
        yield "gate and up of an (E, K, N) weight: a swapped tile mixes them by rows, of (E, N, K)"


def swaps(op: str, glu: str, layout: str) -> bool:
    """Whether a product has swapped tiles."""
    return not any(why_not_swapped(op, glu, layout))


def choose_tile(
    op: str,
    rows: int,
    experts: int,
    columns: int,
    depth: int = 0,
    swapped: bool = False,
    turned: bool = False,
    card: str = "",
) -> TileSm90:
    """The tile for `op`.

    Args:
        op: esmm, esmm_act, esmm_act_backward, estmm, esfk.
        rows: n, routed rows (a shape, never a count read from the device).
        experts: E.
        columns: columns of the weight (row tiles), second feature dimension (weight tiles).
        depth: contraction of a plain product.
        swapped: it `swaps`.
        turned: a weight's gradient is stored transposed.
        card: its name.
    """
    mean, many = rows / max(experts, 1), experts > MANY_EXPERTS
    if op == "esmm_act_backward":  # h is staged in shared memory too
        if mean <= FEW_ROWS:
            return replace(PINGPONG, stages=2) if many else PINGPONG
        return replace(COOPERATIVE, bn=128) if many else COOPERATIVE
    if op in NARROW_OPS and columns <= NARROW_COLUMNS:
        return NARROW
    if swapped and mean <= STREAMED_ROWS[op]:
        return STREAMED_TILES[FAST_MEMORY in card]
    if swapped and op == "esmm" and not many:  # gathered rows of large experts would be read from L2 too often
        for rows_an_expert, tile in WHOLE.items():
            if -ABOUT < mean - rows_an_expert <= ABOUT:
                return tile
    if mean <= CLUSTER_ROWS or (op == "esmm" and depth < CLUSTER_DEPTH) or (op == "estmm" and turned):
        return COOPERATIVE
    return replace(_PAIRED, split=op == "esfk")


ROW_OPS = ("esmm", "esmm_act", "esmm_act_backward")
"""Operators made of row tiles. ``esmm_act_backward`` is esmm with activate_backward folded into its epilogue."""

SCHEDULES = {
    KernelScheduleType.TmaWarpSpecializedCooperative: "cooperative",
    KernelScheduleType.TmaWarpSpecializedPingpong: "pingpong",
}
TABLES = (256, 1024)
"""Experts that the tables in shared memory have room for."""

MAX_EXPERTS = TABLES[-1]
LINE_BYTES = 128
"""Of shared memory, as the copy engine and wgmma swizzle it: a step of the contraction."""

CHUNK_BYTES = 16 * LINE_BYTES
"""What a warp stores at a time: 16 rows."""

INNER = 16
"""Contraction of one wgmma of 16-bit operands."""

ARGS = Args(
    "P v, offs, queue, a, out, act, bias, bias_up, h, slot_scale, row_dot, p, dw, db; i n, experts; I div_mul, div_shift; "
    "i a_ld, out_ld, act_ld, h_ld, K, N, bias_ld, p_ld, R, C, group_m; 2f act_params"
)
"""hexa::sm90::GroupedParams, in its order."""


def gemm_shape(spec: KernelSpec) -> SimpleNamespace:
    """What the template states beyond the spec, from which all of it follows.

    Options: ``store_h``, ``transpose`` (dW as (E, C, R)), ``cluster``, ``experts`` (room in the tables), ``swapped`` (see
    mma/swapped_sm90.cuh), ``once`` (of these, weights leave L2 first), ``low_rank`` (row tiles add a second product, of which a
    step has so many parts of 16), ``listed`` (experts' matrices lie apart, see types/places.cuh).
    """
    row, weight = spec.op != "estmm", spec.op in ("estmm", "esfk")
    kind = {"esmm_act": "activate", "esmm_act_backward": "activate_backward"}.get(spec.op, "store")
    paired = kind == "activate" and spec.glu in ("concat", "split")
    widths = swapped_widths(spec.bm) if _swapped(spec) else ()
    inter = kind == "activate" and spec.glu == "interleaved"
    return SimpleNamespace(
        schedule="swapped" if _swapped(spec) else SCHEDULES[spec.schedule],
        swapped=_swapped(spec),
        once=bool(spec.option("once")),
        widths=widths,
        wgmma_columns=tuple(sorted({part for rows in widths for part in wgmma_parts(rows)})),
        ops=row + 2 * weight,
        gather_rows=spec.gather and spec.op in ROW_OPS,
        gather_weight=spec.gather and weight,
        epilogue=kind,
        store_h=bool(spec.option("store_h", True)),
        split_weight=paired and spec.glu == "split",
        paired_weight=paired,
        weight_column_scale=2 if inter else 1,
        row_columns=spec.bn // 2 if paired or inter else spec.bn,
        transpose_weight=bool(spec.option("transpose", False)),
        column_sums=spec.op == "esfk",
        low_rank=int(spec.option("low_rank")),
        added_in_staging=adds_in_staging(spec),
        borrow=_borrows(spec),
        staging_bytes=_chunks(spec) * CHUNK_BYTES,
        max_experts=expert_tables(spec),
        producer_registers=_registers(spec)[0],
        consumer_registers=_registers(spec)[1],
    )


def _registers(spec: KernelSpec) -> tuple[int, int]:
    """Registers a thread of the loading and of the two consuming warpgroups; 504 fit. Gathering warps keep many addresses."""
    if not spec.gather:
        return (40, 232)
    return (88, 208) if _swapped(spec) else (72, 216)


def _borrows(spec: KernelSpec) -> bool:
    """Whether the gradient's epilogue works in a stage of the pipeline too: a large enough one, that both warpgroups share."""
    return spec.op == "esmm_act_backward" and not _pingpong(spec) and spec.bn == 256


def adds_in_staging(spec: KernelSpec) -> bool:
    """Whether the operands of a second product lie where the epilogue's chunks do: both of a warpgroup, of `INNER` columns. The
    gradient's epilogue has h come there while the tile is multiplied.
    """
    rows = spec.bm if _pingpong(spec) else spec.bm // 2
    room = 4 * _chunks(spec) * CHUNK_BYTES
    fits = (rows + spec.bn) * INNER * _bits(spec) // 8 <= room
    return spec.option("low_rank") == 1 and spec.op != "esmm_act_backward" and not _swapped(spec) and fits


def _chunks(spec: KernelSpec) -> int:
    """Chunks of staging a warp: two where they fit, so that one is written while the one before it leaves.

    The gradient's epilogue keeps two buffers of h and one of a; one of h if it borrows a stage.
    """
    if spec.op != "esmm_act_backward":
        return 2 if _smem_bytes(spec, 2) <= shared_limit(spec.arch) else 1
    parts = 1 if spec.glu == "none" else 2
    return parts if _borrows(spec) else 2 * parts + 1


def _smem_bytes(spec: KernelSpec, chunks: int) -> int:
    """sizeof(Smem): stages, epilogue staging, barriers, the ring of tiles and the expert tables."""
    stages = spec.stages * (spec.bm + spec.bn) * spec.bk * _bits(spec) // 8
    return whole_kib(stages + 8 * chunks * CHUNK_BYTES + bookkeeping_bytes(spec))


def bookkeeping_bytes(spec: KernelSpec) -> int:
    """Barriers, the ring of tiles and the expert tables."""
    tables = 24 * spec.stages + 16 * 4 + 16 * 8 + 48 * 4 + 10 * expert_tables(spec) + 14
    return -(-tables // 8) * 8 + 8


def whole_kib(size: int) -> int:
    """As many bytes, rounded up to a KiB."""
    return -(-size // 1024) * 1024


def _bits(spec: KernelSpec) -> int:
    return int(DataTypeSize[spec.dtype])


def expert_tables(spec: KernelSpec) -> int:
    """How many experts the tables hold."""
    return int(spec.option("experts", TABLES[0]))


def _shape(spec: KernelSpec) -> LaunchShape:
    return LaunchShape(threads=384, shared_bytes=_smem_bytes(spec, _chunks(spec)), cluster=cluster_of(spec))


def cluster_of(spec: KernelSpec) -> int:
    """Blocks that share a tile."""
    return int(spec.option("cluster", 1))


def swapped_widths(rows: int) -> tuple[int, ...]:
    """What a swapped tile of up to `rows` rows is multiplied as: a main loop each, so the narrow ones are fewer."""
    return tuple(width for width in (*range(32, 128, 32), *range(128, rows + 1, 16)) if width <= rows)


def wgmma_parts(rows: int) -> tuple[int, ...]:
    """The instructions that multiply `rows` rows: up to 256 columns each."""
    return (rows,) if rows <= 256 else (256, rows - 256)


def _check(spec: KernelSpec) -> Iterable[str]:
    if spec.op not in ROW_OPS and spec.option("low_rank"):
        yield f"{spec.op} has no second product; row products have"
    if _swapped(spec):
        yield from _check_swapped(spec)
        return
    if spec.option("once"):
        yield "weights that leave L2 first are for swapped tiles, of which few share them"
    if spec.bm not in (64, 128) or spec.bn not in (64, 128, 256) or spec.bk != line_elements(spec.dtype):
        yield f"tile {spec.bm}x{spec.bn}x{spec.bk}; expected 64 or 128 x 64, 128 or 256 x {line_elements(spec.dtype)}"
    if spec.bn == 64 and (spec.op not in NARROW_OPS or cluster_of(spec) > 1):
        yield f"{spec.op}: tiles of 64 columns are for plain narrow products, which share nothing in a cluster"
    if spec.glu in ("concat", "split") and spec.op == "esmm_act" and spec.bn % 128:
        yield f"gate and up halves of {spec.bn // 2} columns; each must be a multiple of 64"
    accumulators = spec.bm * spec.bn // (128 if _pingpong(spec) else 256)
    if accumulators > 192:
        yield f"{accumulators} accumulator registers a thread; 192 fit"
    if spec.bm == 64 and not _pingpong(spec):
        yield "a cooperative tile has 128 rows"
    if spec.op not in ROW_OPS and _pingpong(spec):
        yield f"{spec.op}: both warpgroups of one block share a weight tile, so no ping-pong"


def _check_swapped(spec: KernelSpec) -> Iterable[str]:
    yield from why_not_swapped(spec.op, spec.glu, spec.layout)
    if spec.bm % 32 or not 32 <= spec.bm <= 320 or spec.bn != 128 or spec.bk != line_elements(spec.dtype):
        yield f"swapped tile {spec.bm}x{spec.bn}x{spec.bk}; expected 32 to 320 by 32 x 128 x {line_elements(spec.dtype)}"
    if _pingpong(spec):
        yield "both warpgroups share a swapped tile: no ping-pong"
    if cluster_of(spec) > 1 and spec.gather:
        yield "clusters of swapped tiles share rows that the copy engine brings, not gathered ones"


def line_elements(dtype: DataType) -> int:
    """Elements of a line of shared memory."""
    return 8 * LINE_BYTES // int(DataTypeSize[dtype])


def _swapped(spec: KernelSpec) -> bool:
    return bool(spec.option("swapped", False))


def _pingpong(spec: KernelSpec) -> bool:
    return spec.schedule is KernelScheduleType.TmaWarpSpecializedPingpong


FAMILIES = (
    Family(
        name="gather_gemm_sm90",
        ops=(*ROW_OPS, "estmm", "esfk"),
        args=ARGS,
        shape=_shape,
        values=lambda spec: {"shape": gemm_shape(spec)},
        takes={"dtype": HALVES, "schedule": SCHEDULES, "aligned": (True,)},
        adds=("estmm", "esfk"),
        adds_narrow=True,
        check=_check,
        min_arch=90,
        arch_specific=True,
    ),
)
