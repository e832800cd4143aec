"""What the CUDA operators would launch, seen on a CPU: every spec renders, arguments and grids fit."""

from __future__ import annotations

import pytest
import torch
from cutlass_library import DataType

from benchmarks.launching import prebuild
from hexa_fx.cuda import calls as cuda_calls
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import gemm as cuda_gemm
from hexa_fx.cuda import rows as cuda_rows
from hexa_fx.cuda.gemm_sm80 import divisor
from hexa_fx.jit import ToolchainError, background
from tests.cuda.cards import AMPERE, Cards

T, K, E, D, N = 40, 2, 5, 48, 72


def routing(n: int = T * K) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n, dtype=torch.int32), torch.linspace(0, n, E + 1).to(torch.int32)


def test_reindex_takes_one_launch_when_small_and_two_when_large(cards: Cards) -> None:
    v, inv, offs = cuda_rows.reindex(torch.zeros(T, K, dtype=torch.int64), E)
    assert (v.shape, inv.shape, offs.shape) == ((T * K,), (T * K,), (E + 1,))
    assert [launch.spec.op for launch in cards.launches] == ["reindex_place"]
    cuda_rows.reindex(torch.zeros(9000, 3, dtype=torch.int32), E)
    count, place = cards.launches[1:]
    assert (count.spec.op, place.spec.op, count.blocks) == ("reindex_count", "reindex_place", place.blocks)
    blocks, chunk, warps = count.blocks[0], count.values[7], count.spec.option("warps")
    assert blocks * chunk * warps >= 27000
    assert chunk % 32 == 0


def test_reindex_of_nothing_still_writes_offsets(cards: Cards) -> None:
    cuda_rows.reindex(torch.zeros(0, 2, dtype=torch.int64), E)
    assert cards.launches[0].blocks == (1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esmm(cards: Cards, dtype: torch.dtype, layout: str) -> None:
    v, offs = routing()
    x = torch.randn(T, D, dtype=dtype)
    w = torch.randn((E, N, D) if layout == "nk" else (E, D, N), dtype=dtype)
    y = cuda_gemm.esmm(x, w, torch.randn(E, N, dtype=dtype), v, offs, K, layout)
    (launch,) = cards.launches
    assert (y.shape, y.dtype) == ((T * K, N), dtype)
    assert (launch.spec.layout, launch.spec.gather, launch.spec.bias) == (layout, True, True)
    assert launch.values[16:21] == (T * K, 0, N, D, E)
    assert launch.spec.aligned
    assert not cuda_fallback.fallbacks


def test_a_weight_stored_transposed_is_the_other_layout_and_not_a_copy(cards: Cards) -> None:
    v, offs = routing()
    w = torch.randn(E, D, N, dtype=torch.bfloat16)
    cuda_gemm.esmm(torch.randn(T, D, dtype=torch.bfloat16), w.transpose(1, 2), None, v, offs, K, "nk")
    assert cards.launches[0].spec.layout == "kn"
    assert cards.launches[0].values[1] == w.data_ptr()
    assert cards.launches[0].values[11:13] == (N, D * N)


def test_unaligned_strides_take_the_slow_path(cards: Cards) -> None:
    v, offs = routing()
    x, w = torch.randn(T, D + 1, dtype=torch.bfloat16)[:, :D], torch.randn(E, N, D, dtype=torch.bfloat16)
    cuda_gemm.esmm(x, w, None, v, offs, K, "nk")
    assert not cards.launches[0].spec.aligned
    assert cards.launches[0].values[10] == D + 1


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
@pytest.mark.parametrize("keep_h", [True, False])
def test_esmm_act(cards: Cards, glu: str, keep_h: bool) -> None:
    v, offs = routing()
    columns = 2 * N if glu in ("concat", "interleaved") else N
    w1, b1 = torch.randn(E, columns, D), torch.randn(E, columns)
    w3, b3 = (torch.randn(E, N, D), torch.randn(E, N)) if glu == "split" else (None, None)
    h, a = cuda_gemm.esmm_act(torch.randn(T, D), w1, b1, w3, b3, v, offs, K, "nk", "silu", glu, (), keep_h)
    assert a.shape == (T * K, N)
    assert h.shape == (T * K if keep_h else 0, N if glu == "none" else 2 * N)
    (launch,) = cards.launches
    assert (launch.spec.glu, launch.values[18]) == (glu, N)
    assert bool(launch.values[5]) == keep_h
    assert not cuda_fallback.fallbacks


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_esfk_of_few_rows_is_three_products(cards: Cards, layout: str) -> None:
    v, offs = routing()
    w = torch.randn((E, N, D) if layout == "nk" else (E, D, N), dtype=torch.bfloat16)
    x, g = torch.randn(T, D, dtype=torch.bfloat16), torch.randn(T * K, N, dtype=torch.bfloat16)
    dx, dw, db = cuda_gemm.esfk(x, g, w, v, offs, K, layout, True)
    assert (dx.shape, dw.shape, db.shape) == ((T * K, D), w.shape, (E, N))
    assert [launch.spec.op for launch in cards.launches] == ["esmm", "estmm", "ess_partial", "ess_finish"]
    assert cards.launches[1].spec.gather == (layout == "kn")
    assert cards.launches[1].spec.option("gather_b") == (layout == "nk")


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("bias", [True, False])
def test_esfk_is_one_launch(cards: Cards, layout: str, bias: bool) -> None:
    rows = 1000
    v, offs = routing(rows)
    x, g = torch.randn(rows // K, D, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
    w = torch.randn((E, N, D) if layout == "nk" else (E, D, N), dtype=torch.bfloat16)
    dx, dw, db = cuda_gemm.esfk(x, g, w, v, offs, K, layout, bias)
    (launch,) = cards.launches
    assert (dx.shape, dw.shape, db.shape) == ((rows, D), w.shape, (E, N) if bias else (0,))
    assert (launch.spec.op, launch.spec.bias, launch.spec.option("transpose")) == ("esfk", bias, layout == "nk")
    assert launch.spec.layout == ("kn" if layout == "nk" else "nk")
    row_product, weight_product, db_at = launch.values[:26], launch.values[26:52], launch.values[52]
    assert row_product[:2] == (g.data_ptr(), w.data_ptr())
    assert row_product[5] == dx.data_ptr()
    assert row_product[16:21] == (rows, 0, D, N, E)
    operands = (g, x) if layout == "nk" else (x, g)
    assert weight_product[:2] == tuple(t.data_ptr() for t in operands)
    assert weight_product[5] == dw.data_ptr()
    assert weight_product[16:21] == (rows, *dw.shape[1:], 0, E)
    assert v.data_ptr() == weight_product[8 if layout == "nk" else 7]
    assert db_at == (db.data_ptr() if bias else 0)
    tiles = -(-dw.shape[1] // launch.spec.bm) * -(-dw.shape[2] // launch.spec.bn)
    assert launch.blocks[0] >= sum(-(-200 // launch.spec.bm) * -(-D // launch.spec.bn) + tiles for _ in range(E))


def buffers(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((E, N, D) if layout == "nk" else (E, D, N)), torch.zeros(E, N)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients_are_added_where_they_belong(cards: Cards, layout: str, transposed: bool) -> None:
    v, offs = routing()
    x, g = torch.randn(T, D, dtype=torch.bfloat16), torch.randn(T * K, N, dtype=torch.bfloat16)
    into, _ = buffers(layout)
    if transposed:
        into = into.transpose(1, 2).contiguous().transpose(1, 2)
    cuda_gemm.estmm_add(into, x, g, v, None, offs, K, layout)
    (launch,) = cards.launches
    assert (launch.spec.op, launch.spec.accumulate, launch.spec.out_dtype) == ("estmm", True, DataType.f32)
    d = into.transpose(1, 2) if transposed else into
    first = g if (layout == "nk") != transposed else x
    assert (launch.values[0], launch.values[5]) == (first.data_ptr(), into.data_ptr())
    assert launch.values[13:15] == (d.stride(1), d.stride(0))
    assert launch.values[17:19] == tuple(d.shape[1:])


def test_sliced_rows_keep_their_stride_and_other_strides_take_a_second_buffer(
    cards: Cards, caplog: pytest.LogCaptureFixture
) -> None:
    v, offs = routing()
    x, g = torch.randn(T, D, dtype=torch.bfloat16), torch.randn(T * K, N, dtype=torch.bfloat16)
    cuda_rows._say_once.cache_clear()
    sliced = torch.zeros(E, N, 2 * D)[..., :D]
    cuda_gemm.estmm_add(sliced, x, g, v, None, offs, K, "nk")
    assert cards.launches[0].values[5] == sliced.data_ptr()
    assert cards.launches[0].values[13:15] == (2 * D, 2 * N * D)
    for _ in range(2):
        scattered = torch.ones(E, N, D, 2)[..., 0]
        cuda_gemm.estmm_add(scattered, x, g, v, None, offs, K, "nk")
        assert cards.launches[-1].values[5] != scattered.data_ptr()
        assert cards.launches[-1].values[13:15] == (D, N * D)
        assert (scattered == 1).all()  # a launch that does nothing added zeros
    assert len([r for r in caplog.records if "no kernel supports" in r.message]) == 1


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("bias", [True, False])
def test_esfk_adds_in_one_launch(cards: Cards, layout: str, bias: bool) -> None:
    v, offs = routing(rows := 1000)
    x, g = torch.randn(rows // K, D, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
    into, into_bias = buffers(layout)
    w = into.bfloat16()
    dx = cuda_gemm.esfk_add(into, into_bias if bias else None, x, g, w, v, offs, K, layout)
    (launch,) = cards.launches
    assert dx.shape == (rows, D)
    assert (launch.spec.op, launch.spec.bias, launch.spec.accumulate) == ("esfk", bias, True)
    assert (launch.values[5], launch.values[31]) == (dx.data_ptr(), into.data_ptr())
    assert launch.values[52] == (into_bias.data_ptr() if bias else 0)
    assert not cuda_fallback.fallbacks


def test_esfk_of_few_rows_adds_in_three_products(cards: Cards) -> None:
    v, offs = routing()
    x, g = torch.randn(T, D, dtype=torch.bfloat16), torch.randn(T * K, N, dtype=torch.bfloat16)
    into, into_bias = buffers("nk")
    cuda_gemm.esfk_add(into, into_bias, x, g, into.bfloat16(), v, offs, K, "nk")
    assert [(one.spec.op, one.spec.accumulate) for one in cards.launches] == [
        ("esmm", False),
        ("estmm", True),
        ("ess_partial", False),
        ("ess_finish", True),
    ]


def test_kernels_of_sm80_add_to_floats_only(cards: Cards) -> None:
    """What they give is stored, and torch adds it."""
    v, offs = routing(rows := 1000)
    x, g = torch.randn(rows // K, D, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
    into, into_bias = (t.bfloat16() for t in buffers("nk"))
    cuda_gemm.estmm_add(into, x, g, v, None, offs, K, "nk")
    cuda_gemm.esfk_add(into, into_bias, x, g, into, v, offs, K, "nk")
    assert [one.spec.op for one in cards.launches] == ["estmm", "esmm", "estmm", "ess_partial", "ess_finish"]
    assert not any(one.spec.accumulate for one in cards.launches)


def test_what_adds_is_not_measured(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    v, offs = routing(rows := 1000)
    x, g = torch.randn(rows // K, D, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
    into, _ = buffers("nk")
    monkeypatch.setattr(cuda_calls, "autotuning", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda_gemm.estmm_add(into, x, g, v, None, offs, K, "nk")
    cuda_gemm.esfk_add(into, None, x, g, into.bfloat16(), v, offs, K, "nk")
    assert len(cards.launches) == 2


def test_row_operators(cards: Cards) -> None:
    v, offs = routing()
    weights = torch.rand(T, K)
    h = torch.randn(T * K, 2 * N, dtype=torch.bfloat16)
    assert cuda_rows.combine(h, weights, v, offs, K).shape == (T, 2 * N)
    assert cuda_rows.ess(h[:T], v, offs, K, weights).shape == (E, 2 * N)
    a = cuda_rows.activate(h, "silu", "concat", ())
    dh, scaled, dweights = cuda_rows.activate_backward(a, h, weights, v, offs, "swiglu_oai", "interleaved", ())
    assert (dh.shape, scaled.shape, dweights.shape) == (h.shape, a.shape, weights.shape)
    assert cards.launches[-1].values[-2:] == pytest.approx((1.702, 7.0))
    assert not cuda_fallback.fallbacks


def test_a_missing_bias_beside_a_given_one_is_zero(cards: Cards) -> None:
    v, offs = routing()
    w, x = torch.randn(E, N, D), torch.randn(T, D)
    cuda_gemm.esmm_act(x, w, torch.ones(E, N), w, None, v, offs, K, "nk", "silu", "split", ())
    (launch,) = cards.launches
    assert launch.spec.bias
    assert 0 not in launch.values[3:5]


def test_what_no_kernel_takes_falls_back_and_says_so_once(
    cards: Cards, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    v, offs = routing()
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: AMPERE._replace(arch=75))
    for _ in range(2):
        cuda_gemm.esmm(torch.randn(T, D), torch.randn(E, N, D), None, v, offs, K, "nk")
    assert sum("falls back" in r.message for r in caplog.records) == 1
    assert "sm_75" in cuda_fallback.fallbacks["esmm"]
    assert not cards.launches


@pytest.mark.parametrize("value", [1, 2, 3, 5, 6, 7, 8, 10, 127, 128, 1000003])
def test_division_by_multiplication_is_exact(value: int) -> None:
    _, magic, shift = divisor(value)
    for x in (0, 1, value - 1, value, value + 1, 7 * value - 1, 2**30 + 1, 2**31 - 1, (2**31 - 1) // value * value - 1):
        got = x if value == 1 else ((x * magic) >> 32) >> shift
        assert got == x // value
    assert magic < 2**32


def operands(dtype: torch.dtype = torch.bfloat16, tokens: int = 400, width: int = N) -> tuple[torch.Tensor, ...]:
    return torch.randn(tokens, D, dtype=dtype), torch.randn(E, width, D, dtype=dtype), *routing(tokens * K)


@pytest.mark.usefixtures("hopper")
def test_hopper_takes_what_it_can() -> None:
    x, w, v, offs = operands()
    with cuda_choosing.collect() as specs:
        cuda_gemm.esmm(x, w, None, v, offs, K, "nk")
        cuda_gemm.esmm(x, w.mT.contiguous().mT, None, v, offs, K, "nk")
        cuda_gemm.esmm_act(x, w, None, w, None, v, offs, K, "nk", "silu", "split", ())
        cuda_gemm.estmm(x, torch.randn(800, N, dtype=x.dtype), v, None, offs, K, "nk")
        cuda_gemm.esfk(x, torch.randn(800, N, dtype=x.dtype), w, v, offs, K, "nk", False)
    assert [spec.op for spec in specs] == ["esmm", "esmm", "esmm_act", "estmm", "esfk"]
    assert {spec.family for spec in specs} == {"gather_gemm_sm90"}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", ["float32", "odd width", "odd stride", "few rows", "tanh", "both gathered"])
def test_what_hopper_leaves_goes_to_the_other_family(case: str) -> None:
    x, w, v, offs = operands(
        torch.float32 if case == "float32" else torch.bfloat16,
        4 if case == "few rows" else 400,
        N + 1 if case == "odd width" else N,
    )
    if case == "odd stride":
        x = torch.randn(400, D + 1, dtype=x.dtype)[:, :D]
    with cuda_choosing.collect() as specs:
        if case == "tanh":
            cuda_gemm.esmm_act(x, w, None, None, None, v, offs, K, "nk", "tanh", "none", ())
        elif case == "few rows":  # and no swapped tile
            cuda_gemm.esmm_act(x, w, None, None, None, v, offs, K, "nk", "silu", "interleaved", ())
        elif case == "both gathered":
            cuda_gemm.estmm(x, torch.randn(400, N, dtype=x.dtype), v, v, offs, K, "nk")
        else:
            cuda_gemm.esmm(x, w, None, v, offs, K, "nk")
    assert {spec.family for spec in specs} == {"gemm_sm80"}


def test_kernels_are_collected_without_launching_and_built_together(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[list[str]] = []
    monkeypatch.setattr(background, "prebuild", lambda specs: built.append([s.op for s in dict.fromkeys(specs)]))
    x, w, v, offs = operands(torch.float32)

    def step() -> None:
        h, a = cuda_gemm.esmm_act(x, w, None, None, None, v, offs, K, "nk", "relu", "none", ())
        cuda_gemm.esmm(a, w.mT.contiguous().mT, None, None, offs, 1, "kn")
        cuda_gemm.esmm(a, w.mT.contiguous().mT, None, None, offs, 1, "kn")
        cuda_rows.combine(h, None, v, offs, K)

    assert prebuild(step) == 3
    assert built == [["esmm", "esmm", "combine"]]
    assert not cards.launches
    step()
    assert len(cards.launches) == 4


def test_prebuilding_without_a_compiler_leaves_the_word_to_the_operators(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(specs: object) -> None:
        raise ToolchainError("none")

    monkeypatch.setattr(background, "prebuild", refuse)
    x, w, v, offs = operands()
    assert prebuild(lambda: cuda_gemm.esmm(x, w, None, v, offs, K, "nk")) == 0
