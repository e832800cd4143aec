"""packed_gemm's own text, run on the host: which lane reads what, rows and lines that end anywhere, work that is dealt out."""

import shutil
from functools import partial

import pytest
import torch

from benchmarks.launching import on_tensors
from hexa_fx.codegen.family_packed import MOST_DEPTH, PackedTile, candidates, choose_tile
from hexa_fx.cuda import calls, packed
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda.packed import PackedProduct, unsupported
from hexa_fx.cuda.planning import planning_of
from hexa_fx.formats import FP8_BLOCK, INT8_ROWS, MXFP4, NF4
from hexa_fx.ops.table import Esmm, EsmmAct
from hexa_fx.ops.table_layers import MoeFfnSources
from tests.codegen.emulated import emulated, launches_run_here  # noqa: F401
from tests.cuda.cards import AMPERE, HOPPER
from tests.gpu.cases import Routing, check_esmm_act, reference_esmm, reference_reindex, row_error

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
E = 5
BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 5e-3, F16: 7e-4}
"""Values, scales, their products and results are rounded, each once."""
ON_SUMS = {BF16: 3.5e-3, F16: 5e-4}
"""Values and results alone."""
IDS = {
    "random": [[0, 3], [3, 4], [4, 0], [1, 3], [3, 0]],
    "all to one": [[2, 2]] * 10,
    "no expert": [[5, 3], [-1, 0], [5, 5]],
    "none": [[5, 5]] * 2,
}


def routing(kind: str) -> Routing:
    return reference_reindex(torch.tensor(IDS[kind]), E)


def weight(f, columns, k):
    codes, scales = f.pack_all(torch.randn(E, columns, k) * k**-0.5)
    if f is NF4:  # every code, and a block of zeros
        codes.view(-1)[: 256 * (codes.numel() // 256)] = torch.arange(256, dtype=torch.uint8).repeat(
            codes.numel() // 256
        )
        scales[0, 1] = 0
    if f.per_item == 1:  # every code that is a number
        every = torch.tensor([code for code in range(256) if f is INT8_ROWS or code & 127 != 127], dtype=torch.uint8)
        codes.view(torch.uint8).view(-1)[: len(every)] = every
    return (codes, scales), f.dense(codes, [scales], torch.float64)


@pytest.mark.parametrize(
    ("f", "dtype", "k", "n", "tile"),
    [
        (NF4, BF16, 192, 80, None),
        (NF4, BF16, 192, 80, PackedTile(1, 2, 1, 1)),
        (NF4, F16, 320, 33, PackedTile(2, 1, 3, 1)),  # a ring that is shorter than a unit
        (MXFP4, BF16, 288, 64, PackedTile(1, 2, 2, 1)),
        (FP8_BLOCK, BF16, 288, 200, None),  # blocks that end within a step and within a unit's lines
        (FP8_BLOCK, F16, 384, 256, PackedTile(1, 1, 3, 1, True)),
        (INT8_ROWS, BF16, 160, 80, None),
        (NF4, BF16, 832, 80, PackedTile(1, 2, 2, 1, True)),
        (FP8_BLOCK, BF16, 288, 40, PackedTile(1, 1, 1, 1, True)),
        (INT8_ROWS, F16, 512, 33, PackedTile(2, 1, 4, 1)),
    ],
    ids=[
        "nf4, scales on sums",
        "nf4",
        "nf4 in f16",
        "mxfp4",
        "fp8",
        "fp8 in f16",
        "int8",
        "two passes",
        "three passes of fp8",
        "int8 in f16",
    ],
)
def test_products(emulated, f, dtype, k, n, tile):  # noqa: F811
    check_products(f, dtype, k, n, tile)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_e4m3_is_converted_where_the_card_can(tmp_path, dtype):
    with pytest.MonkeyPatch.context() as patch:
        launches_run_here(patch, tmp_path, HOPPER)
        check_products(FP8_BLOCK, dtype, 288, 200, None)
        r, ((codes, scales), _) = routing("random"), weight(FP8_BLOCK, 128, 128)
        codes.view(torch.uint8)[:, 5, 7] = 127  # not a number
        esmm = Esmm(torch.randn(5, 128, dtype=dtype), codes, None, r.v, r.offs, r.top_k, "nk").plain
        out = on_tensors(packed).streamed_esmm(PackedProduct(esmm, scales, None, FP8_BLOCK))
        assert out.isnan().sum(0).tolist() == [0] * 5 + [r.n] + [0] * 122
    cuda_choosing.forget_choices()


def check_products(f, dtype, k, n, tile):
    (w, dense), bias = weight(f, n, k), torch.randn(E, n, dtype=dtype)
    for kind in IDS:
        r = routing(kind)
        x, rows = torch.randn(len(IDS[kind]), k, dtype=dtype), torch.randn(r.n, k, dtype=dtype)
        product = PackedProduct(Esmm(x, w[0], bias, r.v, r.offs, r.top_k, "nk").plain, w[1], None, f)
        assert not unsupported(product)
        error = row_error(on_tensors(packed).streamed_esmm(product, tile), reference_esmm(x, dense, bias, r.v, r, "nk"))
        assert error < (ON_SUMS if tile is None else TOLERANCE)[dtype], kind
        product = PackedProduct(Esmm(rows, w[0], bias, None, r.offs, 1, "nk").plain, w[1], None, f)
        error = row_error(
            on_tensors(packed).streamed_esmm(product, tile), reference_esmm(rows, dense, bias, None, r, "nk")
        )
        assert error < TOLERANCE[dtype], kind


@pytest.mark.parametrize(
    ("glu", "activation", "params", "f", "bias", "keep_h"),
    [
        ("concat", "silu", (), NF4, False, False),
        ("interleaved", "swiglu_oai", (1.702, 1.0), MXFP4, True, True),
        ("split", "gelu", (), NF4, True, True),
        ("none", "relu2", (), NF4, True, False),
        ("concat", "silu", (), FP8_BLOCK, False, True),
        ("split", "silu", (), INT8_ROWS, True, False),
    ],
)
def test_activations(emulated, glu, activation, params, f, bias, keep_h):  # noqa: F811
    inner, k = 96 if glu in ("concat", "interleaved") else 40, 192
    columns = inner if glu in ("none", "split") else 2 * inner
    w1, dense = weight(f, columns, k)
    w3, dense3 = weight(f, columns, k) if glu == "split" else (None, None)
    b1, b3 = (torch.randn(E, columns, dtype=BF16) if there else None for there in (bias, bias and glu == "split"))
    for kind in ("random", "no expert"):
        r = routing(kind)
        x = torch.randn(len(IDS[kind]), k, dtype=BF16)
        static = (r.v, r.offs, r.top_k, "nk", activation, glu, params, keep_h)
        base = EsmmAct(x, w1[0], b1, w3 and w3[0], b3, *static)
        exact, scales = base._replace(w1=dense, w3=dense3), (w1[1], w3 and w3[1], f)
        check_esmm_act(
            lambda o, *of: on_tensors(packed).streamed_esmm_act(PackedProduct(o, *of)),
            base,
            r,
            *scales,
            exact=exact,
            within=TOLERANCE[BF16],
        )


def a_step(operator, first, *rest):
    """What a plan does in place of a launch."""
    return planning_of(first).torch(operator, first, *rest)


@pytest.mark.parametrize("split", [False, True], ids=["concat", "split"])
def test_a_layer(emulated, monkeypatch, split):  # noqa: F811
    hidden, inner = 128, 64
    (w1, _), (w2, _) = weight(NF4, inner if split else 2 * inner, hidden), weight(NF4, hidden, inner)
    w3 = weight(NF4, inner, hidden)[0] if split else None
    b2, x, index = torch.randn(E, hidden, dtype=BF16), torch.randn(5, hidden, dtype=BF16), torch.tensor(IDS["random"])
    scales = [[w[1]] if w is not None else [] for w in (w1, w3, w2)]
    operands = (w1[0], None, w3 and w3[0], None, w2[0], b2)
    static = ("silu", "split" if split else "concat", [], "nk", "nk", False)
    sources = (*[None] * 6, [0.0] * 3, *scales, ["nf4", "nf4" if split else "dense", "nf4"])
    args = (x, index, torch.rand(5, 2).to(BF16), *operands, *sources, *static)
    for name in ("reindex", "combine"):  # by torch
        monkeypatch.setattr(packed, name, partial(a_step, getattr(torch.ops.hexa, name).default))
    _, tensors, addresses = calls.kind_of(args)
    card = AMPERE._replace(multiprocessors=1)
    plan = calls.planned(lambda *o: packed.streamed_layer(MoeFfnSources(*o)), args, card, calls.chosen())
    plan.load()
    assert [kernel.spec.family for kernel in plan.kernels] == ["packed_gemm"] * 2
    found, want = plan(tensors, addresses, x.device), torch.ops.hexa.moe_ffn_sources(*args)
    assert row_error(found, want) < 3 * TOLERANCE[BF16]


def test_what_is_left_to_other_ways(monkeypatch):
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: HOPPER)
    cuda_choosing.forget_choices()
    r, ((codes, scales), _) = routing("random"), weight(NF4, 64, 128)
    x = torch.randn(5, 128, dtype=BF16)
    base = Esmm(x, codes, None, r.v, r.offs, r.top_k, "nk").plain

    def why(of=NF4, scales=scales, **other):
        return unsupported(PackedProduct(base._replace(**other), scales, None, of))

    assert not why()
    assert "rows are torch.float32" in why(x=x.float())
    assert "unpacked once" in why(v=torch.zeros(33 * E, dtype=torch.int32))
    assert "contiguously" in why(w1=codes[:, ::2])
    assert "multiples of 16 bytes" in why(x=torch.randn(5, 130, dtype=BF16)[:, 1:129])
    wide, scales_of_wide = weight(MXFP4, 2, MOST_DEPTH + 32)[0]
    assert "up to 65536" in why(MXFP4, scales_of_wide, w1=wide)
    odd, scales_of_odd = weight(FP8_BLOCK, 64, 144)[0]
    assert "multiples of 32" in why(FP8_BLOCK, scales_of_odd, w1=odd, x=torch.randn(5, 144, dtype=BF16))
    other, scales_of_other = weight(MXFP4, 64, 128)[0]
    assert "scales are torch.uint8" in why(MXFP4, scales_of_other, w1=other, x=x.half())
    cuda_choosing.forget_choices()


def test_tiles_cover_the_depth():
    for k in (*range(32, 8193, 32), *range(8224, MOST_DEPTH + 1, 4096), MOST_DEPTH):
        for tile in (
            choose_tile(k, 64, 0, False),
            *(choose_tile(k, 128, 0, by) for by in (False, True)),
            *candidates(k, 64),
        ):
            assert tile.passes(k) <= max(1, -(-k // (2048 * tile.steps)))
            assert tile.warps_m * tile.warps_k <= 16
