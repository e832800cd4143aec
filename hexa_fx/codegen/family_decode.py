"""decode_gemm, decode_down and decode_combine: a layer of few tokens in two or three launches; sm_80 and everything after it.

decode_gemm serves esmm, with or without an activation in its epilogue, in bf16 and fp16, and sorts slots by itself. Its rows lie
by slot, or are weighted and summed (option ``summed``), as those of decode_down are; else decode_combine sums them. From sm_90 on a
launch may begin while the one before still runs (option ``dependent``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hexa_fx.codegen.family import FLOAT_NAMES, HALVES, Args, Family, LaunchShape, shared_limit
from hexa_fx.codegen.family_gemm_sm90 import FAST_MEMORY
from hexa_fx.codegen.family_rows import ID_NAMES
from hexa_fx.codegen.spec import KernelSpec

GEMM, DOWN, COMBINE = "decode_gemm", "decode_down", "decode_combine"
THREADS, COMBINE_THREADS = 256, 128
EXPERTS = (64, 128, 256, 512)
"""Experts that tables in shared memory have room for."""
SLOTS = (512, 2048)
"""Slots that they have room for."""
SUMMED_SLOTS = (64, 512)
"""The same where rows are summed, which wait there, too."""
ROWS = (8, 16, 32, 64)
_WARPS = THREADS // 32
_WEIGHT_BYTES = 16384
_FEWEST_STAGES, _MOST_STAGES = 3, 8
_MOST_ROWS_OF_TWO = 16
"""Of an expert, for which registers and shared memory suffice for two blocks of a multiprocessor."""
DOWN_ROWS = 8
"""Of an expert, that decode_down multiplies at a time."""
MOST_SUMMED_COLUMNS = 32
LONG_LINES = 4096
"""K from which on decode_gemm sums rows faster than decode_down."""
MOST_SHORT_BUCKET, MOST_LONG_BUCKET = 2, 1
"""Up to 2^2 and 2^1 rows an expert on average summed products are faster than general ones, with short and with long lines. On
cards of `FAST_MEMORY` those with long lines are up to 2^2, too, in parts of 16 rows: Mixtral at 9 to 16 tokens takes 1 % less
time there, and 0.2 % more on an H100.
"""
MOST_SLOTS = 32
"""Up to so many slots, and one for an expert, others are: with rows that are not summed, or two tiles of columns a block."""
_OVERHEAD = 1024
"""Shared memory that a block takes beside what it asks for."""


@dataclass(frozen=True)
class DecodeTile:
    """Shape of one kernel of decode_gemm.

    Args:
        rows: of an expert that are multiplied at a time.
        warps_m: warps of a block side by side along the weight's columns, 32 of them each; eight in all, the others share K.
        stages: of the pipeline, 16 KiB of the weight each.
        dependent: the product behind another one begins while that still runs.
        blocks: of a multiprocessor, at most; one where each would have little to do.
    """

    rows: int
    warps_m: int
    stages: int
    dependent: bool = True
    blocks: int = 1


def choose_tile(arch: int, bucket: int, experts: int, slots: int, along_k: bool) -> DecodeTile | None:
    """The tile for experts with 2^`bucket` rows on average; None where shared memory does not hold one.

    Most experts fit into one part, or their weights would be read twice; and the rows beside a tile are few of its bytes. With few
    rows two blocks fit on a multiprocessor: one waits while the other one multiplies. Where there is work for one only, the other
    place is for the second product, whose weights come while the first one ends.

    Args:
        along_k: weights are (E, N, K). Else a tile is at least 64 columns wide, which are 128 bytes of a line.
    """
    rows = 8 if bucket <= 1 else 16 if bucket <= 3 else 32 if bucket <= 4 else 64
    warps_m = {8: 1 if along_k else 2, 16: 2, 32: 2, 64: 4}[rows]
    limit, room_of_two = shared_limit(arch), (shared_limit(arch) - _OVERHEAD) // 2
    tile = DecodeTile(rows, warps_m, 0)
    if rows <= _MOST_ROWS_OF_TWO and arch >= 90:
        limit, tile = room_of_two, replace(tile, blocks=2)
    stages = min(_MOST_STAGES, (limit - shared_bytes(tile, experts, slots)) // _stage_bytes(rows, warps_m))
    return replace(tile, stages=stages) if stages >= _FEWEST_STAGES else None


@dataclass(frozen=True)
class DownTile:
    """Shape of one kernel of decode_down.

    Args:
        tiles: of 16 columns that a block gives.
        stages: of each warp's pipeline, 128 bytes of every column and of eight rows each.
    """

    tiles: int
    stages: int


def down_bytes(tile: DownTile, experts: int, slots: int) -> int:
    """Shared memory of a block: pipelines, sums of rows, tables."""
    slots, lines = room(SUMMED_SLOTS, slots), 16 * tile.tiles
    ring = _WARPS * tile.stages * (lines + DOWN_ROWS) * 128
    tables = _table_bytes(experts, slots)
    return ring + (slots + _WARPS * DOWN_ROWS) * lines * 4 + tables + 6 * slots


def very_few(slots: int, experts: int) -> bool:
    """See `MOST_SLOTS`."""
    return slots <= min(experts, MOST_SLOTS)


def choose_summed(
    card: str, arch: int, bucket: int, experts: int, slots: int, columns: int, k: int
) -> DecodeTile | DownTile | None:
    """The tile of a product whose blocks give so many columns of all tokens, and sum them; None where there is none that serves.

    With long lines a block has enough to do at every expert: decode_gemm. With short ones it would begin anew too often, so its
    warps go over experts by themselves: decode_down. Few slots leave room beside a block of the first product, others none.
    """
    if slots > SUMMED_SLOTS[-1] or columns > MOST_SUMMED_COLUMNS:
        return None
    half, whole = (shared_limit(arch) - _OVERHEAD) // 2, shared_limit(arch)
    if k < LONG_LINES:
        down = DownTile(1 if columns <= 16 else 2, 0)
        beside = slots <= SUMMED_SLOTS[0] and down.tiles == 1
        room_left = (half if beside else whole) - down_bytes(down, experts, slots)
        stages = min(_MOST_STAGES, room_left // (_WARPS * (16 * down.tiles + DOWN_ROWS) * 128))
        fast = bucket <= MOST_SHORT_BUCKET and (down.tiles == 1 or very_few(slots, experts))
        return replace(down, stages=stages) if stages >= _FEWEST_STAGES and fast else None
    if bucket > MOST_LONG_BUCKET + (FAST_MEMORY in card):
        return None
    tile = DecodeTile(ROWS[bucket > MOST_LONG_BUCKET], 1, 0)
    for limit in (half, whole):
        stages = min(_MOST_STAGES, (limit - shared_bytes(tile, experts, slots, True)) // _stage_bytes(tile.rows, 1))
        if stages > _FEWEST_STAGES:
            return replace(tile, stages=stages)
    return None


def candidates() -> list[DecodeTile]:
    """Tiles worth timing; some may not fit a card."""
    sizes = [(8, 1), (8, 2), (8, 4), (16, 2), (16, 4), (32, 4), (64, 4)]
    tiles = [DecodeTile(*size, stages) for size in sizes for stages in (4, 5, 6, 8)]
    return [replace(tile, blocks=n) for tile in tiles for n in (1, 2) if n == 1 or tile.rows <= _MOST_ROWS_OF_TWO]


def shared_bytes(tile: DecodeTile, experts: int, slots: int, summed: bool = False) -> int:
    """Of a block: the pipeline, sums of the warps that share K, and tables that hold these experts and slots."""
    lines = 32 * tile.warps_m
    sums = _WARPS // tile.warps_m * tile.rows * (lines + 4) * 4
    tables = _table_bytes(experts, slots_of(tile, slots, summed))
    rows = slots_of(tile, slots, summed) * (4 + 2 * lines) if summed else 0
    return tile.stages * _stage_bytes(tile.rows, tile.warps_m) + sums + tables + rows


def room(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that holds as many, or the largest."""
    return next((size for size in sizes if wanted <= size), sizes[-1])


def slots_of(tile: DecodeTile, slots: int, summed: bool = False) -> int:
    """Slots that a tile's tables hold: only where room is short as few as suffice, so that there are few kernels."""
    if summed:
        return room(SUMMED_SLOTS, slots)
    return room(SLOTS, slots) if tile.rows == ROWS[0] else SLOTS[-1]


def _table_bytes(experts: int, slots: int) -> int:
    """Of what a block knows about experts and sorted slots."""
    return -(-(8 * (room(EXPERTS, experts) + 1) + 4 * slots) // 16) * 16


def _stage_bytes(rows: int, warps_m: int) -> int:
    return _WEIGHT_BYTES + rows * (32 * _WARPS // warps_m) * 2


def _shape(spec: KernelSpec) -> LaunchShape:
    tile = DecodeTile(int(spec.option("rows")), int(spec.option("warps_m")), spec.stages)
    size = shared_bytes(tile, int(spec.option("experts")), int(spec.option("slots")), bool(spec.option("summed")))
    return LaunchShape(threads=THREADS, shared_bytes=size, dependent=_depends(spec), overlaps=True)


def _down_shape(spec: KernelSpec) -> LaunchShape:
    tile = DownTile(int(spec.option("tiles")), spec.stages)
    size = down_bytes(tile, int(spec.option("experts")), int(spec.option("slots")))
    return LaunchShape(threads=THREADS, shared_bytes=size, dependent=_depends(spec), overlaps=True)


def _depends(spec: KernelSpec) -> bool:
    """A layer's first launch reads what any launch before wrote, and waits for it to end as any other."""
    return bool(spec.option("dependent")) and spec.arch >= 90


def _blocks(spec: KernelSpec) -> dict[str, object]:
    """Blocks of a multiprocessor that registers have to suffice for."""
    return {"blocks": 2 if int(spec.option("rows")) <= _MOST_ROWS_OF_TWO else 1}


_TAKES = {"dtype": HALVES, "id": ID_NAMES, "weights": FLOAT_NAMES, "aligned": (True,)}
_PIPELINE = {"stages": range(2, _MOST_STAGES + 1), "experts": EXPERTS}
_ARGS = Args(
    "P x, w, w2, bias, bias2, d, ids, weights; q x_stride, w_line, w_expert; i slots, n, k, experts; 3I top_k; "
    "i together, columns; 2f act_params"
)

FAMILIES = (
    Family(
        name=GEMM,
        ops=("esmm",),
        args=_ARGS,
        shape=_shape,
        values=_blocks,
        takes={**_TAKES, **_PIPELINE, "rows": ROWS, "warps_m": (1, 2, 4, 8), "slots": (*SLOTS, *SUMMED_SLOTS)},
    ),
    Family(
        name=DOWN,
        ops=("combine",),
        args=_ARGS,
        shape=_down_shape,
        values=lambda spec: {"blocks": 1},
        takes={**_TAKES, **_PIPELINE, "layout": ("nk",), "tiles": (1, 2), "slots": SUMMED_SLOTS},
    ),
    Family(
        name=COMBINE,
        ops=("combine",),
        args=Args("P y, weights, ids, out; i width, top_k, experts, parts"),
        shape=lambda spec: LaunchShape(threads=COMBINE_THREADS, dependent=_depends(spec), overlaps=True),
        takes=_TAKES,
    ),
)
