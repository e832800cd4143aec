"""packed_gemm against float64 on dequantised weights: the depths of real models, ragged rows and columns, every epilogue."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.launching import on_tensors
from hexa_fx.codegen.family_packed import PackedTile
from hexa_fx.cuda import packed
from hexa_fx.cuda.packed import PackedProduct, Streamed
from hexa_fx.formats import FP8_BLOCK, INT8_ROWS, MXFP4, NF4
from hexa_fx.ops.table import Esmm, EsmmAct
from tests.gpu import cases
from tests.gpu.cases import ROUTINGS, check_esmm_act, graph_of, make_routing, randn, reference_esmm, row_error

pytestmark = pytest.mark.usefixtures("four_multiprocessors")
BF16, F16 = torch.bfloat16, torch.float16
EXPERTS = 12
TOLERANCE = {BF16: 5e-3, F16: 7e-4}
"""Values, scales, their products and results are rounded, each once."""
DEPTHS = [
    *((NF4, 2048), (NF4, 768), (NF4, 192), (NF4, 4096), (NF4, 7168), (MXFP4, 2880), (MXFP4, 32), (MXFP4, 4096)),
    *((FP8_BLOCK, 2048), (FP8_BLOCK, 768), (FP8_BLOCK, 2880), (FP8_BLOCK, 7168), (INT8_ROWS, 96), (INT8_ROWS, 4096)),
    *((NF4, 14336), (FP8_BLOCK, 14336)),
]


Weight = tuple[Tensor, Tensor, Streamed]
"""Codes, their scales, and the format."""


@cache
def weight(f: Streamed, columns: int, k: int) -> tuple[Weight, Tensor]:
    """Packed, and as it is read, in float64."""
    codes, scales = f.pack_all(randn(EXPERTS, columns, k, dtype=torch.float32, scale=k**-0.5))
    return (codes, scales, f), f.dense(codes, [scales], torch.float64)


def product(x: Tensor, w: Weight, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int) -> PackedProduct:
    """Without an activation."""
    codes, scales, f = w
    return PackedProduct(Esmm(x, codes, bias, v, offs, top_k, "nk").plain, scales, None, f)


def name(value: object) -> str | None:
    return value.name if isinstance(value, Streamed) else None


@pytest.mark.parametrize(("f", "k"), DEPTHS, ids=name)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_products(f: Streamed, k: int, kind: str) -> None:
    (w, dense), bias = weight(f, 88, k), randn(EXPERTS, 88, dtype=BF16)
    for tokens, top_k in ((1, 4), (8, 4), (64, 3)):
        r = make_routing(kind, tokens, top_k, EXPERTS)
        x, rows = randn(tokens, k, dtype=BF16), randn(r.n, k, dtype=BF16)
        gathered = product(x, w, bias, r.v, r.offs, top_k)
        assert not packed.unsupported(gathered)
        assert (
            row_error(on_tensors(packed).streamed_esmm(gathered), reference_esmm(x, dense, bias, r.v, r, "nk"))
            < TOLERANCE[BF16]
        )
        y = on_tensors(packed).streamed_esmm(product(rows, w, None, None, r.offs, 1))
        assert row_error(y, reference_esmm(rows, dense, None, None, r, "nk")) < TOLERANCE[BF16]


@pytest.mark.parametrize("f", [NF4, FP8_BLOCK], ids=name)
@pytest.mark.parametrize(
    ("k", "tile"),
    [
        (2048, PackedTile(1, 16, 1, 1, True)),
        (2048, PackedTile(2, 8, 2, 1)),
        (2048, PackedTile(2, 4, 4, 1)),
        (768, PackedTile(4, 3, 2, 1, True)),
        (768, PackedTile(1, 6, 1, 3)),
        (768, PackedTile(4, 2, 3, 2, True)),
        (2048, PackedTile(2, 3, 2, 1, True)),
    ],
    ids=str,
)
def test_tiles(k: int, tile: PackedTile, f: Streamed) -> None:
    (w, dense), r = weight(f, 200, k), make_routing("random", 40, 4, EXPERTS)
    x = randn(40, k, dtype=BF16)
    y = on_tensors(packed).streamed_esmm(product(x, w, None, r.v, r.offs, 4), tile)
    assert row_error(y, reference_esmm(x, dense, None, r.v, r, "nk")) < TOLERANCE[BF16]


@pytest.mark.parametrize(
    ("glu", "activation", "params"),
    [
        ("concat", "silu", ()),
        ("interleaved", "swiglu_oai", (1.702, 7.0)),
        ("split", "gelu", ()),
        ("none", "relu2", ()),
    ],
)
@pytest.mark.parametrize("f", [NF4, MXFP4, FP8_BLOCK], ids=name)
@pytest.mark.parametrize(("bias", "keep_h"), [(False, False), (True, True)], ids=["", "bias, keep h"])
def test_activations(
    f: Streamed, glu: str, activation: str, params: tuple[float, ...], bias: bool, keep_h: bool
) -> None:
    columns, k = 72 if glu in ("none", "split") else 144, 320
    w1, dense = weight(f, columns, k)
    w3, dense3 = weight(f, columns, k) if glu == "split" else (None, None)
    b1, b3 = (randn(EXPERTS, columns, dtype=BF16) if there else None for there in (bias, bias and glu == "split"))
    for kind in ("random", "all_to_one", "sentinels"):
        r = make_routing(kind, 9, 4, EXPERTS)
        x = randn(9, k, dtype=BF16)
        static: Any = (4, "nk", activation, glu, params, keep_h)
        base = EsmmAct(x, w1[0], b1, w3 and w3[0], b3, r.v, r.offs, *static)
        exact, scales = base._replace(w1=dense, w3=dense3), (w1[1], w3 and w3[1], f)
        check_esmm_act(
            lambda o, *of: on_tensors(packed).streamed_esmm_act(PackedProduct(o, *of)),
            base,
            r,
            *scales,
            exact=exact,
            within=TOLERANCE[BF16],
        )


@pytest.mark.parametrize("f", [NF4, FP8_BLOCK, INT8_ROWS], ids=name)
def test_float16(f: Streamed) -> None:
    (w, dense), r = weight(f, 88, 768), make_routing("random", 20, 4, EXPERTS)
    x = randn(20, 768, dtype=F16)
    y = on_tensors(packed).streamed_esmm(product(x, w, None, r.v, r.offs, 4))
    assert row_error(y, reference_esmm(x, dense, None, r.v, r, "nk")) < TOLERANCE[F16]


def test_a_cuda_graph_follows_the_routing() -> None:
    (w, dense), r = weight(NF4, 88, 768), make_routing("random", 20, 4, EXPERTS)
    x, v, offs = randn(20, 768, dtype=BF16), r.v.clone(), r.offs.clone()
    operands = product(x, w, None, v, offs, 4)
    on_tensors(packed).streamed_esmm(operands)
    graph, y = graph_of(lambda: on_tensors(packed).streamed_esmm(operands))
    for kind in ("all_to_one", "sentinels", "random"):
        other = make_routing(kind, 20, 4, EXPERTS)
        v.copy_(other.v), offs.copy_(other.offs)
        graph.replay()
        assert row_error(y, reference_esmm(x, dense, None, v, other, "nk")) < TOLERANCE[BF16], kind


def test_rows_and_experts_do_not_see_each_other() -> None:
    """NaN in one row, infinity in one expert's scales."""
    (w, dense), r = weight(NF4, 88, 768), make_routing("random", 20, 4, EXPERTS)
    x, scales = randn(20, 768, dtype=BF16), w[1].clone()
    x[3], scales[5] = float("nan"), float("inf")
    y = on_tensors(packed).streamed_esmm(product(x, (w[0], scales, w[2]), None, r.v, r.offs, 4))
    rows = torch.arange(r.n, device=cases.DEVICE)
    clean = (r.v // 4 != 3) & ~((rows >= r.offs[5]) & (rows < r.offs[6]))
    ref = reference_esmm(x, dense, None, r.v, r, "nk")
    assert row_error(y[clean], ref[clean]) < TOLERANCE[BF16]
    assert y[~clean].isnan().any(1).all()


@pytest.mark.parametrize("f", [NF4, MXFP4, FP8_BLOCK, INT8_ROWS], ids=name)
def test_a_layer(f: Streamed) -> None:
    """Through the operator, which takes four launches; against the same with weights as they are read."""
    hidden, inner = 320, 192
    (w1, dense1), (w2, dense2), b2 = (
        weight(f, 2 * inner, hidden),
        weight(f, hidden, inner),
        randn(EXPERTS, hidden, dtype=BF16),
    )
    for tokens in (1, 8, 64):
        r = make_routing("random", tokens, 4, EXPERTS)
        x, gates = randn(tokens, hidden, dtype=BF16), torch.rand(tokens, 4, device=cases.DEVICE)
        static = ("silu", "concat", [], "nk", "nk", False)
        sources = (*[None] * 6, [0.0] * 3, [w1[1]], [], [w2[1]], [f.name, "dense", f.name])
        operands = (w1[0], None, None, None, w2[0], b2)
        out = torch.ops.hexa.moe_ffn_sources(x, r.index, gates, *operands, *sources, *static)
        exact = (dense1, None, None, None, dense2, b2.double())
        want = torch.ops.hexa.moe_ffn(x.double(), r.index, gates.double(), *exact, *static)
        assert row_error(out, want) < 2 * TOLERANCE[BF16]
