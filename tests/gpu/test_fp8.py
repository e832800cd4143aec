"""The kernels of FP8 block compute beside their reference in plain torch, on the same operands; then whole layers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import first_groups, quantize_groups, read_bytes, read_groups, read_rows, read_weight
from hexa_fx.ops import library
from hexa_fx.ops.table_fp8 import weight_sizes
from tests.gpu.cases import Routing, make_routing, randn

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXPERTS, TOP_K = 6, 2
ROUTINGS = ("random", "all_to_one", "empty_experts", "sentinels", "none_routed", "one token", "no tokens")
WIDTHS = [(384, 256, 450), (200, 136, 150), (1024, 128, 1300)]
"""D, I and tokens: several tiles, widths that are filled up, and more steps than stages."""


pytestmark = pytest.mark.usefixtures("hopper", "four_multiprocessors")


def route(kind: str, tokens: int) -> Routing:
    count = {"one token": 1, "no tokens": 0}.get(kind, tokens)
    return make_routing(kind, count, TOP_K, EXPERTS)


def reference(name: str, *args: Any) -> Any:
    return library.kernel_for(name, "any")(*args)


def kernel(name: str, *args: Any) -> Any:
    return library.kernel_for(name, "cuda")(*args)


def quantised_weight(
    w: Tensor, w3: Tensor | None = None, layout: str = "nk", glu: str = "none", run: Any = reference
) -> list[Tensor]:
    experts, rows, columns = weight_sizes(w, layout, glu)
    made = []
    for high, wide in ((rows, columns), (columns, rows)):
        made.append(torch.full((experts, high, wide), 3.0, device=w.device).to(torch.float8_e4m3fn))
        made.append(torch.full((experts, high // 128, wide // 128), torch.nan, device=w.device))
    run("quantize_weight_fp8", *made, w, w3, layout, glu)
    return made


def near(found: Tensor, expected: Tensor, step: float | None = None, of_largest: float = 4e-3) -> None:
    """Each number to a step of what it is rounded to, relative to it (the dtype's, unless given): sums in another order may fall
    on the other side; and 0.4 % of the largest. NaN where NaN is expected."""
    assert found.shape == expected.shape
    if not expected.numel():
        return
    step = torch.finfo(expected.dtype).eps if step is None else step
    found, expected = found.double(), expected.double()
    off = (found - expected).abs() - step * expected.abs()
    known = expected.isfinite()
    assert torch.equal(found.isfinite(), known)
    assert not known.any() or off[known].max() <= of_largest * expected[known].abs().max()


ELEMENT_STEP = 0.13


def rows(pair: Sequence[Tensor], r: Routing) -> Tensor:
    return read_rows(*pair)[: r.routed]


def groups(pair: Sequence[Tensor], r: Routing) -> Tensor:
    return read_groups(*(t[: int(first_groups(r.offs)[-1])] for t in pair))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("width", [128, 200, 1027])
def test_rows(dtype: torch.dtype, width: int) -> None:
    x = randn(33, width, dtype=dtype)
    x[5], x[6, 3] = 0, torch.nan
    for binary in (False, True):
        found, expected = (run("quantize_rows_fp8", x, binary) for run in (kernel, reference))
        assert read_rows(*found)[6, 3].isnan()
        near(read_rows(*(t[:6] for t in found)), read_rows(*(t[:6] for t in expected)), ELEMENT_STEP)
        near(read_rows(*(t[7:] for t in found)), read_rows(*(t[7:] for t in expected)), ELEMENT_STEP)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("dtype", "width", "shared"), [(BF16, 200, False), (BF16, 1280, True), (F16, 129, True), (F32, 640, False)]
)
def test_columns_and_their_sums(kind: str, dtype: torch.dtype, width: int, shared: bool) -> None:
    r = route(kind, 400)
    x = randn(r.n // TOP_K, width, dtype=dtype)
    given = reference("quantize_rows_fp8", x, True) if shared else (x,)
    op = "group_rows_fp8" if shared else "quantize_columns_fp8"
    found, expected = (run(op, *given, r.v, r.offs, TOP_K) for run in (kernel, reference))
    near(groups(found, r), groups(expected, r), ELEMENT_STEP)
    near(kernel("ess_fp8", *expected, r.offs), reference("ess_fp8", *expected, r.offs))


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_weights(glu: str, layout: str) -> None:
    shape = (3, 272, 200) if glu in ("concat", "interleaved") else (3, 136, 200)
    w, w3 = (randn(*shape, dtype=BF16) for _ in range(2))
    w, w3 = (t if layout == "nk" else t.transpose(1, 2).contiguous() for t in (w, w3))
    args = (w, w3 if glu == "split" else None, layout, glu)
    found, expected = quantised_weight(*args, run=kernel), quantised_weight(*args)
    for i in (0, 2):
        for e in range(3):
            near(
                read_weight(found[i][e], found[i + 1][e]), read_weight(expected[i][e], expected[i + 1][e]), ELEMENT_STEP
            )


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("hidden", "inner", "tokens"), WIDTHS)
@pytest.mark.parametrize(
    ("activation", "gated", "params"), [("silu", True, ()), ("gelu", False, ()), ("swiglu_oai", True, (1.7, 7.0))]
)
def test_products(
    kind: str, hidden: int, inner: int, tokens: int, activation: str, gated: bool, params: tuple[float, ...]
) -> None:
    r, step = route(kind, tokens), (activation, gated, params)
    w1 = quantised_weight(
        randn(EXPERTS, inner * (1 + gated), hidden, dtype=BF16, scale=hidden**-0.5), glu="concat" if gated else "none"
    )
    w2 = quantised_weight(randn(EXPERTS, hidden, inner, dtype=BF16, scale=inner**-0.5))
    x, dy = (reference("quantize_rows_fp8", randn(r.n // TOP_K, hidden, dtype=BF16), True) for _ in range(2))
    bias = randn(EXPERTS, w1[0].shape[1], dtype=F32) if activation != "silu" else None
    up = (*x, *w1[:2], bias, r.v, r.offs, TOP_K, *step, True)
    found, expected = kernel("esmm_act_fp8", *up), reference("esmm_act_fp8", *up)
    for i in (0, 2):
        near(rows(found[i : i + 2], r), rows(expected[i : i + 2], r), ELEMENT_STEP)
    h, a = expected[:2], expected[2:]
    gates = torch.rand(r.n // TOP_K, TOP_K, device="cuda")
    found, expected = (run("esmm_fp8", *a, *w2[:2], None, r.offs) for run in (kernel, reference))
    assert ((found[0].int() - expected[0].int()).abs()[: r.routed] <= 1).all()
    near(read_bytes(*found)[: r.routed], read_bytes(*expected)[: r.routed], of_largest=0.01)
    for dtype in (BF16, F16, F32):
        sums = (*expected, gates, r.inv, r.offs, TOP_K, hidden, dtype)
        near(kernel("combine_fp8", *sums), reference("combine_fp8", *sums))
    back = (*dy, *w2[2:], *h, gates, r.v, r.offs, TOP_K, *step, (True,) * 4)
    found, expected = kernel("esmm_act_backward_fp8", *back), reference("esmm_act_backward_fp8", *back)
    near(rows(found[:2], r), rows(expected[:2], r), ELEMENT_STEP)
    for i in (2, 4):
        near(groups(found[i : i + 2], r), groups(expected[i : i + 2], r), ELEMENT_STEP)
    near(found[6][: r.routed], expected[6][: r.routed], of_largest=0.015)  # of a token's few, and da in bf16
    assert not found[6][r.routed :].any()


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("form", ["bf16", "f32", "turned", "turned, odd", "every second", "added"])
@pytest.mark.parametrize("shared", [False, True])
def test_weight_gradients(kind: str, form: str, shared: bool) -> None:
    """Square ones: nothing but numbers tells them from their transposes."""
    r, width = route(kind, 700), 264
    magnitudes = torch.logspace(-1, 1, width, device="cuda")  # by column
    x, g = (quantize_groups(randn(r.n, width, dtype=BF16) * magnitudes, r.offs, each) for each in (False, shared))
    dtype, value = (F32 if form in ("f32", "added") else BF16), 2.0 if form == "added" else torch.nan
    columns = {"every second": 2 * width, "turned, odd": width + 1}.get(form, width)
    found, expected = (torch.full((EXPERTS, width, columns), value, dtype=dtype, device="cuda") for _ in range(2))
    for out, run in ((found, kernel), (expected, reference)):
        view = out[:, :, ::2] if form == "every second" else out[:, :, :width]
        run("estmm_fp8", view.transpose(1, 2) if "turned" in form else view, *x, *g, r.offs, shared, form == "added")
    near(found, expected)


def layer(device_x: Tensor, r: Routing, weights: list[Tensor], compute: str) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.detach().clone().requires_grad_() for t in (device_x, *weights)]
    x, gates, w1, w2 = leaves
    args = (x, r.index, gates, w1, None, None, None, w2, None, "silu", "concat", [], "nk", "nk", False)
    y = torch.ops.hexa.moe_ffn_fp8(*args, False) if compute == "fp8" else torch.ops.hexa.moe_ffn(*args)
    return y, list(torch.autograd.grad(y, leaves, torch.ones_like(y) + 0.1 * y.detach()))


@pytest.mark.parametrize("kind", ROUTINGS[:5])
def test_a_layer_is_near_its_exact_form(kind: str) -> None:
    """Cosine of 0.997, as recipes of this kind have."""
    r, hidden, inner = route(kind, 600), 512, 256
    x, gates = randn(600, hidden, dtype=BF16), torch.rand(600, TOP_K, device="cuda")
    w1, w2 = (
        randn(EXPERTS, 2 * inner, hidden, dtype=BF16, scale=hidden**-0.5),
        randn(EXPERTS, hidden, inner, dtype=BF16, scale=inner**-0.5),
    )
    (y, grads), (y0, grads0) = (layer(x, r, [gates, w1, w2], compute) for compute in ("fp8", "exact"))
    for found, expected in zip((y, *grads), (y0, *grads0), strict=True):
        a, b = found.double().flatten(), expected.double().flatten()
        assert a.isfinite().all()
        if b.norm() == 0:
            assert a.norm() == 0
        else:
            assert torch.dot(a, b) / (a.norm() * b.norm()) > 0.995
            assert 0.97 < a.norm() / b.norm() < 1.03


def test_a_number_that_is_none_stays_in_its_rows() -> None:
    r = route("random", 300)
    w = quantised_weight(randn(EXPERTS, 256, 256, dtype=BF16, scale=0.06))
    x = randn(r.n, 256, dtype=BF16)
    x[17, 5] = torch.nan
    q = kernel("quantize_rows_fp8", x, False)
    y = read_bytes(*kernel("esmm_fp8", *q, *w[:2], None, r.offs))
    bad = y.isnan().any(1)
    assert bad[17]
    assert bad.sum() == 1
