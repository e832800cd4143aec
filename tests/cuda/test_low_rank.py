"""Which launches hexa::low_rank_gradients makes, without a device."""

from __future__ import annotations

import pytest
import torch

from hexa_fx.codegen import render
from hexa_fx.codegen.family_low_rank import BOTH, holds
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import gemm
from hexa_fx.cuda.low_rank import low_rank_gradients
from hexa_fx.ops.fixed_order import fixed_order
from tests.cuda.cards import HOPPER

E = 8


def launched(columns: int, rank: int, rows: int, gathered: bool, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

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
@pytest.mark.parametrize(("columns", "rank"), [(2048, 16), (2816, 8), (640, 64), (1400, 32), (72, 16)])
def test_one_reading(columns: int, rank: int, gathered: bool) -> None:
    assert launched(columns, rank, 32 * E, gathered) == ["low_rank_gradients", "low_rank_parts"]


@pytest.mark.parametrize(
    ("columns", "rank", "rows"),
    [(4096, 16, 4096), (2048, 32, 4096), (2048, 72, 4096), (2048, 12, 4096), (2048, 16, 31 * E)],
    ids=["more columns than registers", "more columns of that rank", "rank", "unaligned", "few rows"],
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

    def empty(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

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


def test_what_fits_into_registers() -> None:
    assert holds(BOTH, 2944, 16, 256)
    assert not holds(BOTH, 2952, 16, 256)
    assert holds(BOTH, 1408, 32, 256)
    assert not holds(BOTH, 1416, 32, 256)
