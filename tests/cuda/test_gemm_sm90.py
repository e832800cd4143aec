"""What the Hopper launches hand over, seen on a CPU: specs that render, tensor maps where they are read, arguments by name."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.launching import on_tensors
from hexa_fx.codegen import KernelSpec, render
from hexa_fx.codegen.family_gemm_sm90 import CANDIDATES, COOPERATIVE, PINGPONG, STREAMED, SWAPPED, TABLES, TileSm90
from hexa_fx.codegen.tuned import TunedTable
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import gemm_sm90
from hexa_fx.cuda import operands as cuda_operands
from hexa_fx.cuda import product as cuda_product
from hexa_fx.cuda.gemm_sm90 import FAMILY, TILES
from hexa_fx.cuda.operands import Segment
from hexa_fx.cuda.product import ProductKey
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm
from hexa_fx.ops.table_variants import EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank
from tests.cuda.cards import HOPPER, Cards

sm90 = on_tensors(gemm_sm90)

T, K, E, D, N = 400, 2, 5, 48, 72
BF16 = torch.bfloat16


@pytest.fixture
def recorder(hopper: Cards, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Of an odd number of multiprocessors."""
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: HOPPER._replace(multiprocessors=131))
    cuda_choosing.forget_choices()
    return hopper


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(T * K, dtype=torch.int32), torch.linspace(0, T * K, E + 1).to(torch.int32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esmm(recorder: Cards, layout: str) -> None:
    v, offs = routing()
    x, w, bias = randn(T, D), randn(*((E, N, D) if layout == "nk" else (E, D, N))), randn(E, N)
    y = sm90.esmm(Esmm(x, w, bias, v, offs, K, layout))
    assert y.shape == (T * K, N)
    assert (recorder.last.spec.op, recorder.last.spec.layout, recorder.last.spec.gather) == ("esmm", layout, True)
    assert recorder.last.mapped[:5] == [False, True, False, False, False]
    got = recorder.last.named
    assert (got["a"], got["v"], got["bias"], got["out"]) == tuple(t.data_ptr() for t in (x, v, bias, y))
    assert [got[name] for name in ("n", "experts", "K", "N", "out_ld")] == [T * K, E, D, N, N]
    assert got["queue"]
    sm90.esmm(Esmm(randn(T * K, D), w, None, None, offs, 1, layout))
    assert recorder.last.mapped[:5] == [True, True, False, False, False]
    assert (recorder.last.spec.gather, recorder.last.spec.bias, recorder.last.named["v"]) == (False, False, 0)


RANK = 8


@pytest.mark.parametrize(("columns", "of_weight", "transpose"), [(16, (N, 16), True), (128, (128, N), False)])
def test_a_narrow_side_of_a_weights_gradient_is_that_of_narrow_tiles(
    recorder: Cards, columns: int, of_weight: tuple[int, int], transpose: bool
) -> None:
    _, offs = routing()
    sm90.estmm(Estmm(randn(T * K, N), randn(T * K, columns), None, None, offs, 1, "nk"))
    assert (recorder.last.named["R"], recorder.last.named["C"]) == of_weight
    assert (recorder.last.spec.bn, recorder.last.spec.option("transpose")) == (64 if transpose else 256, transpose)


@pytest.mark.parametrize("last", [False, True])
def test_fused_products_of_some_experts_write_to_results_of_all(recorder: Cards, last: bool) -> None:
    (v, offs), n = routing(), T * K
    some, gates = offs[1:4] if not last else offs[3:], torch.rand(T, K)
    h, a, dh, dots = randn(n, 2 * N), randn(n, N), randn(n, 2 * N), torch.zeros(3, n)
    act = EsmmAct(randn(T, D), randn(2, 2 * N, D), None, None, None, v, some, K, "nk", "silu", "concat", (), True)
    back = EsmmActBackward(randn(T, D), randn(2, D, N), h, gates, v, some, K, "kn", "silu", "concat", ())
    for rank in (0, RANK):
        u = randn(n, rank)
        into = Segment(h, 320, last, a)
        if rank:
            sm90.esmm_act(EsmmActLowRank(*act, u, randn(2, 2 * N, rank), None), into=into)
        else:
            sm90.esmm_act(act, into=into)
        names = ("out", "act", "offs", "n", "experts")
        written = tuple(t.data_ptr() for t in (h, a, some))
        assert tuple(recorder.last.named[name] for name in names) == (*written, n if last else 0, 2)
        into = Segment(dh, 320, last, a, dots)
        if rank:
            sm90.esmm_act_backward(EsmmActBackwardLowRank(*back, u, randn(2, rank, N)), into=into)
        else:
            sm90.esmm_act_backward(back, into=into)
        names = ("out", "act", "offs", "row_dot", "n", "bias_ld")
        written = tuple(t.data_ptr() for t in (dh, a, some, dots))
        assert tuple(recorder.last.named[name] for name in names) == (*written, n if last else 0, n)
    kept = act._replace(keep_h=False)
    sm90.esmm_act(kept, into=Segment(h[:0], 320, last, a))
    assert (recorder.last.named["out"], recorder.last.named["act"]) == (0, a.data_ptr())


@pytest.mark.parametrize(("glu", "tile"), [("concat", None), ("concat", SWAPPED), ("split", None)])
def test_a_second_product_is_read_through_maps_that_row_products_have_no_other_use_for(
    recorder: Cards, glu: str, tile: TileSm90 | None
) -> None:
    v, offs = routing()
    columns, split = 2 * N if glu == "concat" else N, glu == "split"
    w, w3, c, c3 = (randn(E, columns, k) if given else None for k in (D, RANK) for given in (True, split))
    act = EsmmAct(randn(T, D), w, None, w3, None, v, offs, K, "nk", "silu", glu, (), True)
    h, _ = sm90.esmm_act(EsmmActLowRank(*act, u := randn(T * K, RANK), c, c3), tile)
    assert recorder.last.mapped[:5] == [False, True, split, True, True]
    assert (recorder.last.spec.option("low_rank"), recorder.last.named["R"]) == (1, RANK)
    sm90.esmm_act(act, tile)
    assert recorder.last.mapped[:5] == [False, True, split, False, False]
    assert (recorder.last.spec.option("low_rank"), recorder.last.named["R"]) == (0, 0)
    back = EsmmActBackward(randn(T, D), randn(E, D, N), h, None, v, offs, K, "kn", "silu", "concat", ())
    sm90.esmm_act_backward(EsmmActBackwardLowRank(*back, u, randn(E, RANK, N)))
    assert recorder.last.mapped[:5] == [False, True, False, True, True]
    assert (recorder.last.spec.option("low_rank"), recorder.last.named["R"]) == (1, RANK)
    down = Esmm(h, randn(E, D, 2 * N), None, None, offs, 1, "nk")
    sm90.esmm(EsmmLowRank(*down, u, randn(E, D, RANK)), tile)
    assert recorder.last.mapped[:5] == [True, True, False, True, True]


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
def test_esmm_act_and_its_backward(recorder: Cards, glu: str) -> None:
    v, offs = routing()
    columns = 2 * N if glu in ("concat", "interleaved") else N
    w3 = randn(E, N, D) if glu == "split" else None
    activation, params = ("gelu", ()) if glu == "none" else ("swiglu_oai", (1.5, 6.0))
    h, a = sm90.esmm_act(
        EsmmAct(randn(T, D), randn(E, columns, D), None, w3, None, v, offs, K, "nk", activation, glu, params, True)
    )
    assert (h.shape[1], a.shape[1]) == (N if glu == "none" else 2 * N, N)
    assert recorder.last.mapped[:5] == [False, True, glu == "split", False, False]
    assert recorder.last.named["act_params"] == (params or (0.0, 0.0))
    w = torch.rand(T * K)
    dh, scaled, dots = sm90.esmm_act_backward(
        EsmmActBackward(randn(T, D), randn(E, D, N), h, w, v, offs, K, "kn", activation, glu, params)
    )
    assert (dh.shape, scaled.shape, dots.shape) == (h.shape, a.shape, (T * K,))
    assert (recorder.last.named["h"], recorder.last.named["slot_scale"]) == (h.data_ptr(), w.data_ptr())
    assert recorder.last.spec.glu == ("concat" if glu == "split" else glu)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_weight_gradients(recorder: Cards, layout: str) -> None:
    v, offs = routing()
    x, g, w = randn(T, D), randn(T * K, N), randn(*((E, N, D) if layout == "nk" else (E, D, N)))
    assert sm90.estmm(Estmm(x, g, v, None, offs, K, layout)).shape == w.shape
    assert recorder.last.mapped[:5] == [False, False, False, False, True]
    assert recorder.last.named["p"] == x.data_ptr()
    assert recorder.last.spec.option("transpose") == (layout == "nk")
    assert sm90.estmm(Estmm(randn(T * K, D), g, None, None, offs, 1, layout)).shape == w.shape
    assert recorder.last.mapped[:5] == [False, False, False, True, True]
    assert not recorder.last.spec.option("transpose")
    dx, dw, db = sm90.esfk(Esfk(x, g, w, v, offs, K, layout, True))
    assert (dx.shape, dw.shape) == ((T * K, D), w.shape)
    assert db is not None
    assert recorder.last.mapped[:5] == [True, True, False, False, True]
    assert recorder.last.named["db"] == db.data_ptr()


def test_no_rows_launch_nothing_and_leave_zero_gradients(recorder: Cards) -> None:
    offs, none = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert sm90.esmm(Esmm(randn(0, D), randn(E, N, D), None, none, offs, K, "nk")).shape == (0, N)
    assert not sm90.estmm(Estmm(randn(0, D), randn(0, N), none, None, offs, K, "nk")).any()
    dx, dw, db = sm90.esfk(Esfk(randn(0, D), randn(0, N), randn(E, N, D), none, offs, K, "nk", True))
    assert dx.shape == (0, D)
    assert db is not None
    assert not dw.any()
    assert not db.any()
    assert not recorder.launches


def test_clusters_launch_whole_and_a_given_tile_is_taken(recorder: Cards) -> None:
    v, offs = routing()
    tile = TileSm90(cluster=2)
    sm90.esmm(Esmm(randn(T, D), randn(E, N, D), None, v, offs, K, "nk"), tile)
    assert recorder.last.blocks == (130, 1, 1)
    assert recorder.last.spec.option("cluster") == 2


def test_a_measured_tile_beats_the_rule(recorder: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    v, offs = routing()
    arguments = (randn(T, D), randn(E, N, D), None, v, offs, K, "nk")
    sm90.esmm(Esmm(*arguments))
    assert recorder.last.spec.bm == COOPERATIVE.bm
    key = key_of("esmm", T * K, E, "none", D, N)
    fields = {"bm": 64, "bn": 256, "stages": 5, "pingpong": True, "cluster": 1, "group_m": 16}
    table = TunedTable("A Card").with_entry(key.problem(), fields, 1.0)
    monkeypatch.setattr(cuda_product, "shipped", lambda name: table)
    cuda_choosing.forget_choices()
    sm90.esmm(Esmm(*arguments))
    assert (recorder.last.spec.bm, recorder.last.named["group_m"]) == (PINGPONG.bm, 16)


@pytest.mark.parametrize("fields", [{"bm": 128, "bn": 256, "stages": 9}, {"bm": 128, "warps": 4}], ids=str)
def test_a_measured_tile_that_cannot_be_generated_is_passed_over(
    recorder: Cards, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int]
) -> None:
    v, offs = routing()
    key = key_of("esmm", T * K, E, "none", D, N)
    table = TunedTable("A Card").with_entry(key.problem(), fields, 1.0)
    monkeypatch.setattr(cuda_product, "shipped", lambda name: table)
    cuda_choosing.forget_choices()
    sm90.esmm(Esmm(randn(T, D), randn(E, N, D), None, v, offs, K, "nk"))
    assert recorder.last.spec.stages == COOPERATIVE.stages


def test_a_swapped_tile_reads_gate_and_up_by_turns_and_writes_sheets(recorder: Cards) -> None:
    v, offs = routing()
    w = randn(E, 2 * N, D)
    h, a = sm90.esmm_act(
        EsmmAct(randn(T, D), w, None, None, None, v, offs, K, "nk", "silu", "concat", (), True), SWAPPED
    )
    assert recorder.last.spec.option("swapped")
    drawn = recorder.drawn
    assert drawn[w.data_ptr()][1:4] == ((D, 8, 2, N // 8, E), (D, N * D, 8 * D, 2 * N * D), (64, 8, 2, 8, 1))
    for result in (h, a):
        _, sizes, _, box, swizzle = drawn[result.data_ptr()]
        assert (sizes, box, swizzle) == ((result.shape[1], T * K), (32, 32), 64)
    rows = randn(T * K, D)
    y = sm90.esmm(Esmm(rows, w, None, None, offs, 1, "nk"), SWAPPED)
    drawn = recorder.drawn
    assert drawn[rows.data_ptr()][3:5] == ((64, 32), 128)
    assert drawn[w.data_ptr()][3] == (64, 64, 1)
    assert drawn[y.data_ptr()][3:5] == ((64, 32), 128)


def test_a_measured_swapped_tile_is_passed_over_where_it_cannot_be(
    recorder: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table knows of no layouts: gate and up of an (E, K, N) weight keep the rule's tile."""
    v, offs = routing()
    key = key_of("esmm_act", T * K, E, "concat", D, 2 * N)
    table = TunedTable("A Card").with_entry(key.problem(), asdict(SWAPPED), 1.0)
    monkeypatch.setattr(cuda_product, "shipped", lambda name: table)
    cuda_choosing.forget_choices()
    for w, swapped in ((randn(E, 2 * N, D), True), (randn(E, D, 2 * N), False)):
        layout = "nk" if swapped else "kn"
        sm90.esmm_act(EsmmAct(randn(T, D), w, None, None, None, v, offs, K, layout, "silu", "concat", (), True))
        assert bool(recorder.last.spec.option("swapped", False)) == swapped


@pytest.mark.parametrize("op", CANDIDATES)
@pytest.mark.parametrize("experts", [1, 256, 257, 1024])
@pytest.mark.parametrize("rows", [64, 1000])
@pytest.mark.parametrize("glu", ["none", "concat"])
def test_the_rule_s_tile_can_be_generated(op: str, experts: int, rows: int, glu: str) -> None:
    key = key_of(op, rows * experts, experts, glu)
    render(key.spec(TILES.rule(key)))


@pytest.mark.parametrize("rows", [16, 64, 1000])
@pytest.mark.parametrize("op", CANDIDATES)
def test_every_candidate_can_be_generated_and_the_rule_s_tile_is_one(op: str, rows: int) -> None:
    key = key_of(op, rows * E, E, "concat")
    tiles = TILES.candidates(key)
    assert TILES.rule(key) in tiles
    assert len(tiles) == len(set(tiles))
    assert (STREAMED in tiles) == (TILES.rule(key._replace(card=key.card._replace(name="another"))) == STREAMED)
    for tile in tiles:
        render(replace(key.spec(tile), gather=not (tile.swapped and tile.cluster > 1)))


def key_of(op: str, rows: int, experts: int, glu: str, inner: int = 2048, columns: int = 1536) -> ProductKey:
    tables, activation = next(size for size in TABLES if experts <= size), "silu" if "act" in op else "none"
    spec = KernelSpec(FAMILY, op, 90, bk=64, gather=True, activation=activation, glu=glu if "act" in op else "none")
    return ProductKey(TILES, spec.with_options(experts=tables), HOPPER, rows, experts, inner, columns)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("side", ["x", "g", "neither"])
@pytest.mark.parametrize("held", [torch.float32, BF16], ids=str)
def test_a_weight_gradient_is_added_in_boxes(recorder: Cards, layout: str, side: str, held: torch.dtype) -> None:
    v, offs = routing()
    x, g = randn(T if side == "x" else T * K, D), randn(T if side == "g" else T * K, N)
    into = torch.zeros((E, N, D) if layout == "nk" else (E, D, N), dtype=held)
    got = sm90.estmm(Estmm(x, g, v if side == "x" else None, v if side == "g" else None, offs, K, layout), into=into)
    assert got is into
    assert (recorder.last.spec.accumulate, recorder.last.spec.out) == (True, cuda_operands.DTYPES[held])
    assert recorder.last.named["dw"] == into.data_ptr()
    dtype, sizes, _, box, swizzle, *_ = recorder.drawn[into.data_ptr()]
    assert (dtype, sizes) == (cuda_operands.DTYPES[held], (*into.shape[:0:-1], E))
    turned = recorder.last.spec.option("transpose")
    assert turned == ((side, layout) in (("x", "nk"), ("g", "kn")))
    floats = ((16, 32, 1), 64) if turned else ((32, 16, 1), 128)
    assert (box, swizzle) == (floats if held is torch.float32 else ((64, 16, 1), 128))


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("split", [False, True])
def test_esfk_adds(recorder: Cards, layout: str, split: bool) -> None:
    v, offs = routing()
    x, g = randn(T, D), randn(T * K, N)
    into = torch.zeros((E, N, D) if layout == "nk" else (E, D, N))
    target, tile = cuda_operands.Into(into, layout, None), replace(COOPERATIVE, split=split)
    dx, dw, db = sm90.esfk(Esfk(x, g, into.to(BF16), v, offs, K, layout, False), tile, target)
    assert (dx.shape, dw is into, db) == ((T * K, D), True, None)
    assert (recorder.last.spec.op, recorder.last.spec.accumulate) == ("estmm" if split else "esfk", True)
    assert recorder.last.spec.option("transpose") == (layout == "nk")
    assert recorder.last.named["dw"] == into.data_ptr()


def test_operands_that_the_family_refuses() -> None:
    good = randn(16, 64)
    assert sm90.unsupported(good, None, experts=8) == ""
    assert "expert" in sm90.unsupported(good, experts=5000)
    assert "float32" in sm90.unsupported(good.float(), experts=8)
    assert "aligned" in sm90.unsupported(randn(16, 65)[:, :64], experts=8)
    assert "aligned" in sm90.unsupported(randn(16, 65).flatten()[1:1025].view(16, 64), experts=8)
    assert "aligned" in sm90.unsupported(good.t(), experts=8)
