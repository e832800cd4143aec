"""Products with factors of a few columns, and their gradients, of one reading of the rows, against float64."""

from collections.abc import Iterator

import pytest
import torch

from hexa_fx.cuda import calls, low_rank_sm90
from hexa_fx.ops import low_rank_gradients
from tests.gpu.cases import ROUTINGS, assert_close, make_routing, randn, reference_esmm, reference_estmm

EXPERTS, TOP_K = 7, 3
SIZES = (
    *((2048, 16), (1536, 16), (328, 8), (200, 24), (2816, 16), (1400, 32), (72, 16)),
    *((4096, 16), (7168, 16), (2952, 8), (1416, 32), (4096, 32)),
)
"""Columns and rank; those of the second line are dealt to several launches."""


@pytest.fixture(autouse=True)
def any_number_of_rows(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(low_rank_sm90, "MOST_ROWS", 1 << 30)
    monkeypatch.setattr(low_rank_sm90, "_MOST_LAUNCHES", dict.fromkeys(low_rank_sm90._MOST_LAUNCHES, (16, 16)))
    calls._plans.clear()
    yield
    calls._plans.clear()


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("columns", "rank"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_gradients(dtype: torch.dtype, columns: int, rank: int, gathered: bool) -> None:
    """Fewer tiles than blocks, a few for each, and many; experts in one block's run and in those of all."""
    many = 20000 if columns <= 2048 else 6000
    for kind, tokens in (*((kind, 301) for kind in ROUTINGS), *((kind, many) for kind in ("random", "all_to_one"))):
        r = make_routing(kind, tokens, TOP_K, EXPERTS)
        v, k = (r.v, TOP_K) if gathered else (None, 1)
        dy, u = randn(tokens if gathered else r.n, columns, dtype=dtype), randn(r.n, rank, dtype=dtype)
        c = randn(EXPERTS, columns, rank, dtype=dtype, scale=columns**-0.5)
        expected = reference_esmm(dy, c, None, v, r, "kn"), reference_estmm(u, dy, None, v, r, "nk")
        for of in (dtype, torch.float32):
            operands = (dy, u, c, None, v, r.offs, k, "kn", of, 0.5, of == torch.float32)
            (du, dc), again = low_rank_gradients(*operands), low_rank_gradients(*operands)
            assert_close(du, expected[0], dtype)
            assert_close(
                dc.permute(2, 0, 1) if of == torch.float32 else dc,
                expected[1] / 2,
                of,
                100 if of == torch.float32 else 1,
            )
            assert torch.equal(du, again[0])
            assert torch.equal(dc, again[1])


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("columns", "rank"), SIZES)
def test_single_products_and_gradients(columns: int, rank: int, gathered: bool, layout: str) -> None:
    dtype = torch.bfloat16
    for kind, tokens in (*((kind, 301) for kind in ROUTINGS), ("random", 20000 if columns <= 2048 else 6000)):
        r = make_routing(kind, tokens, TOP_K, EXPERTS)
        v, k = (r.v, TOP_K) if gathered else (None, 1)
        rows, u = randn(tokens if gathered else r.n, columns, dtype=dtype), randn(r.n, rank, dtype=dtype)
        sides = (rank, columns) if layout == "nk" else (columns, rank)
        factor = randn(EXPERTS, *sides, dtype=dtype, scale=columns**-0.5)
        y = torch.ops.hexa.esmm(rows, factor, None, v, r.offs, k, layout)
        assert_close(y, reference_esmm(rows, factor, None, v, r, layout), dtype)
        wide = reference_estmm(rows, u, v, None, r, "nk")
        narrow = low_rank_gradients(rows, u, None, None, v, r.offs, k, "nk", torch.float32)[1]
        assert_close(
            narrow, wide, *((torch.float32, 100) if gathered else (dtype,))
        )  # other kernels round what is not gathered
        dw = torch.ops.hexa.estmm(rows, u, v, None, r.offs, k, layout)
        assert_close(dw, reference_estmm(rows, u, v, None, r, layout), dtype)
        dw = torch.ops.hexa.estmm(u, rows, None, v, r.offs, k, layout)
        assert_close(dw, reference_estmm(u, rows, None, v, r, layout), dtype)


@pytest.mark.parametrize("experts", [300, 1000])
def test_many_experts(experts: int) -> None:
    r = make_routing("random", 5000, TOP_K, experts)
    dy, u = randn(5000, 256, dtype=torch.bfloat16), randn(r.n, 16, dtype=torch.bfloat16)
    c = randn(experts, 256, 16, dtype=torch.bfloat16, scale=1 / 16)
    du, dc = low_rank_gradients(dy, u, c, None, r.v, r.offs, TOP_K, "kn", torch.bfloat16)
    assert_close(du, reference_esmm(dy, c, None, r.v, r, "kn"), torch.bfloat16)
    assert_close(dc, reference_estmm(u, dy, None, r.v, r, "nk"), torch.bfloat16)


@pytest.mark.parametrize(("columns", "rank"), [(2048, 16), (328, 8), (72, 24)])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_slots(of: torch.dtype, columns: int, rank: int) -> None:
    """As a product of tensors before."""
    dtype = torch.float16 if of == torch.float16 else torch.bfloat16
    for kind in ROUTINGS:
        r = make_routing(kind, 301, TOP_K, EXPERTS)
        dy, u, weights = randn(301, columns, dtype=dtype), randn(r.n, rank, dtype=dtype), randn(301, TOP_K, dtype=of)
        c = randn(EXPERTS, columns, rank, dtype=dtype)
        found = low_rank_gradients(dy, u, c, weights, r.v, r.offs, TOP_K, "kn", torch.float32, 0.5, True)
        scaled = (u * weights.view(-1, 1)[r.v.long()]).to(dtype)
        expected = low_rank_gradients(dy, scaled, c, None, r.v, r.offs, TOP_K, "kn", torch.float32, 0.5, True)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_what_is_no_number_stays_with_its_expert() -> None:
    r = make_routing("random", 301, TOP_K, EXPERTS)
    dy, u = randn(r.n, 328, dtype=torch.bfloat16), randn(r.n, 16, dtype=torch.bfloat16)
    c = randn(EXPERTS, 328, 16, dtype=torch.bfloat16)
    begin, end = (int(r.offs[i]) for i in (3, 4))
    dy[begin:end], u[begin:end], c[3] = (float("nan"),) * 3
    du, dc = low_rank_gradients(dy, u, c, None, None, r.offs, 1, "kn", torch.bfloat16)
    assert du[begin:end].isnan().all()
    assert dc[3].isnan().all()
    assert torch.cat((du[:begin], du[end:])).isfinite().all()
    assert torch.cat((dc[:3], dc[4:])).isfinite().all()
