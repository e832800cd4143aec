"""Which launches hexa::low_rank_gradients makes, without a device."""

import pytest
import torch

from hexa_fx.codegen import render
from hexa_fx.codegen.family_low_rank import BOTH, steps_of
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import gemm
from hexa_fx.cuda.gemm import low_rank_gradients
from hexa_fx.ops.fixed_order import fixed_order
from tests.cuda.cards import HOPPER

E = 8


def empty(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=of, device="meta")


def launched(columns: int, rank: int, rows: int, gathered: bool) -> list[str]:
    v, top_k = (empty(rows, of=torch.int32), 2) if gathered else (None, 1)
    dy, u, c = empty(rows // top_k, columns), empty(rows, rank), empty(E, columns, rank)
    with cuda_choosing.collect(HOPPER) as specs:
        offs, form = empty(E + 1, of=torch.int32), ("kn", torch.float32, 0.5, True)
        du, dc = low_rank_gradients(dy, u, c, empty(rows // 2, 2) if gathered else None, v, offs, top_k, *form)
    assert (du.shape, dc.shape) == (u.shape, (columns, rank, E))
    for spec in specs:
        render(spec)
    return [spec.op for spec in specs]


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(
    ("columns", "rank", "launches"),
    [
        (2048, 16, 1),
        (2816, 8, 1),
        (640, 32, 1),
        (1400, 32, 1),
        (72, 16, 1),
        (4096, 16, 2),
        (7168, 16, 3),
        (28672, 8, 10),
    ],
)
def test_one_reading(columns: int, rank: int, launches: int, gathered: bool) -> None:
    for rows in (2, 32 * E):
        found = launched(columns, rank, rows, gathered)
        if rows == 2 and launches > 3:
            assert "low_rank_gradients" not in found
        else:
            assert found == ["low_rank_gradients", "low_rank_parts"] * launches


@pytest.mark.parametrize(
    ("columns", "rank", "rows"),
    [(51200, 16, 4096), (4096, 32, 4096), (640, 40, 4096), (2048, 12, 4096), (2048, 16, 0)],
    ids=["more columns than launches", "more columns of that rank", "rank", "unaligned", "no rows"],
)
def test_two_readings(columns: int, rank: int, rows: int) -> None:
    assert not {"low_rank_gradients"} & set(launched(columns, rank, rows, True))
    assert not {"low_rank_gradients"} & set(launched(columns, rank, rows, False))


@pytest.mark.parametrize(
    ("op", "wide", "narrow", "layout"),
    [
        ("esmm", "x", "g", "nk"),
        ("esmm", "x", "g", "kn"),
        *(("estmm", *of, to) for of in ("xg", "gx") for to in ("nk", "kn")),
    ],
)
def test_single_products_and_gradients(op: str, wide: str, narrow: str, layout: str) -> None:
    """Of 2048 columns with a factor of 16, of each side, gathered or not."""
    n, offs = 32 * E, empty(E + 1, of=torch.int32)
    for v, top_k in ((None, 1), (empty(n, of=torch.int32), 2)):
        rows = {wide: empty(n // top_k, 2048), narrow: empty(n, 16)}
        with cuda_choosing.collect(HOPPER) as specs:
            if op == "esmm":
                weight = empty(E, 16, 2048) if layout == "nk" else empty(E, 2048, 16)
                result, shape = gemm.esmm(rows["x"], weight, None, v, offs, top_k, layout), (n, 16)
            else:
                index = (v, None) if wide == "x" else (None, v)
                result = gemm.estmm(rows["x"], rows["g"], *index, offs, top_k, layout)
                sides = (rows["g"].shape[1], rows["x"].shape[1])
                shape = (E, *(sides if layout == "nk" else sides[::-1]))
        assert result.shape == shape
        assert ("low_rank" in {spec.family for spec in specs}) == (op == "esmm" or v is not None)
        for spec in specs:
            render(spec)


def test_in_a_fixed_order_launches_do_not_go_by_rows() -> None:
    with fixed_order():
        assert launched(2048, 16, 4096, True)[:2] == ["esmm", "estmm"]


def test_columns_are_dealt_to_few_launches_evenly() -> None:
    assert [steps_of(BOTH, columns, 16, 256, 3) for columns in (2944, 2952, 4096, 7168, 9216)] == [23, 12, 16, 19, 0]
    assert [steps_of(BOTH, columns, 32, 256, 2) for columns in (1408, 1416, 2816, 2824)] == [11, 6, 11, 0]


@pytest.mark.parametrize(("rows", "taken"), [(2047, True), (2048, False)])
def test_a_gradient_alone_is_one_of_experts_with_few_rows(rows: int, taken: bool) -> None:
    v, offs = empty(rows * E, of=torch.int32), empty(E + 1, of=torch.int32)
    with cuda_choosing.collect(HOPPER) as specs:
        gemm.estmm(empty(rows * E, 2048), empty(rows * E, 16), v, None, offs, 1, "nk")
    assert ("low_rank" in {spec.family for spec in specs}) == taken
