"""Tables of measured tiles."""

from dataclasses import replace

import pytest

from hexa_fx.codegen.tuned import Problem, TunedTable, shipped

HERE = Problem("gemm_sm80", "esmm", "bf16 tensor", True, rows=10, inner=2048, columns=768)
TILE = {"bm": 128, "bn": 128}


def test_round_trip() -> None:
    table = TunedTable("A Card").with_entry(HERE, TILE, 1.5).with_entry(replace(HERE, rows=3), {"bm": 16}, 0.25)
    assert TunedTable.from_json(table.to_json()).entries == table.entries
    assert TunedTable.from_json(TunedTable("A Card").to_json()).entries == {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (HERE, True),
        (replace(HERE, rows=11), True),
        (replace(HERE, columns=1024), True),
        (replace(HERE, rows=12), False),
        (replace(HERE, inner=8192), False),
        (replace(HERE, gather=False), False),
        (replace(HERE, op="estmm"), False),
        (replace(HERE, dtype="f32 tensor"), False),
    ],
)
def test_a_shape_takes_its_neighbours_tile_and_no_strangers(other: Problem, found: bool) -> None:
    table = TunedTable("A Card").with_entry(HERE, TILE, 1.0)
    assert table.find(other) == (TILE if found else None)


def test_the_nearest_of_several() -> None:
    table = TunedTable("A Card").with_entry(HERE, TILE, 1.0).with_entry(replace(HERE, rows=11), {"bm": 256}, 1.0)
    assert table.find(replace(HERE, rows=12)) == {"bm": 256}


def test_what_ships_can_be_read() -> None:
    assert isinstance(shipped("NVIDIA H200"), TunedTable)
    assert shipped("NVIDIA Unheard Of").entries == {}
