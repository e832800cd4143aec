"""Which tile a grouped product of the gemm_sm80 family takes: a function of shapes, of nothing read back.

TileSm80 M follows the rows an expert gets on average: a tile much taller than that multiplies padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.codegen.family import shared_limit


@dataclass(frozen=True)
class TileSm80:
    """Tile, stages and warps of one kernel of gemm_sm80."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps_m: int
    warps_n: int


def row_bucket(rows: int, experts: int) -> int:
    """log2 of the rows an expert gets on average, rounded up; 0 for one row or none. The only thing tiles know of T."""
    return ((rows - 1) // (experts or 1)).bit_length() if rows > 1 else 0


def choose_tile(op: str, arch: int, dtype: DataType, math: str, bucket: int, columns: int) -> TileSm80:
    """The tile of one product.

    Args:
        op: ``esmm``, ``estmm`` or ``esfk``.
        arch: compute capability, 80 for 8.0.
        dtype: element type.
        math: ``tensor``, ``fast_f32`` (3xTF32) or ``simt``.
        bucket: `row_bucket` of the launch; the height of tiles whose rows are an expert's.
        columns: columns of the result.
    """
    if math == "simt":
        return TileSm80(64, 64, 16 if dtype == DataType.f32 else 8, 3, 2, 4)
    narrow = columns <= 64
    if dtype == DataType.f32:
        tile = TileSm80(64, 64, 16, 4, 2, 2) if narrow or math == "fast_f32" else TileSm80(128, 128, 16, 4, 2, 2)
        low = TileSm80(16, 64, 16, 4, 1, 4)
    else:
        tile = TileSm80(64, 64, 64, 3, 2, 2) if narrow else TileSm80(128, 128, 32, 4, 2, 2)
        low = TileSm80(16, 64, 64, 4, 1, 4)
    if op != "esmm" and not narrow and dtype != DataType.f32:
        roomy = op == "esfk" and shared_limit(arch) > 2 * 98 * 1024  # two blocks a multiprocessor
        tile = TileSm80(128, 128, 64, 3, 2, 4) if roomy else TileSm80(128, 128, 32, 4, 2, 4)
    if op == "esmm":
        tile = low if bucket <= 4 else _lower(tile) if bucket <= 6 else tile
    if op == "esfk" and bucket <= 6:
        tile = _lower(tile)
    if shared_limit(arch) < 163 * 1024 and tile.stages > 3:  # two blocks a multiprocessor with 100 KiB
        tile = TileSm80(tile.bm, tile.bn, tile.bk, 3, tile.warps_m, tile.warps_n)
    return tile


def candidates(op: str, dtype: DataType, math: str, bucket: int) -> list[TileSm80]:
    """Tiles worth timing for a product; some may not fit a card."""
    if math == "simt":
        return [TileSm80(64, 64, 16 if dtype == DataType.f32 else 8, 3, 2, 4)]
    k = 16 if dtype == DataType.f32 else 32
    square = [TileSm80(64, 64, k, 4, 2, 2), TileSm80(64, 128, k, 4, 2, 2), TileSm80(128, 64, k, 4, 2, 2)]
    large = [TileSm80(128, 128, k, s, *warps) for s in (3, 4) for warps in ((2, 2), (2, 4))]
    large += [TileSm80(128, 128, 2 * k, 3, 2, 4), TileSm80(128, 256, k, 3, 2, 4), TileSm80(256, 128, k, 3, 4, 2)]
    low = [TileSm80(16, 64, 2 * k, 4, 1, 4), TileSm80(16, 128, 2 * k, 4, 1, 4), TileSm80(32, 128, k, 4, 1, 4)]
    if op != "esmm":
        return square + large
    return low + square[:2] if bucket <= 4 else low[2:] + square if bucket <= 6 else square + large


def _lower(tile: TileSm80) -> TileSm80:
    """Half the rows, for experts of 17 to 64 rows."""
    return tile if tile.bm == 64 else TileSm80(tile.bm // 2, tile.bn, tile.bk, tile.stages, tile.warps_m, tile.warps_n)
