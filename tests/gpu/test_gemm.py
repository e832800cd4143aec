"""The products: types x layouts x epilogues x bias x routings x sizes, against float64.

``sm80`` calls the gemm_sm80 family itself; ``op`` the operator, which on Hopper runs the sm_90a family where it can.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.launching import on_tensors
from hexa_fx.codegen import family_gemm_sm80
from hexa_fx.codegen.family_gemm_sm80 import TileSm80
from hexa_fx.codegen.tuned import TunedTable
from hexa_fx.cuda import calls as cuda_calls
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import gemm_sm80
from hexa_fx.cuda import product as cuda_product
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, Estmm
from tests.gpu.cases import (
    ROUTINGS,
    TF32_TOLERANCE,
    TOLERANCE,
    check_esfk,
    check_esmm,
    check_esmm_act,
    check_estmm,
    make_routing,
    randn,
    reference_esmm,
    reference_estmm,
    row_error,
    stacked,
)

sm80 = on_tensors(gemm_sm80)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOKENS, TOP_K, EXPERTS = 301, 3, 7


class Operators:
    """The dispatcher's operators, of records as the family's code takes them."""

    esmm = staticmethod(lambda o: torch.ops.hexa.esmm(*o))
    esmm_act = staticmethod(lambda o: torch.ops.hexa.esmm_act(*o))
    estmm = staticmethod(lambda o: torch.ops.hexa.estmm(*o))
    esfk = staticmethod(lambda o: torch.ops.hexa.esfk(*o))


PATHS: dict[str, Any] = {"sm80": sm80, "op": Operators}
TYPES = [("sm80", BF16), ("sm80", F16), ("sm80", F32), ("sm80", F64), ("op", BF16), ("op", F16)]


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def weight(n: int, k: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    return stacked(EXPERTS, n, k, layout, dtype)


@pytest.mark.parametrize(("path", "dtype"), TYPES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("k", "n"), [(200, 328), (129, 67)], ids=["aligned", "odd"])
def test_esmm(path: str, dtype: torch.dtype, layout: str, k: int, n: int) -> None:
    esmm = PATHS[path].esmm
    w, bias = weight(n, k, layout, dtype), randn(EXPERTS, n, dtype=dtype)
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        check_esmm(esmm, Esmm(randn(TOKENS, k, dtype=dtype), w, bias, r.v, r.offs, TOP_K, layout), r)
    rows = randn(r.n, k, dtype=dtype)
    r = make_routing("sentinels", TOKENS, TOP_K, EXPERTS)
    rows[r.routed :] = float("nan")
    check_esmm(esmm, Esmm(rows, w, None, None, r.offs, 1, layout), r)


@pytest.mark.parametrize("tokens", [1, 5, 40, 90, 3000])
@pytest.mark.parametrize(("path", "dtype"), [("sm80", BF16), ("sm80", F32), ("op", BF16)])
def test_esmm_at_every_tile_height(tokens: int, path: str, dtype: torch.dtype) -> None:
    r = make_routing("random", tokens, 2, 4)
    x, w = randn(tokens, 256, dtype=dtype), stacked(4, 192, 256, "nk", dtype)
    check_esmm(PATHS[path].esmm, Esmm(x, w, None, r.v, r.offs, 2, "nk"), r)


def test_esmm_tf32(tf32: None) -> None:
    r = make_routing("random", TOKENS, TOP_K, EXPERTS)
    for layout in ("nk", "kn"):
        x, w = randn(TOKENS, 200, dtype=F32), weight(328, 200, layout, F32)
        y = sm80.esmm(Esmm(x, w, None, r.v, r.offs, TOP_K, layout))
        error = row_error(y, reference_esmm(x, w, None, r.v, r, layout))
        assert TOLERANCE[F32] < error < TF32_TOLERANCE
        g = randn(r.n, 328, dtype=F32)
        dw = sm80.estmm(Estmm(x, g, r.v, None, r.offs, TOP_K, layout))
        assert row_error(dw, reference_estmm(x, g, r.v, None, r, layout)) < TF32_TOLERANCE


@pytest.mark.parametrize("path", PATHS)
def test_esmm_reads_strided_and_transposed_operands_in_place(path: str) -> None:
    r = make_routing("random", TOKENS, TOP_K, EXPERTS)
    x = randn(TOKENS, 250, dtype=BF16)[:, 3:203]
    w = randn(EXPERTS, 200, 340, dtype=BF16)[:, :, 4:332].transpose(1, 2)
    check_esmm(PATHS[path].esmm, Esmm(x, w, None, r.v, r.offs, TOP_K, "nk"), r)


def test_infinities_and_nan_stay_where_they_are() -> None:
    r = make_routing("random", 40, 1, 3)
    for dtype in (BF16, F32):
        x, w = torch.rand(40, 64, device="cuda").to(dtype), torch.rand(3, 32, 64, device="cuda").to(dtype)
        x[5, 7], x[9, 1] = float("inf"), float("nan")
        y = sm80.esmm(Esmm(x, w, None, None, r.offs, 1, "nk"))
        assert bool(y[5].isinf().all())
        assert bool(y[9].isnan().all())
        rest = torch.ones(40, dtype=torch.bool, device="cuda")
        rest[[5, 9]] = False
        assert bool(y[rest].isfinite().all())


EPILOGUES = [
    ("relu", "none"),
    ("gelu", "none"),
    ("gelu_tanh", "none"),
    ("silu", "concat"),
    ("gelu", "split"),
    ("relu", "interleaved"),
    ("swiglu_oai", "interleaved"),
    ("swiglu_limited", "concat"),
]


@pytest.mark.parametrize(("activation", "glu"), EPILOGUES)
@pytest.mark.parametrize(
    ("path", "dtype", "layout", "inner"),
    [("sm80", BF16, "nk", 168), ("sm80", F16, "kn", 168), ("sm80", F32, "kn", 83)]
    + [("op", BF16, "nk", 168), ("op", F16, "kn", 168)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_esmm_act(
    path: str, activation: str, glu: str, dtype: torch.dtype, layout: str, inner: int, bias: bool
) -> None:
    r = make_routing("sentinels", TOKENS, TOP_K, EXPERTS)
    columns = 2 * inner if glu in ("concat", "interleaved") else inner
    x = randn(TOKENS, 136, dtype=dtype)
    w1, w3 = weight(columns, 136, layout, dtype), weight(inner, 136, layout, dtype) if glu == "split" else None
    b1 = randn(EXPERTS, columns, dtype=dtype) if bias else None
    b3 = randn(EXPERTS, inner, dtype=dtype) if bias and glu == "split" else None
    o = EsmmAct(x, w1, b1, w3, b3, r.v, r.offs, TOP_K, layout, activation, glu, (), bias)
    check_esmm_act(PATHS[path].esmm_act, o, r)


@pytest.mark.parametrize(("path", "dtype"), [("sm80", BF16), ("sm80", F32), ("sm80", F64), ("op", BF16)])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("m", "n"), [(200, 328), (77, 45)], ids=["aligned", "odd"])
def test_estmm(path: str, dtype: torch.dtype, layout: str, m: int, n: int) -> None:
    estmm = PATHS[path].estmm
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x, g = randn(TOKENS, m, dtype=dtype), randn(r.n, n, dtype=dtype)
        g[r.routed :] = float("nan")
        check_estmm(estmm, Estmm(x, g, r.v, None, r.offs, TOP_K, layout), r)
    rows, dy = randn(r.n, m, dtype=dtype), randn(TOKENS, n, dtype=dtype)
    check_estmm(estmm, Estmm(rows, dy, None, r.v, r.offs, TOP_K, layout), r)
    r = make_routing("random", TOKENS, TOP_K, EXPERTS)
    check_estmm(estmm, Estmm(rows, randn(r.n, n, dtype=dtype), None, None, r.offs, 1, layout), r)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("path", "dtype"), [("sm80", t) for t in (BF16, F16, F32, F64)] + [("op", BF16), ("op", F32)])
@pytest.mark.parametrize(("k", "n"), [(200, 328), (77, 45)], ids=["aligned", "odd"])
def test_esfk_is_its_three_parts(path: str, dtype: torch.dtype, layout: str, k: int, n: int) -> None:
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x, g, w = randn(TOKENS, k, dtype=dtype), randn(r.n, n, dtype=dtype), weight(n, k, layout, dtype)
        g[r.routed :] = float("nan")
        check_esfk(PATHS[path].esfk, Esfk(x, g, w, r.v, r.offs, TOP_K, layout, True), r, factor=2)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esfk_of_sm80_reads_what_lies_transposed_and_strided(layout: str) -> None:
    """More rows, so that an expert has several tiles of each kind; x in expert order; without a bias."""
    r = make_routing("sentinels", 1500, TOP_K, EXPERTS)
    x, g = randn(r.n, 264, dtype=BF16)[:, :200], randn(r.n, 328, dtype=BF16)
    w = weight(328, 200, "kn" if layout == "nk" else "nk", BF16).transpose(1, 2)
    assert check_esfk(sm80.esfk, Esfk(x, g, w, None, r.offs, 1, layout, False), r) is None


def test_autotuning_measures_a_bucket_once_and_gives_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tuned"
    monkeypatch.setattr(cuda_product, "table_path", lambda name: table / "card.json")
    monkeypatch.setattr(cuda_calls, "autotuning", lambda: True)
    tiles = [TileSm80(64, 64, 32, 4, 2, 2), TileSm80(999, 64, 32, 4, 2, 2), TileSm80(128, 128, 32, 3, 2, 4)]
    monkeypatch.setattr(family_gemm_sm80, "candidates", lambda *args: tiles)
    cuda_choosing.forget_choices()
    r = make_routing("random", TOKENS, TOP_K, EXPERTS)
    x, w = randn(TOKENS, 200, dtype=BF16), weight(328, 200, "nk", BF16)
    for _ in range(2):
        check_esmm(sm80.esmm, Esmm(x, w, None, r.v, r.offs, TOP_K, "nk"), r)
    ((problem, (tile, ms)),) = TunedTable.from_json((table / "card.json").read_text()).entries.items()
    assert (problem.op, problem.inner, problem.columns) == ("esmm", 200, 328)
    assert tile["bm"] in (64, 128)
    assert ms > 0
    cuda_choosing.forget_choices()
