"""Autotuning: measured once a bucket, kept on disk, never without being asked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tuned import Problem, TunedTable
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import product as cuda_product
from hexa_fx.errors import KernelError
from tests.cuda.cards import AMPERE

PROBLEM = Problem("gemm_sm80", "esmm", "bf16 tensor", False, 8, 1024, 1024)
TILES = [{"bm": 16}, {"bm": 64}, {"bm": 128}]


def spec_of(tile: dict[str, int]) -> KernelSpec:
    """Never valid: nothing is built here."""
    return KernelSpec("gemm_sm80", "esmm", 80, bm=tile["bm"]).with_options(warps_m=3, warps_n=3)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: AMPERE._replace(name="A Card/1"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_product, "_done", set())
    cuda_choosing.forget_choices()
    yield tmp_path / "tuned" / "A_Card_1.json"
    cuda_choosing.forget_choices()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heights that were timed; 64 is the fastest and 16 cannot be built."""
    seen: list[int] = []

    def milliseconds(tile: dict[str, int], run: object) -> float | None:
        seen.append(tile["bm"])
        return {16: None, 64: 1.0, 128: 2.0}[tile["bm"]]

    monkeypatch.setattr(cuda_product, "_milliseconds", milliseconds)
    return seen


def test_the_best_tile_is_kept_on_disk_and_found(timed: list[int], card: Path) -> None:
    assert cuda_product.tuned_tile(PROBLEM, "A Card/1") is None
    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None) == {"bm": 64}
    assert cuda_product.tuned_tile(PROBLEM, "A Card/1") == {"bm": 64}
    assert TunedTable.from_json(card.read_text()).find(PROBLEM) == {"bm": 64}
    assert timed == [16, 64, 128]


def test_a_bucket_is_measured_once_even_over_processes(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None)
    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None) is None
    monkeypatch.setattr(cuda_product, "_done", set())
    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None) is None
    assert len(timed) == 3


def test_a_tile_of_another_version_is_measured_again(timed: list[int], card: Path) -> None:
    card.parent.mkdir()
    card.write_text(TunedTable("A Card").with_entry(PROBLEM, {"bm": 128, "lag": 2}, 1.0).to_json())
    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None) == {"bm": 64}
    assert cuda_product.tuned_tile(PROBLEM, "A Card/1") == {"bm": 64}


def test_nothing_is_measured_inside_a_capture(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None) is None
    assert timed == []


def test_a_damaged_table_is_as_none(timed: list[int], card: Path) -> None:
    card.parent.mkdir()
    card.write_text('{"card": "A Card", "tiles": [{"family": 1}]}')
    assert cuda_product.tuned_tile(PROBLEM, "A Card/1") is None
    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, lambda tile: None) == {"bm": 64}


def test_a_tile_that_cannot_be_generated_is_passed_over() -> None:
    def refuse(tile: object) -> None:
        raise KernelError("no")

    assert cuda_product.tune(PROBLEM, 0, TILES, spec_of, refuse) is None


def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cuda_product.autotuning()
    monkeypatch.setenv("HEXA_FX_AUTOTUNE", "1")
    cuda_choosing.forget_choices()
    assert cuda_product.autotuning()
