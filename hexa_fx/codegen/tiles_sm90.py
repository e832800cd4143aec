"""Which tile and schedule a Hopper kernel takes, by operator and shape. Rules, from the measurements in docs/kernels.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hexa_fx.codegen.cutlass import KernelScheduleType


@dataclass(frozen=True)
class TileChoice:
    """Tile of one launch.

    Args:
        bm, bn: rows and columns a tile.
        stages: shared-memory stages.
        pingpong: each consumer warpgroup has its own tile; else they share one.
        cluster: CTAs that share a weight tile, 1 or 2.
        group_m: tiles along M that take one weight tile together (no part of the kernel's identity).
        chunks: 16 x 64 chunks of shared memory a warp, through which results leave.
        lag: steps that the second warpgroup of a shared tile stays behind the first.
        split: esfk as two launches, dX and then dW (no part of the kernel's identity).
        swapped: the rows are the columns of wgmma, which go by 16, and the weight's columns its rows. Experts of up to `bm` rows
            are one tile, the rows of larger ones are split evenly. For row products only.
    """

    bm: int = 128
    bn: int = 256
    stages: int = 4
    pingpong: bool = False
    cluster: int = 1
    group_m: int = 8
    chunks: int = 2
    lag: int = 2
    split: bool = False
    swapped: bool = False

    @property
    def row_box(self) -> int:
        """Rows that the copy engine brings at a time, where they are not gathered."""
        return 32 if self.swapped else 64

    @property
    def fetch(self) -> int:
        """Bytes of a weight that come to L2 at a time. A swapped tile is often the only one that reads its weights:
        what it reads next is best fetched with what it reads.
        """
        return 256 if self.swapped else 128

    @property
    def kernel_schedule(self) -> KernelScheduleType:
        """CUTLASS's name of the schedule."""
        if self.pingpong:
            return KernelScheduleType.TmaWarpSpecializedPingpong
        return KernelScheduleType.TmaWarpSpecializedCooperative


COOPERATIVE = TileChoice()
PINGPONG = TileChoice(bn=128, stages=6, pingpong=True, chunks=1, lag=0)
PINGPONG_LOW = TileChoice(bm=64, stages=5, pingpong=True, chunks=1, lag=0)
SWAPPED = TileChoice(bm=288, bn=128, chunks=1, lag=0, swapped=True)


MANY_EXPERTS = 256
"""Experts beyond which the tables in shared memory leave less room for tiles."""

FEW_ROWS = 56
"""Rows an expert up to which the activation's backward is fastest by 64 rows. The other products never are: one tile of 128 reads
the weights once for an expert of 65 rows.
"""

CLUSTER_ROWS = 128
"""Rows an expert beyond which two tiles of one expert share the first projection's weights."""


_SHARED = (
    COOPERATIVE,
    replace(COOPERATIVE, lag=0),
    replace(COOPERATIVE, group_m=16),
    replace(COOPERATIVE, cluster=2, lag=0),
)
CANDIDATES = {
    "esmm": (*_SHARED, PINGPONG_LOW, SWAPPED, replace(SWAPPED, cluster=2)),
    "esmm_act": (*_SHARED, PINGPONG_LOW, SWAPPED),
    "esmm_act_backward": (*_SHARED, replace(PINGPONG, stages=4), replace(PINGPONG_LOW, stages=3)),
    "estmm": (*_SHARED, replace(COOPERATIVE, stages=3, chunks=4)),
    "esfk": (COOPERATIVE, replace(COOPERATIVE, lag=0), replace(COOPERATIVE, split=True)),
}
"""Tiles worth timing, by operator."""

ROW_LIMITS = (FEW_ROWS, CLUSTER_ROWS)
"""Rows an expert at which rules change besides the limits of buckets."""


def choose_tile(op: str, rows: int, experts: int, inner: int, columns: int, gather: bool) -> TileChoice:
    """The tile for `op`.

    Args:
        op: esmm, esmm_act, esmm_act_backward, estmm, esfk.
        rows: n, routed rows (a shape, never a count read from the device).
        experts: E.
        inner: contraction of row tiles; first feature dimension of weight tiles.
        columns: columns of the weight (row tiles), second feature dimension (weight tiles).
        gather: a row operand is gathered.
    """
    mean, many, tile = rows / max(experts, 1), experts > MANY_EXPERTS, replace(COOPERATIVE, lag=0)
    if op == "esmm_act_backward":  # h is staged in shared memory too
        if mean <= FEW_ROWS:
            return replace(PINGPONG_LOW, stages=2 if many else 3)
        return replace(tile, bn=128) if many else tile
    if op == "esmm_act" and mean > CLUSTER_ROWS:  # fewer reads from L2, less power
        tile = replace(tile, cluster=2)
    return replace(tile, chunks=1) if many else tile
