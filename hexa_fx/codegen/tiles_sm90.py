"""Which tile and schedule a Hopper kernel takes, by operator and shape. Rules, from the measurements in docs/kernels.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass_library import KernelScheduleType


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
    """

    bm: int = 128
    bn: int = 256
    stages: int = 4
    pingpong: bool = False
    cluster: int = 1
    group_m: int = 8
    chunks: int = 2
    lag: int = 2

    @property
    def kernel_schedule(self) -> KernelScheduleType:
        """CUTLASS's name of the schedule."""
        if self.pingpong:
            return KernelScheduleType.TmaWarpSpecializedPingpong
        return KernelScheduleType.TmaWarpSpecializedCooperative


COOPERATIVE = TileChoice()
PINGPONG = TileChoice(bn=128, stages=6, pingpong=True, chunks=1, lag=0)
PINGPONG_LOW = TileChoice(bm=64, stages=5, pingpong=True, chunks=1, lag=0)


FEW_ROWS = 96
"""Rows an expert up to which 64-row tiles waste least."""


_COOP = (
    COOPERATIVE,
    replace(COOPERATIVE, lag=0),
    replace(COOPERATIVE, lag=1),
    replace(COOPERATIVE, lag=3),
    replace(COOPERATIVE, group_m=16),
    replace(COOPERATIVE, stages=3, chunks=4),
)
_ROW_TILES = (*_COOP, PINGPONG, replace(PINGPONG, stages=5, chunks=3), PINGPONG_LOW)
_BACKWARD_TILES = tuple(replace(COOPERATIVE, stages=3, lag=lag) for lag in (0, 1, 2)) + (
    replace(PINGPONG, stages=4),
    replace(PINGPONG_LOW, stages=3),
)
CANDIDATES = {
    "esmm": _ROW_TILES,
    "esmm_act": _ROW_TILES,
    "esmm_act_backward": _BACKWARD_TILES,
    "estmm": tuple(tile for tile in _ROW_TILES if tile.bm == 128),
    "esfk": tuple(tile for tile in _ROW_TILES if tile.bm == 128),
}
"""Tiles worth timing, by operator."""


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
    few = rows <= FEW_ROWS * max(experts, 1) and op in ("esmm", "esmm_act", "esmm_act_backward")
    tile = PINGPONG_LOW if few else COOPERATIVE
    if op == "esmm_act_backward":  # h is staged in shared memory too
        return replace(tile, stages=3)
    return tile
