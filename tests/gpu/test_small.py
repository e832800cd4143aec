"""A small case of each kernel, for compute-sanitizer: `sh benchmarks/gpu.sh sanitize`.

Sizes are the smallest that reach what can go wrong: more steps than stages, several tiles a block (the persistent kernels get
four blocks), a ragged end of rows and of columns, an expert without rows, rows of no expert.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.launching import on_tensors
from hexa_fx.codegen.family_gemm_sm90 import COOPERATIVE, NARROW, PINGPONG, STREAMED, SWAPPED
from hexa_fx.codegen.family_packed import PackedTile
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import gemm_sm80, gemm_sm90
from hexa_fx.cuda import operands as cuda_operands
from hexa_fx.formats import FP8_BLOCK, NF4
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import activations, library, low_rank_gradients
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.products import scaled_transpose_any
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm
from hexa_fx.ops.table_variants import EsmmActBackwardLowRank, EsmmLowRank, ScaledTranspose
from tests.gpu import test_decode as few_tokens
from tests.gpu import test_listed_experts as of_lists
from tests.gpu import test_packed as packed_weights
from tests.gpu.cases import (
    Routing,
    Run,
    assert_close,
    check_esfk,
    check_esmm,
    check_esmm_act,
    check_esmm_act_backward,
    check_estmm,
    make_routing,
    randn,
    reference_esmm,
    reference_estmm,
    reference_reindex,
    stacked,
    sums,
)

sm80 = on_tensors(gemm_sm80)
sm90 = on_tensors(gemm_sm90)

pytestmark = pytest.mark.usefixtures("four_multiprocessors")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOKENS, TOP_K, EXPERTS, D, N = 220, 2, 4, 328, 264
SQUARE = replace(PINGPONG, bm=128, bn=128, stages=6)
TILES = {
    "coop": COOPERATIVE,
    "coop2": replace(COOPERATIVE, cluster=2),
    "pp": SQUARE,
    "low2": replace(PINGPONG, stages=5, cluster=2),
}
WEIGHT_TILES = {
    "coop": COOPERATIVE,
    "coop2": replace(COOPERATIVE, cluster=2),
    "coop3": replace(COOPERATIVE, stages=3),
    "narrow": NARROW,
}
SWAPPED_TILES = {
    "swapped2": replace(SWAPPED, cluster=2),
    "swapped low": replace(SWAPPED, bm=128),
    "once": replace(STREAMED, once=True),
}  # low: some tiles an expert
GRADIENT_TILES = {
    "coop": COOPERATIVE,
    "coop2": replace(COOPERATIVE, cluster=2),
    "pp2": replace(SQUARE, stages=4, cluster=2),
    "low": PINGPONG,
}
hopper = pytest.mark.usefixtures("hopper")


def routing(top_k: int = TOP_K) -> Routing:
    """Expert 2 has no rows, and some rows no expert."""
    r = make_routing("sentinels", TOKENS, top_k, EXPERTS)
    index = torch.where(r.index == 2, 1, r.index)
    return reference_reindex(index, EXPERTS)


def weight(n: int, k: int, layout: str, dtype: torch.dtype) -> Tensor:
    return stacked(EXPERTS, n, k, layout, dtype)


@pytest.mark.parametrize("tokens", [40, 2200], ids=["one launch", "two launches"])
def test_reindex(tokens: int) -> None:
    want = make_routing("sentinels", tokens, 2, 9)
    for got, expected in zip(torch.ops.hexa.reindex(want.index, 9), (want.v, want.inv, want.offs), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("width", "top_k"), [(264, 2), (37, 3)], ids=["aligned", "odd"])
def test_combine_and_its_backward(width: int, top_k: int) -> None:
    r = routing(top_k)
    y, w = randn(r.n, width, dtype=F32).requires_grad_(), torch.rand(TOKENS, top_k, device="cuda", requires_grad=True)
    out = torch.ops.hexa.combine(y, w, r.inv, r.offs, top_k)
    routed = (r.inv < r.routed).view(TOKENS, top_k, 1)
    rows = y.double()[r.inv.long()].view(TOKENS, top_k, width) * routed
    want = (rows * w.double()[..., None]).sum(1)
    assert_close(out.detach(), want.detach(), F32)
    dy = randn(TOKENS, width, dtype=F32)
    for got, expected in zip(
        torch.autograd.grad(out, (y, w), dy), torch.autograd.grad(want, (y, w), dy.double()), strict=True
    ):
        assert_close(got, expected.double(), F32, 4)


@pytest.mark.parametrize("width", [264, 37])
def test_ess(width: int) -> None:
    r, scale = routing(), torch.rand(TOKENS, TOP_K, device="cuda")
    g = randn(TOKENS, width, dtype=BF16)
    rows = g.double()[r.v.long() // TOP_K] * scale.double().view(-1)[r.v.long()][:, None]
    ones = torch.ones(r.n, 1, dtype=F64, device="cuda")
    want = reference_estmm(ones, rows, None, None, r, "kn")[:, 0]
    assert_close(torch.ops.hexa.ess(g, r.v, r.offs, TOP_K, scale), want, BF16, 2)


@pytest.mark.parametrize(("dtype", "out"), [(F32, BF16), (BF16, F32)], ids=["factor", "gradient"])
def test_scaled_transpose(dtype: torch.dtype, out: torch.dtype) -> None:
    x = randn(130, 67, dtype=dtype)
    assert torch.equal(torch.ops.hexa.scaled_transpose(x, out, 0.3), scaled_transpose_any(ScaledTranspose(x, out, 0.3)))


@pytest.mark.parametrize(("glu", "width"), [("concat", 264), ("interleaved", 37), ("none", 600)])
def test_activate_and_its_backward(glu: str, width: int) -> None:
    r, w = routing(), torch.rand(TOKENS, TOP_K, device="cuda")
    h, da = randn(r.n, width if glu == "none" else 2 * width, dtype=BF16), randn(r.n, width, dtype=BF16)
    a = activations.activation_forward(h.double(), "silu", glu, ())
    assert_close(torch.ops.hexa.activate(h, "silu", glu, []), a, BF16, 2)
    dh, scaled, _ = torch.ops.hexa.activate_backward(da, h, w, r.v, r.offs, "silu", glu, [])
    row_w = w.double().view(-1)[r.v.long()][:, None] * (torch.arange(r.n, device="cuda") < r.routed)[:, None]
    assert_close(dh, activations.weighted_backward(da.double() * row_w, h.double(), None, "silu", glu, ())[0], BF16, 2)
    assert_close(scaled, a * row_w, BF16, 2)


SM80 = {
    "bf16": (BF16, D, N, "nk"),
    "f16 kn": (F16, D, N, "kn"),
    "odd sizes": (BF16, 129, 67, "kn"),
    "3xTF32": (F32, 72, 72, "nk"),
    "f64": (F64, 40, 72, "kn"),
}


@pytest.mark.parametrize("case", SM80)
def test_products_of_sm80(case: str) -> None:
    dtype, k, n, layout = SM80[case]
    r, w, bias = routing(), weight(n, k, layout, dtype), randn(EXPERTS, n, dtype=dtype)
    x, rows, g = randn(TOKENS, k, dtype=dtype), randn(r.n, k, dtype=dtype), randn(r.n, n, dtype=dtype)
    check_esmm(sm80.esmm, Esmm(x, w, bias, r.v, r.offs, TOP_K, layout), r)
    check_esmm(sm80.esmm, Esmm(rows, w, None, None, r.offs, 1, layout), r)
    check_estmm(sm80.estmm, Estmm(x, g, r.v, None, r.offs, TOP_K, layout), r)


def test_few_rows_of_sm80() -> None:
    r = make_routing("random", 5, TOP_K, EXPERTS)
    x, w = randn(5, D, dtype=BF16), weight(N, D, "nk", BF16)
    check_esmm(sm80.esmm, Esmm(x, w, None, r.v, r.offs, TOP_K, "nk"), r)


ACTIVATED = [
    ("silu", "concat"),
    ("swiglu_oai", "interleaved"),
    ("swiglu_limited", "concat"),
    ("gelu", "none"),
    ("gelu_tanh", "split"),
]


def check_activated(esmm_act: Run, activation: str, glu: str, layout: str, *rest: object) -> None:
    r, params = routing(), activations.ACTIVATIONS[activation].params
    columns = 2 * N if glu in ("concat", "interleaved") else N
    x, w1, b1 = randn(TOKENS, D, dtype=BF16), weight(columns, D, layout, BF16), randn(EXPERTS, columns, dtype=BF16)
    w3, b3 = (weight(columns, D, layout, BF16), randn(EXPERTS, N, dtype=BF16)) if glu == "split" else (None, None)
    check_esmm_act(esmm_act, EsmmAct(x, w1, b1, w3, b3, r.v, r.offs, TOP_K, layout, activation, glu, params), r, *rest)


@pytest.mark.parametrize(("activation", "glu"), ACTIVATED[:2])
def test_esmm_act_of_sm80(activation: str, glu: str) -> None:
    check_activated(sm80.esmm_act, activation, glu, "nk")


@hopper
@pytest.mark.parametrize(("tile", "case"), list(zip([*TILES, "coop"], ACTIVATED, strict=True)))
def test_esmm_act_of_sm90(tile: str, case: tuple[str, str]) -> None:
    check_activated(sm90.esmm_act, *case, "nk" if tile in ("coop", "low2") else "kn", TILES[tile])


@hopper
@pytest.mark.parametrize("tile", SWAPPED_TILES)
@pytest.mark.parametrize("case", [("silu", "concat"), ("gelu", "none")], ids=str)
def test_esmm_act_of_sm90_with_swapped_operands(tile: str, case: tuple[str, str]) -> None:
    check_activated(sm90.esmm_act, *case, "nk", replace(SWAPPED_TILES[tile], cluster=1))


@hopper
@pytest.mark.parametrize("tile", [*TILES, *SWAPPED_TILES, "narrow"])
def test_esmm_of_sm90(tile: str) -> None:
    choice = (TILES | SWAPPED_TILES | {"narrow": NARROW})[tile]
    r, w, bias = routing(), weight(N, D, "nk", BF16), randn(EXPERTS, N, dtype=BF16)
    x, rows = randn(TOKENS, D, dtype=BF16), randn(r.n, D, dtype=BF16)
    for_gather = replace(choice, cluster=1) if choice.swapped else choice
    check_esmm(sm90.esmm, Esmm(x, w, bias, r.v, r.offs, TOP_K, "nk"), r, for_gather)
    check_esmm(sm90.esmm, Esmm(rows, w.transpose(1, 2).contiguous(), None, None, r.offs, 1, "kn"), r, choice)


@hopper
@pytest.mark.parametrize(("tile", "case"), list(zip(GRADIENT_TILES, ACTIVATED, strict=False)))
def test_esmm_act_backward_of_sm90(tile: str, case: tuple[str, str]) -> None:
    (activation, glu), r = case, routing()
    params = activations.ACTIVATIONS[activation].params
    dy, w2 = randn(TOKENS, D, dtype=BF16), weight(N, D, "kn", BF16)
    h, scale = randn(r.n, N if glu == "none" else 2 * N, dtype=BF16), torch.rand(r.n, device="cuda")
    o = EsmmActBackward(dy, w2, h, scale, r.v, r.offs, TOP_K, "kn", activation, glu, params)
    check_esmm_act_backward(sm90.esmm_act_backward, o, r, GRADIENT_TILES[tile])


@hopper
@pytest.mark.parametrize(
    ("tile", "side", "layout"),
    [
        *(("coop", "x", "nk"), ("coop3", "g", "nk"), ("coop", "neither", "kn"), ("coop3", "x", "kn")),
        *(("coop2", "g", "nk"), ("coop2", "x", "nk")),
        *(
            ("narrow", side, layout)
            for side, layout in (("x", "nk"), ("g", "nk"), ("neither", "nk"), ("neither", "kn"))
        ),
    ],
)
def test_estmm_of_sm90(tile: str, side: str, layout: str) -> None:
    r = routing()
    x, g = randn(TOKENS if side == "x" else r.n, D, dtype=BF16), randn(TOKENS if side == "g" else r.n, N, dtype=BF16)
    xi, gi = (r.v if side == "x" else None), (r.v if side == "g" else None)
    check_estmm(sm90.estmm, Estmm(x, g, xi, gi, r.offs, TOP_K, layout), r, WEIGHT_TILES[tile])


def fused_backward(layout: str, n: int = N) -> tuple[Esfk, Routing]:
    r = routing()
    x, g = randn(TOKENS, D, dtype=BF16), randn(r.n, n, dtype=BF16)
    return Esfk(x, g, weight(n, D, layout, BF16), r.v, r.offs, TOP_K, layout, True), r  # type: ignore[arg-type]


@hopper
@pytest.mark.parametrize(("tile", "layout"), [("coop", "nk"), ("coop2", "nk"), ("coop3", "kn"), ("narrow", "nk")])
def test_esfk_of_sm90(tile: str, layout: str) -> None:
    check_esfk(sm90.esfk, *fused_backward(layout), WEIGHT_TILES[tile])


@hopper
def test_esfk_of_low_rank_rows() -> None:
    r, w = routing(), weight(N, 16, "nk", BF16)
    u, g = randn(r.n, 16, dtype=BF16), randn(r.n, N, dtype=BF16)
    check_esfk(sm90.esfk, Esfk(u, g, w, None, r.offs, 1, "nk", False), r, NARROW)


@hopper
@pytest.mark.parametrize(("of", "last"), [(BF16, False), (F32, True)])
def test_low_rank_gradients(of: torch.dtype, last: bool) -> None:
    r, c = routing(), weight(N, 16, "nk", BF16)
    dy, u = randn(TOKENS, N, dtype=BF16), randn(r.n, 16, dtype=BF16)
    ones = torch.ones(TOKENS, TOP_K, device="cuda") if last else None
    du, dc = low_rank_gradients(dy, u, c, ones, r.v, r.offs, TOP_K, "kn", of, 0.5, last)
    assert_close(du, reference_esmm(dy, c, None, r.v, r, "kn"), BF16)
    assert_close(dc.permute(2, 0, 1) if last else dc, reference_estmm(u, dy, None, r.v, r, "nk") / 2, BF16)


@hopper
def test_low_rank_products() -> None:
    r, x = routing(), randn(TOKENS, N, dtype=BF16)
    a, t = weight(16, N, "nk", BF16), randn(r.n, 16, dtype=BF16)
    u = torch.ops.hexa.esmm(x, a, None, r.v, r.offs, TOP_K, "nk")
    assert_close(u, reference_esmm(x, a, None, r.v, r, "nk"), BF16)
    da = torch.ops.hexa.estmm(x, t, r.v, None, r.offs, TOP_K, "nk")
    assert_close(da, reference_estmm(x, t, r.v, None, r, "nk"), BF16)


def buffer(*shape: int) -> Tensor:
    """Numbers to add to, NaN for the expert without rows: nothing may be added there."""
    into = randn(*shape, dtype=F32)
    into[2] = float("nan")
    return into


def assert_added(after: Tensor, before: Tensor, change: Tensor) -> None:
    assert after[2].isnan().all()
    assert_close(after.nan_to_num(0), (before.double() + change).nan_to_num(0), F32, 5)


@hopper
@pytest.mark.parametrize(
    ("tile", "side", "layout", "n"),
    [
        *(("coop", "x", "nk", N), ("coop3", "g", "nk", 520), ("coop", "neither", "kn", N), ("coop3", "g", "kn", N)),
        ("coop2", "g", "nk", 520),
    ],
)
def test_estmm_of_sm90_adds(tile: str, side: str, layout: str, n: int) -> None:
    r = routing()
    x, g = randn(TOKENS if side == "x" else r.n, D, dtype=BF16), randn(TOKENS if side == "g" else r.n, n, dtype=BF16)
    xi, gi = (r.v if side == "x" else None), (r.v if side == "g" else None)
    into = buffer(EXPERTS, *((n, D) if layout == "nk" else (D, n)))
    before = into.clone()
    sm90.estmm(Estmm(x, g, xi, gi, r.offs, TOP_K, layout), WEIGHT_TILES[tile], into)
    assert_added(into, before, reference_estmm(x, g, xi, gi, r, layout))


def check_esfk_adds(esfk: Run, layout: str, n: int, *rest: object) -> None:
    o, r = fused_backward(layout, n)
    into = cuda_operands.Into(buffer(*o.weight.shape), o.layout, buffer(EXPERTS, n))
    before = [t.clone() for t in (into.weight, into.bias)]
    dx, _, _ = esfk(o, *rest, into=into)
    assert_close(dx, reference_esmm(o.g, o.weight, None, None, r, flip(layout)), BF16)
    assert_added(into.weight, before[0], reference_estmm(o.x, o.g, r.v, None, r, layout))
    assert_added(into.bias, before[1], sums(o.g, r))


@hopper
@pytest.mark.parametrize(("tile", "layout", "n"), [("coop", "nk", N), ("coop2", "nk", 520), ("coop3", "kn", 520)])
def test_esfk_of_sm90_adds(tile: str, layout: str, n: int) -> None:
    check_esfk_adds(sm90.esfk, layout, n, WEIGHT_TILES[tile])


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esfk_of_sm80_adds(layout: str) -> None:
    check_esfk_adds(sm80.esfk, layout, N)


@pytest.mark.parametrize("case", SM80)
def test_estmm_of_sm80_and_ess_add(case: str) -> None:
    dtype, k, n, layout = SM80[case]
    wide, r = (F64 if dtype == F64 else F32), routing()
    x, g = randn(TOKENS, k, dtype=dtype), randn(r.n, n, dtype=dtype)
    into, totals = buffer(EXPERTS, *((n, k) if layout == "nk" else (k, n))).to(wide), buffer(EXPERTS, n).to(wide)
    before = [t.clone() for t in (into, totals)]
    sm80.estmm(Estmm(x, g, r.v, None, r.offs, TOP_K, layout), into=into)
    assert_added(into, before[0], reference_estmm(x, g, r.v, None, r, layout))
    torch.ops.hexa.ess_add(totals, g, None, r.offs, 1, None)
    assert_added(totals, before[1], sums(g, r))


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esfk_of_sm80(layout: str) -> None:
    check_esfk(sm80.esfk, *fused_backward(layout))


@hopper
@pytest.mark.parametrize("tile", [*TILES, *SWAPPED_TILES])
@pytest.mark.parametrize(("layout", "rank"), [("nk", 8), ("kn", 72)])
def test_second_products_of_sm90(tile: str, layout: str, rank: int) -> None:
    choice, r = (TILES | SWAPPED_TILES)[tile], routing()
    w, c, u = weight(N, D, layout, BF16), weight(N, rank, layout, BF16), randn(r.n, rank, dtype=BF16)
    x, rows = randn(TOKENS, D, dtype=BF16), randn(r.n, D, dtype=BF16)
    for_gather = replace(choice, cluster=1) if choice.swapped else choice
    check_esmm(sm90.esmm, EsmmLowRank(x, w, None, r.v, r.offs, TOP_K, layout, u, c), r, for_gather)
    check_esmm(sm90.esmm, EsmmLowRank(rows, w, None, None, r.offs, 1, layout, u, c), r, choice)


@hopper
@pytest.mark.parametrize("tile", GRADIENT_TILES)
def test_second_products_before_an_activation_s_gradient(tile: str) -> None:
    r, w, c = routing(), weight(N, D, "kn", BF16), weight(N, 16, "kn", BF16)
    dy, h, u = randn(TOKENS, D, dtype=BF16), randn(r.n, 2 * N, dtype=BF16), randn(r.n, 16, dtype=BF16)
    given = EsmmActBackward(dy, w, h, None, r.v, r.offs, TOP_K, "kn", "silu", "concat", ())
    check_esmm_act_backward(sm90.esmm_act_backward, EsmmActBackwardLowRank(*given, u, c), r, GRADIENT_TILES[tile])


def fp8_operands() -> tuple[Routing, tuple[Tensor, Tensor], list[Tensor]]:
    """Routing, quantised tokens, and a quantised weight with its transposed part."""
    r = routing()
    x = library.kernel_for("quantize_rows_fp8", "cuda")(randn(TOKENS, 640, dtype=BF16), True)
    made = [
        torch.empty(EXPERTS, *size, dtype=dtype, device="cuda")
        for size, dtype in (
            *(((512, 640), torch.float8_e4m3fn), ((4, 5), F32)),
            *(((640, 512), torch.float8_e4m3fn), ((5, 4), F32)),
        )
    ]
    w = randn(EXPERTS, 512, 600, dtype=BF16, scale=600**-0.5)
    library.kernel_for("quantize_weight_fp8", "cuda")(*made, w, None, "nk", "concat")
    return r, x, made


@hopper
@pytest.mark.parametrize("gated", [True, False])
def test_fp8_layer(gated: bool) -> None:
    """Every kernel of FP8 block compute, each on what the one before gave; tests/gpu/test_fp8.py compares them."""
    r, x, w = fp8_operands()

    def run(name: str, *args: object) -> tuple[Tensor, ...]:
        found = library.kernel_for(name, "cuda")(*args)
        return found if isinstance(found, tuple) else (found,)

    rows, static = (r.v, r.offs, TOP_K), ("silu", gated, ())
    h, hs, a, a_scales = run("esmm_act_fp8", *x, *w[:2], None, *rows, *static, True)
    width = a.shape[1]
    second = [w[2][:, :, :width].contiguous(), w[3][:, :, : width // 128].contiguous()]
    y = run("esmm_fp8", a, a_scales, *second, None, r.offs)
    assert run("combine_fp8", *y, None, r.inv, r.offs, TOP_K, 600, BF16)[0].isfinite().all()
    back = [t.transpose(1, 2).contiguous() for t in second]
    dh, dhs, dh_t, dhs_t, *_ = run("esmm_act_backward_fp8", *x, *back, h, hs, None, *rows, *static, (True,) * 4)
    _, dx_scales = run("esmm_fp8", dh, dhs, *w[2:], None, r.offs)
    assert dx_scales[: r.routed].isfinite().all()
    for shared in (True, False):
        columns = ("group_rows_fp8", *x) if shared else ("quantize_columns_fp8", randn(TOKENS, 640, dtype=BF16))
        x_t = run(*columns, *rows)
        dw = torch.empty(EXPERTS, 512, 640, dtype=BF16, device="cuda")
        run("estmm_fp8", dw, dh_t, dhs_t, *x_t, r.offs, shared, False)
        assert dw.isfinite().all()
        assert not dw[2].any()
    assert run("ess_fp8", dh_t, dhs_t, r.offs)[0].isfinite().all()


@hopper
@pytest.mark.parametrize("layouts", ["nk nk", "kn kn"])
@pytest.mark.parametrize("tokens", [5, 60], ids=["8 rows", "32 rows"])
def test_few_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int, layouts: str) -> None:
    """Three launches of which two begin early; more steps than stages, a block's units of several experts."""
    monkeypatch.setattr(few_tokens.decode.family, "very_few", lambda slots, experts: True)
    monkeypatch.setattr(few_tokens.decode.family, "MOST_SHORT_BUCKET", 5)
    cuda_choosing.forget_choices()
    ids = make_routing("sentinels", tokens, 3, few_tokens.EXPERTS).index
    spec = FfnSpec("silu", "concat", *layouts.split())
    few_tokens.check(few_tokens.routed(few_tokens.layer(776, 328, spec, bias=True), ids))


@hopper
@pytest.mark.parametrize("inner", [328, 4104], ids=["short lines", "long lines"])
def test_few_tokens_in_two_launches(inner: int) -> None:
    """The second one gives eight columns of all tokens a block; k ends inside a stage, parts are shared by warps."""
    ids = make_routing("sentinels", 5, 3, few_tokens.EXPERTS).index
    few_tokens.check(few_tokens.routed(few_tokens.layer(1056, inner, bias=True), ids))


@pytest.mark.parametrize("f", [NF4, FP8_BLOCK], ids=packed_weights.name)
def test_packed_weights(f: packed_weights.Streamed) -> None:
    packed_weights.test_a_layer(f)
    packed_weights.test_tiles(768, PackedTile(1, 2, 2, 1, True), f)


@pytest.mark.parametrize(
    "case", [case for case in of_lists.CASES if case[0] in ("decode", "some", "no whole boxes")], ids=of_lists.ids
)
def test_matrices_of_listed_experts(case: tuple[str, str, torch.dtype, str, bool, int]) -> None:
    """Each in an allocation of its own, past which nothing may be read."""
    for found in of_lists.Layer(*case).step(Listed):
        assert found.isfinite().all()
