"""Every schedule of the Hopper family, also those that no shape picks by itself, against float64."""

from dataclasses import replace

import pytest
import torch

from benchmarks.launching import on_tensors
from hexa_fx.codegen.family_gemm_sm90 import COOPERATIVE, NARROW, PINGPONG, SWAPPED, WHOLE, TileSm90
from hexa_fx.cuda import gemm_sm90
from hexa_fx.cuda import plan as cuda_plan
from hexa_fx.ops.activations import ACTIVATIONS
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm
from hexa_fx.ops.table_variants import EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank
from tests.gpu.cases import (
    ROUTINGS,
    check_esfk,
    check_esmm,
    check_esmm_act,
    check_esmm_act_backward,
    check_estmm,
    graph_of,
    make_routing,
    randn,
    stacked,
)

sm90 = on_tensors(gemm_sm90)

BF16, F16 = torch.bfloat16, torch.float16
TOKENS, TOP_K, EXPERTS = 301, 3, 7


def paired(tile: TileSm90) -> TileSm90:
    """The same tile in clusters of two."""
    return replace(tile, cluster=2)


def for_gather(tile: TileSm90) -> TileSm90:
    """The same tile, without a cluster if it is a swapped one: such clusters share rows in order."""
    return replace(tile, cluster=1) if tile.swapped else tile


SQUARE = replace(PINGPONG, bm=128, bn=128, stages=6)
TILES = {"coop": COOPERATIVE, "coop2": paired(COOPERATIVE), "pp": SQUARE, "low2": paired(replace(PINGPONG, stages=5))}
WEIGHT_TILES = {"coop": COOPERATIVE, "coop2": paired(COOPERATIVE), "coop3": replace(COOPERATIVE, stages=3)}
ALL_WEIGHT_TILES = WEIGHT_TILES | {"narrow": NARROW}
RANKS = [8, 16, 64, 136]
SWAPPED_TILES = {
    "swapped2": paired(SWAPPED),
    "swapped3": replace(SWAPPED, bm=320, stages=3),
    "swapped5": WHOLE[128],
    "swapped8": replace(SWAPPED, bm=64, stages=8),
}
BACKWARD_TILES = {
    "coop": COOPERATIVE,
    "coop3": replace(COOPERATIVE, stages=3),
    "coop2": paired(COOPERATIVE),
    "pp2": paired(replace(SQUARE, stages=4)),
    "low": PINGPONG,
}
ACTIVATED = [
    ("silu", "concat"),
    ("swiglu_oai", "interleaved"),
    ("swiglu_limited", "concat"),
    ("gelu", "none"),
    ("gelu_tanh", "split"),
    ("relu2", "none"),
]


pytestmark = pytest.mark.usefixtures("hopper")


def weight(n: int, k: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    return stacked(EXPERTS, n, k, layout, dtype)


@pytest.mark.parametrize("tile", [*TILES, *SWAPPED_TILES])
@pytest.mark.parametrize(("layout", "dtype"), [("nk", BF16), ("kn", F16)])
def test_esmm(tile: str, layout: str, dtype: torch.dtype) -> None:
    k, n, choice = 200, 328, (TILES | SWAPPED_TILES)[tile]
    w, bias = weight(n, k, layout, dtype), randn(EXPERTS, n, dtype=dtype)
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x, rows = randn(TOKENS, k, dtype=dtype), randn(r.n, k, dtype=dtype)
        check_esmm(sm90.esmm, Esmm(x, w, bias, r.v, r.offs, TOP_K, layout), r, for_gather(choice))
        check_esmm(sm90.esmm, Esmm(rows, w, None, None, r.offs, 1, layout), r, choice)


def second_product(rows: int, n: int, rank: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, rank, dtype=dtype), weight(n, rank, layout, dtype)


@pytest.mark.parametrize("tile", [*TILES, *SWAPPED_TILES])
@pytest.mark.parametrize(("layout", "dtype"), [("nk", BF16), ("kn", F16)])
@pytest.mark.parametrize("rank", RANKS)
def test_esmm_with_a_second_product(tile: str, layout: str, dtype: torch.dtype, rank: int) -> None:
    k, n, choice = 200, 328, (TILES | SWAPPED_TILES)[tile]
    w, bias = weight(n, k, layout, dtype), randn(EXPERTS, n, dtype=dtype)
    for kind, tokens in (*((kind, TOKENS) for kind in ROUTINGS), ("random", 5000)):
        r = make_routing(kind, tokens, TOP_K, EXPERTS)
        x, rows = randn(tokens, k, dtype=dtype), randn(r.n, k, dtype=dtype)
        u, c = second_product(r.n, n, rank, layout, dtype)
        check_esmm(sm90.esmm, EsmmLowRank(x, w, bias, r.v, r.offs, TOP_K, layout, u, c), r, for_gather(choice))
        check_esmm(sm90.esmm, EsmmLowRank(rows, w, None, None, r.offs, 1, layout, u, c), r, choice)


@pytest.mark.parametrize("tile", ["coop", "coop2", *SWAPPED_TILES])
@pytest.mark.parametrize(
    ("activation", "glu"), [("silu", "concat"), ("swiglu_oai", "interleaved"), ("gelu_tanh", "split")]
)
@pytest.mark.parametrize("rank", [16, 136])
def test_esmm_act_with_a_second_product(tile: str, activation: str, glu: str, rank: int) -> None:
    k, inner, choice = 200, 136, for_gather((TILES | SWAPPED_TILES)[tile])
    if choice.swapped and glu != "concat":
        pytest.skip("a swapped tile takes gate and up side by side")
    params, width = ACTIVATIONS[activation].params, inner if glu == "split" else 2 * inner
    w, w3 = weight(width, k, "nk", BF16), weight(width, k, "nk", BF16) if glu == "split" else None
    for kind in ROUTINGS:
        r, x = make_routing(kind, TOKENS, TOP_K, EXPERTS), randn(TOKENS, k, dtype=BF16)
        u, c = second_product(r.n, width, rank, "nk", BF16)
        c3 = None if w3 is None else weight(width, rank, "nk", BF16)
        static = (r.v, r.offs, TOP_K, "nk", activation, glu, params, True)
        check_esmm_act(sm90.esmm_act, EsmmActLowRank(x, w, None, w3, None, *static, u, c, c3), r, choice)


@pytest.mark.parametrize("tile", SWAPPED_TILES)
@pytest.mark.parametrize(("activation", "glu"), [("silu", "concat"), ("relu2", "none")])
@pytest.mark.parametrize("tokens", [40, TOKENS, 1100], ids=["few", "one tile", "many tiles"])
def test_esmm_act_with_swapped_operands(tile: str, activation: str, glu: str, tokens: int) -> None:
    """Experts of a few rows, of less than a tile, of several; with 1100 tokens of one expert tiles of 275 and of 300 rows."""
    k, inner, choice = 200, 136, for_gather(SWAPPED_TILES[tile])
    w, bias = weight(2 * inner, k, "nk", BF16), randn(EXPERTS, 2 * inner, dtype=BF16)
    for kind in ROUTINGS:
        r, x = make_routing(kind, tokens, TOP_K, EXPERTS), randn(tokens, k, dtype=BF16)
        for store_h in (True, False):
            o = EsmmAct(x, w, bias, None, None, r.v, r.offs, TOP_K, "nk", activation, glu, (), store_h)
            check_esmm_act(sm90.esmm_act, o, r, choice)


@pytest.mark.parametrize("tile", BACKWARD_TILES)
@pytest.mark.parametrize(("activation", "glu"), ACTIVATED)
@pytest.mark.parametrize("rank", [0, 16, 328])
def test_esmm_act_backward(tile: str, activation: str, glu: str, rank: int) -> None:
    d, i, dtype = 200, 136, BF16
    params = ACTIVATIONS[activation].params
    w2 = weight(i, d, "kn", dtype)
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        dy, h = randn(TOKENS, d, dtype=dtype), randn(r.n, i if glu == "none" else 2 * i, dtype=dtype)
        scale = torch.rand(r.n, device="cuda")
        given = EsmmActBackward(dy, w2, h, scale, r.v, r.offs, TOP_K, "kn", activation, glu, params)
        if rank:
            given = EsmmActBackwardLowRank(*given, *second_product(r.n, i, rank, "kn", dtype))
        check_esmm_act_backward(sm90.esmm_act_backward, given, r, BACKWARD_TILES[tile])


@pytest.mark.parametrize("tile", ALL_WEIGHT_TILES)
@pytest.mark.parametrize("side", ["x", "g", "neither"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_estmm_keeps_experts_apart(tile: str, side: str, layout: str) -> None:
    """Rows of no expert are NaN here: a step that reaches past an expert's rows must not read them."""
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x = randn(TOKENS if side == "x" else r.n, 200, dtype=BF16)
        g = randn(TOKENS if side == "g" else r.n, 328, dtype=BF16)
        for rows in (x, g):
            if rows.shape[0] == r.n:
                rows[r.routed :] = float("nan")
        xi, gi = (r.v if side == "x" else None), (r.v if side == "g" else None)
        check_estmm(sm90.estmm, Estmm(x, g, xi, gi, r.offs, TOP_K, layout), r, ALL_WEIGHT_TILES[tile])


@pytest.mark.parametrize("tile", ALL_WEIGHT_TILES)
@pytest.mark.parametrize(("rows", "columns"), [(200, 328), (200, 16), (16, 328)])
def test_estmm_of_long_experts(tile: str, rows: int, columns: int) -> None:
    """More steps than stages, a ragged end each."""
    r = make_routing("random", 3000, 4, 8)
    x, g = randn(r.n, rows, dtype=BF16), randn(r.n, columns, dtype=BF16)
    check_estmm(sm90.estmm, Estmm(x, g, None, None, r.offs, 1, "nk"), r, ALL_WEIGHT_TILES[tile])


@pytest.mark.parametrize("tile", ALL_WEIGHT_TILES.values(), ids=ALL_WEIGHT_TILES)
def test_esfk_mixes_gathered_and_other_tiles(tile: TileSm90) -> None:
    """Row tiles of 11 steps pass by the gathered stages an odd number of times; enough tiles that every block has many."""
    tokens, top_k, experts, d, n = 3000, 4, 8, 512, 704
    r = make_routing("random", tokens, top_k, experts)
    w, x, g = randn(experts, n, d, dtype=BF16, scale=d**-0.5), randn(tokens, d, dtype=BF16), randn(r.n, n, dtype=BF16)
    check_esfk(sm90.esfk, Esfk(x, g, w, r.v, r.offs, top_k, "nk", False), r, tile)


@pytest.mark.parametrize("tile", ALL_WEIGHT_TILES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esfk(tile: str, layout: str) -> None:
    w = weight(328, 200, layout, BF16)
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x, g = randn(TOKENS, 200, dtype=BF16), randn(r.n, 328, dtype=BF16)
        check_esfk(sm90.esfk, Esfk(x, g, w, r.v, r.offs, TOP_K, layout, True), r, ALL_WEIGHT_TILES[tile])


@pytest.mark.parametrize("tile", ALL_WEIGHT_TILES)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "n"), [(3000, 4, 320, 520), (1120, 64, 1024, 1280)], ids=["ahead", "beside"]
)
def test_esfk_with_weight_tiles_ahead_of_row_tiles_or_beside_them(
    tile: str, tokens: int, experts: int, k: int, n: int
) -> None:
    """A weight tile is more than a block's share of the work, or a fortieth of it (`long_weight_tiles`)."""
    w = randn(experts, n, k, dtype=BF16, scale=k**-0.5)
    for kind in ROUTINGS:
        r = make_routing(kind, tokens, 4, experts)
        x, g = randn(tokens, k, dtype=BF16), randn(r.n, n, dtype=BF16)
        check_esfk(sm90.esfk, Esfk(x, g, w, r.v, r.offs, 4, "nk", False), r, ALL_WEIGHT_TILES[tile])


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("tokens", "n"), [(TOKENS, 328), (3000, 1536)])
def test_esfk_of_low_rank_rows(layout: str, tokens: int, n: int) -> None:
    """Rows of 16 columns in expert order: weight tiles are narrow along them, and go with the row tiles that read the same g."""
    w = weight(n, 16, layout, BF16)
    for kind in ROUTINGS:
        r = make_routing(kind, tokens, TOP_K, EXPERTS)
        u, g = randn(r.n, 16, dtype=BF16), randn(r.n, n, dtype=BF16)
        check_esfk(lambda o: torch.ops.hexa.esfk(*o), Esfk(u, g, w, None, r.offs, 1, layout, False), r)


def test_queue_returns_to_zero() -> None:
    """The tile counter is shared by all launches: one that left it dirty would make the next skip tiles."""
    r = make_routing("random", TOKENS, TOP_K, EXPERTS)
    x, w = randn(TOKENS, 200, dtype=BF16), weight(328, 200, "nk", BF16)
    first = sm90.esmm(Esmm(x, w, None, r.v, r.offs, TOP_K, "nk"))
    for _ in range(2 * cuda_plan.QUEUES // 64):
        again = sm90.esmm(Esmm(x, w, None, r.v, r.offs, TOP_K, "nk"))
    torch.cuda.synchronize()
    assert torch.equal(first, again)
    graph, captured = graph_of(lambda: sm90.esmm(Esmm(x, w, None, r.v, r.offs, TOP_K, "nk")))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            captured.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(first, captured)
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("hexa" in name for name in names) == 2
    assert not any("FillFunctor<int>" in name for name in names), names  # the queue was zero before
    assert not any(zeros.any() for zeros in cuda_plan._kept)
