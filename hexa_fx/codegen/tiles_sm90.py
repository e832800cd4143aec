"""Which tile and schedule a Hopper kernel takes, by operator and shape. Rules, from the measurements in benchmarks/LOG.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hexa_fx.codegen.cutlass import KernelScheduleType


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
