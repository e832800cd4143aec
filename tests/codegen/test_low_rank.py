"""low_rank_parts' own text, run on the host: parts of blocks, which share experts in runs of row tiles, against their sums."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hexa_fx.codegen import KernelSpec, get_family
from hexa_fx.codegen.family_low_rank import FAMILY, PART_NUMBERS, PART_SIDE, PARTS, TILE_ROWS
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.formats.format import ceil_div
from tests.codegen.emulated import EmulatedKernel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
COLUMNS, RANK, SCALE = 72, 24, 0.5
LAUNCHES = ((0, 48), (48, 72))
"""Columns of each."""

ROWS = {
    "ragged": [70, 0, 1, 64, 129, 0, 500, 63],
    "one": [0, 0, 0, 1300, 0],
    "none": [0] * 70,
    "many": [(37 * e) % 150 for e in range(70)],
}
"""Rows of each expert."""


def made(rows: list[int], blocks: int) -> tuple[Tensor, Tensor]:
    """Parts as blocks leave them, the others NaN; and the sums of each expert, one row after the other."""
    tiles = [(e, min(TILE_ROWS, of - at)) for e, of in enumerate(rows) for at in range(0, of, TILE_ROWS)]
    parts, sums = torch.full((blocks + len(rows), COLUMNS * RANK), float("nan")), torch.zeros(len(rows), COLUMNS * RANK)
    for block in range(blocks):
        for e, _ in tiles[block * len(tiles) // blocks : (block + 1) * len(tiles) // blocks]:
            tile = torch.randint(-8, 9, (COLUMNS * RANK,)).float()
            parts[block + e] = tile + parts[block + e].nan_to_num(0)
            sums[e] += tile
    return parts, sums.view(-1, COLUMNS, RANK) * SCALE


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("dtype", "layout", "last"),
    [(torch.float32, "kn", True), (torch.bfloat16, "kn", False), (torch.float32, "nk", False)],
    ids=["experts last", "rank minor", "rank major"],
)
def test_parts_of_all_blocks_are_added_up(
    tmp_path: Path, rows: str, dtype: torch.dtype, layout: str, last: bool
) -> None:
    experts = len(ROWS[rows])
    spec = KernelSpec(FAMILY, PARTS, 90, dtype=DTYPES[dtype], layout=layout)  # type: ignore[arg-type]
    kernel = EmulatedKernel(spec.with_options(experts_last=last, experts=256), tmp_path)
    offs = torch.tensor([0, *ROWS[rows]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for blocks in (1, 5, 132):
        parts, expected = made(ROWS[rows], blocks)
        dc = torch.full((COLUMNS, RANK, experts) if last else (experts, COLUMNS * RANK), float("nan"), dtype=dtype)
        for begin, end in LAUNCHES:
            own = parts.view(-1, COLUMNS, RANK)[:, begin:end].contiguous()
            first = dc.data_ptr() + dc.element_size() * begin * (
                RANK * experts if last else 1 if layout == "nk" else RANK
            )
            pointers = (0, offs.data_ptr(), 0, 0, 0, 0, first, own.data_ptr(), 0, 0)
            packed = get_family(FAMILY).args.layout.pack(
                *pointers, 0, 0, experts, COLUMNS, RANK, end - begin, blocks, 0, 0, SCALE
            )
            side, across = (PART_SIDE, ceil_div(experts, PART_SIDE)) if last else (PART_NUMBERS, experts)
            argument = ctypes.create_string_buffer(packed, len(packed))
            grid = (ceil_div((end - begin) * RANK, side), across, 1)
            kernel.queue(0, grid, (ctypes.c_void_p * 1)(ctypes.addressof(argument)))
        found = dc.permute(2, 0, 1) if last else dc.view(experts, RANK, COLUMNS).transpose(1, 2)
        found = found if last or layout == "nk" else dc.view(experts, COLUMNS, RANK)
        assert torch.equal(found.float(), expected)
