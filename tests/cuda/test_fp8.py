"""What FP8 products hand over on Hopper, seen where the driver would be called: specs, sizes, scales and tensor maps."""

import pytest
import torch

from hexa_fx.cli.model_layers import layer_of
from hexa_fx.codegen.family_block_sm90 import FAMILY
from hexa_fx.codegen.family_gemm_sm90 import CLUSTER_ROWS
from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import fp8, register
from hexa_fx.cuda.choosing import typical_card
from hexa_fx.cuda.kernel_set import fp8_kernel_set
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from hexa_fx.ops.table_fp8 import MoeFfnFp8
from tests.cuda.cards import Cards

E, K, T, D, INNER = 5, 2, 60, 384, 256
E4M3, F32 = torch.float8_e4m3fn, torch.float32


def blank(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rows(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return blank(count, width), blank(count, width // 128, dtype=F32)


def weight(columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    return blank(E, columns, depth), blank(E, columns // 128, depth // 128, dtype=F32)


def groups(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return blank(count, width, 128), blank(count, width, dtype=F32)


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(T * K, dtype=torch.int32), torch.linspace(0, T * K, E + 1).to(torch.int32)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("keep_h", [True, False])
def test_up(hopper: Cards, gated: bool, keep_h: bool) -> None:
    (x, xs), (v, offs), width = rows(T, D), routing(), INNER * (2 if gated else 1)
    w, ws = weight(width, D)
    bias = blank(E, width, dtype=F32)
    h, hs, a, a_scales = fp8.esmm_act_fp8(x, xs, w, ws, bias, v, offs, K, "silu", gated, (), keep_h)
    assert (h.shape, hs.shape) == ((T * K * keep_h, width), (T * K * keep_h, width // 128))
    assert (a.shape, a_scales.shape, a.dtype) == ((T * K, INNER), (T * K, INNER // 128), E4M3)
    (launch,) = hopper.launches
    got, spec = launch.named, launch.spec
    assert (spec.family, spec.op, spec.gather, spec.glu) == (FAMILY, "esmm_act", True, "concat" if gated else "none")
    assert [got[n] for n in ("a", "v", "offs", "bias", "act")] == [t.data_ptr() for t in (x, v, offs, bias, a)]
    assert [got[n] for n in ("a_scale", "w_scale", "act_scale")] == [t.data_ptr() for t in (xs, ws, a_scales)]
    assert (got["out"], got["h_scale"]) == ((h.data_ptr(), hs.data_ptr()) if keep_h else (0, 0))
    sizes = {
        "n": T * K,
        "experts": E,
        "K": D,
        "N": INNER,
        "a_ld": D,
        "out_ld": width,
        "act_ld": INNER,
        "bias_ld": width,
    }
    assert {n: got[n] for n in sizes} == sizes
    assert launch.mapped == [False, True, False, False, False, False, keep_h, True, False]


def test_down_reads_rows_in_order_and_combine_its_bytes(hopper: Cards) -> None:
    (x, xs), (w, ws), (v, offs) = rows(T * K, INNER), weight(D, INNER), routing()
    y, ys = fp8.esmm_fp8(x, xs, w, ws, None, offs)
    assert (y.shape, y.dtype, ys.shape) == ((T * K, D), torch.uint8, (T * K, D // 128))
    gates = torch.rand(T, K)
    out = fp8.combine_fp8(y, ys, gates, v, offs, K, D - 8, torch.bfloat16)
    assert (out.shape, out.dtype) == ((T, D - 8), torch.bfloat16)
    product, combine = hopper.launches
    got = product.named
    assert (product.spec.op, product.spec.out.name, product.spec.gather, got["v"]) == ("esmm", "u8", False, 0)
    assert [got[n] for n in ("out", "h_scale", "n", "K", "N", "out_ld")] == [
        *(t.data_ptr() for t in (y, ys)),
        *(T * K, INNER, D, D),
    ]
    assert product.mapped == [True, True, False, False, False, False, True, False, False]
    assert (combine.spec.family, combine.blocks[0]) == ("combine_bytes", T)


def test_many_rows_that_are_gathered_cluster(hopper: Cards) -> None:
    many = CLUSTER_ROWS * E // K + 1
    (x, xs), (w, ws) = rows(many, D), weight(2 * INNER, D)
    v, offs = torch.arange(many * K, dtype=torch.int32), torch.linspace(0, many * K, E + 1).to(torch.int32)
    fp8.esmm_act_fp8(x, xs, w, ws, None, v, offs, K, "silu", True, (), False)
    (launch,) = hopper.launches
    assert (launch.spec.option("cluster"), launch.blocks[0] % 2) == (2, 0)


@pytest.mark.parametrize("needs", [(True,) * 4, (True, False, False, True), (False,) * 4])
def test_gradient_of_the_activation_is_a_product_and_one_pass(hopper: Cards, needs: tuple[bool, ...]) -> None:
    (dy, dys), (w, ws), (h, hs), (v, offs) = rows(T, D), weight(INNER, D), rows(T * K, 2 * INNER), routing()
    gates = torch.rand(T, K)
    found = fp8.esmm_act_backward_fp8(dy, dys, w, ws, h, hs, gates, v, offs, K, "silu", True, (), needs)
    most = T * K // 128 + E
    assert [t.shape[0] for t in found] == [
        n * need
        for n, need in zip(
            (T * K, T * K, most, most, most, most, T * K),
            (needs[0], needs[0], needs[1], needs[1], *needs[2:3] * 2, needs[3]),
        )
    ]
    if not any(needs):
        assert not hopper.launches
        return
    product, last = hopper.launches
    assert (product.spec.op, product.spec.gather, product.spec.out.name) == ("esmm", True, "bf16")
    assert (last.spec.family, last.blocks) == ("activate_fp8", (most, -(-INNER // 512), 1))
    assert last.values[0] == product.named["out"]
    assert list(last.values[6:13]) == [t.data_ptr() if t.numel() else 0 for t in found]
    assert not found[-1].any()  # no kernel writes rows of no expert
    assert last.values[3] == gates.data_ptr()


def strided(kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "turned":
        return blank(E, D, INNER, dtype=dtype).transpose(1, 2)
    if kind == "every second":
        return blank(E, INNER, 2 * D, dtype=dtype)[:, :, ::2]
    return blank(E, INNER, D, dtype=dtype)


@pytest.mark.parametrize("kind", ["plain", "turned", "every second"])
@pytest.mark.parametrize("add", [False, True])
def test_weight_gradients(hopper: Cards, kind: str, add: bool) -> None:
    most, (_, offs) = T * K // 128 + E, routing()
    (x, xs), (g, gs) = groups(most, INNER), groups(most, D)
    out = strided(kind, F32 if add else torch.bfloat16)
    fp8.estmm_fp8(out, x, xs, g, gs, offs, True, add)
    (launch,) = hopper.launches
    got, beside = launch.named, kind == "every second"
    (p, ps, q, qs) = (g, gs, x, xs) if kind == "turned" else (x, xs, g, gs)
    assert (launch.spec.op, launch.spec.accumulate) == ("estmm", add and not beside)
    assert launch.spec.option("shared") == (kind != "turned")  # of Q, which is x there
    assert (got["R"], got["C"]) == (p.shape[1], q.shape[1])
    assert [got[n] for n in ("p_scale", "q_scale")] == [ps.data_ptr(), qs.data_ptr()]
    assert (got["p_scale_ld"], got["q_scale_ld"]) == (p.shape[1], q.shape[1])
    assert (got["dw"] == out.data_ptr()) is not beside
    assert launch.mapped == [False, False, False, True, True, False, False, False, True]


def test_a_part_of_the_columns_of_turned_rows_lies_further_apart(hopper: Cards) -> None:
    most, (_, offs) = T * K // 128 + E, routing()
    (x, xs), (g, gs) = groups(most, 2 * INNER), groups(most, D)
    fp8.estmm_fp8(blank(E, INNER, D, dtype=F32), x[:, INNER:], xs[:, INNER:], g, gs, offs, True, False)
    got = hopper.launches[0].named
    assert (got["p_scale"], got["p_scale_ld"]) == (xs.data_ptr() + 4 * INNER, 2 * INNER)


def test_a_square_gradient_beside_its_place_is_turned_back(hopper: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    most, (_, offs) = T * K // 128 + E, routing()
    (x, xs), (g, gs) = groups(most, D), groups(most, D)
    out = blank(E, D, D + 1, dtype=F32)[:, :, :D].transpose(1, 2)
    copied: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of: copied.append((*to.stride()[1:], *of.stride()[1:])))
    fp8.estmm_fp8(out, x, xs, g, gs, offs, True, False)
    assert hopper.launches[0].named["p_scale"] == gs.data_ptr()
    assert copied == [(1, D + 1, 1, D)]


def test_nothing_to_add_up_is_zeros(hopper: Cards) -> None:
    (x, xs), (g, gs), out = groups(0, INNER), groups(0, D), torch.ones(E, INNER, D)
    fp8.estmm_fp8(out, x, xs, g, gs, torch.zeros(E + 1, dtype=torch.int32), True, True)
    assert bool(out.all())
    fp8.estmm_fp8(out, x, xs, g, gs, torch.zeros(E + 1, dtype=torch.int32), True, False)
    assert not hopper.launches
    assert not out.any()


@pytest.mark.parametrize(
    ("size", "experts", "reason"), [(40, E, ""), (44, E, "rows of 44 numbers"), (40, 1025, "1025 experts")]
)
def test_layers_that_the_kernels_do_not_take_run_exactly(hopper: Cards, size: int, experts: int, reason: str) -> None:
    x, index = torch.zeros(3, size).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    w1, w2 = blank(experts, 8, size, dtype=torch.bfloat16), blank(experts, size, 8, dtype=torch.bfloat16)
    o = MoeFfnFp8(x, index, None, w1, None, None, None, w2, None, "silu", "none", (), "nk", "nk", False, False)
    assert fp8.why_not(o).startswith(reason)
    assert bool(fp8.why_not(o)) == bool(reason)


def test_another_card_says_so(cards: Cards) -> None:
    (x, xs), (w, ws), (_, offs) = rows(T * K, INNER), weight(D, INNER), routing()
    fp8.esmm_fp8(x, xs, w, ws, None, offs)
    assert "FP8 products need an sm_90" in cuda_fallback.fallbacks["esmm_fp8"]


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
@pytest.mark.parametrize("biases", [False, True])
def test_a_layer_launches_what_its_set_holds(
    hopper: Cards, monkeypatch: pytest.MonkeyPatch, glu: str, biases: bool
) -> None:
    """A layer of widths that are filled up, forward and backward, with the operators' CUDA code on the stand-in: of few tokens, and
    of as many as make products cluster.
    """

    plain = library.kernel_for

    def kernel(name: str, *_: object) -> object:
        return register.kernel(name) if name.endswith("_fp8") else plain(name, "cpu")

    spec = FfnSpec("silu", glu, layout2="kn")  # type: ignore[arg-type]
    layer = layer_of(spec, experts=E, top_k=K, hidden=136, inner=72, biases=biases)
    weights = [None if t is None else torch.randn(t.shape).bfloat16().requires_grad_() for t in layer.call[3:9]]
    w1, b1, w3, b3, w2, b2 = weights
    static = ("silu", glu, [], "nk", "kn", False, False)
    launched, inferring = set(), set()
    with monkeypatch.context() as patched:
        patched.setattr(library, "kernel_for", kernel)
        for tokens in (T, CLUSTER_ROWS * E // K + 1):
            x, gates = torch.randn(tokens, 136).bfloat16().requires_grad_(), torch.rand(tokens, K).requires_grad_()
            index = torch.rand(tokens, E).argsort(1)[:, :K]
            y = torch.ops.hexa.moe_ffn_fp8(x, index, gates, w1, b1, w3, b3, w2, b2, *static)
            torch.autograd.backward(y, torch.ones_like(y))
            launched |= {launch.spec for launch in hopper.launches}
            hopper.launches.clear()
            with torch.no_grad():
                torch.ops.hexa.moe_ffn_fp8(x, index, gates, *weights, *static)
            inferring |= {launch.spec for launch in hopper.launches}
            hopper.launches.clear()
        assert not cuda_fallback.fallbacks
        inferring -= launched
    assert launched | inferring == set(fp8_kernel_set(layer, typical_card(90)))
    assert inferring < set(fp8_kernel_set(layer, typical_card(90), training=False))
    assert fp8_kernel_set(layer, typical_card(80)) == ()
