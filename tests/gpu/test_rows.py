"""reindex, combine, ess, activate and activate_backward against torch in float64."""

import pytest
import torch

from hexa_fx.ops.activations import ACTIVATIONS, activation_forward, weighted_backward
from tests.gpu.cases import (
    DEVICE,
    ROUTINGS,
    TOLERANCE,
    Routing,
    assert_close,
    gathered,
    make_routing,
    randn,
    reference_reindex,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_reindex(index: torch.Tensor, experts: int) -> None:
    want: Routing = reference_reindex(index, experts)
    v, inv, offs = torch.ops.hexa.reindex(index, experts)
    for got, expected in ((v, want.v), (inv, want.inv), (offs, want.offs)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 5), (1, 1, 1), (7, 3, 7), (513, 8, 64), (16384, 8, 128)]
)
@pytest.mark.parametrize("kind", ["random", "all_to_one", "sentinels"])
def test_reindex(tokens: int, top_k: int, experts: int, kind: str) -> None:
    check_reindex(make_routing(kind, tokens, top_k, experts).index, experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_reindex_of_every_integer_type(dtype: torch.dtype) -> None:
    check_reindex(torch.randint(0, 60, (3000, 2), device=DEVICE).to(dtype), 57)


def test_reindex_of_many_experts_of_negative_ids_and_of_a_view() -> None:
    check_reindex(torch.randint(-3, 1100, (5000, 4), device=DEVICE), 1000)
    check_reindex(torch.randint(0, 8, (4, 999), device=DEVICE).t(), 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [8, 37, 512, 2050])
def test_combine(dtype: torch.dtype, top_k: int, width: int) -> None:
    for kind in ("random", "sentinels"):
        r = make_routing(kind, 65, top_k, 9)
        y = randn(r.n, width, dtype=dtype)
        y[r.routed :] = float("nan")
        w = torch.rand(65, top_k, device=DEVICE)
        w.view(-1)[r.v[r.routed :].long()] = float("nan")
        rows = torch.where((r.inv < r.routed)[:, None], y.double()[r.inv.long()], 0).view(65, top_k, width)
        out = torch.ops.hexa.combine(y, w, r.inv, r.offs, top_k)
        assert_close(out, (rows * w.double().nan_to_num(0)[..., None]).sum(1), dtype)
        assert_close(torch.ops.hexa.combine(y, None, r.inv, r.offs, top_k), rows.sum(1), dtype)


@pytest.mark.parametrize("weights", DTYPES)
def test_combine_takes_weights_of_any_float_type_and_strided_rows(weights: torch.dtype) -> None:
    r = make_routing("random", 33, 2, 4)
    y = randn(r.n, 50, dtype=torch.bfloat16)[:, :40]
    w = torch.rand(33, 2, device=DEVICE).to(weights)
    rows = y.double()[r.inv.long()].view(33, 2, 40)
    assert_close(torch.ops.hexa.combine(y, w, r.inv, r.offs, 2), (rows * w.double()[..., None]).sum(1), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("width", [40, 333])
def test_ess(dtype: torch.dtype, kind: str, width: int) -> None:
    r = make_routing(kind, 700, 2, 6)
    g, scale = randn(700, width, dtype=dtype), torch.rand(700, 2, device=DEVICE)
    experts = torch.repeat_interleave(torch.arange(6, device=DEVICE), r.offs.diff().long())

    def reference(rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(6, width).index_add_(0, experts, rows[: r.routed])

    rows = gathered(g, r.v, 2)
    assert_close(torch.ops.hexa.ess(g, r.v, r.offs, 2, None), reference(rows), dtype, 2)
    weighted = rows * scale.double().view(-1)[r.v.long()][:, None]
    assert_close(torch.ops.hexa.ess(g, r.v, r.offs, 2, scale), reference(weighted), dtype, 2)
    sorted_rows = randn(r.n, width, dtype=dtype)
    out = torch.ops.hexa.ess(sorted_rows, None, r.offs, 1, None)
    assert_close(out, reference(sorted_rows.double()), dtype, 2)
    assert torch.equal(out, torch.ops.hexa.ess(sorted_rows, None, r.offs, 1, None))


CASES = [(a, glu) for a, act in ACTIVATIONS.items() for glu in (("concat", "interleaved") if act.pair else ("none",))]
CASES += [(a, glu) for a in ("relu", "gelu", "silu") for glu in ("concat", "interleaved")]


@pytest.mark.parametrize(("activation", "glu"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activate_and_its_backward(activation: str, glu: str, dtype: torch.dtype) -> None:
    for width in (24, 300, 1000) if dtype == torch.bfloat16 else (24, 301):
        r = make_routing("sentinels", 50, 2, 5)
        h = randn(r.n, width if glu == "none" else 2 * width, dtype=dtype, scale=3.0)
        h[: r.routed, :3] *= 10
        da, w = randn(r.n, width, dtype=dtype), torch.rand(50, 2, device=DEVICE)
        wide = h.double()
        # a 16-bit kernel uses the fast exponential and float32 throughout
        factor = 2.0 if dtype == torch.bfloat16 else 1.0
        a = activation_forward(wide, activation, glu, ())
        assert_close(torch.ops.hexa.activate(h, activation, glu, []), a, dtype, factor)
        dh, scaled, empty = torch.ops.hexa.activate_backward(da, h, None, None, None, activation, glu, [])
        assert_close(dh, weighted_backward(da.double(), wide, None, activation, glu, ())[0], dtype, factor)
        assert_close(scaled, a, dtype, factor)
        assert empty.numel() == 0

        h[r.routed :] = float("nan")
        da[r.routed :] = float("nan")
        row_w = w.double().view(-1)[r.v.long()][:, None] * (torch.arange(r.n, device=DEVICE) < r.routed)[:, None]
        dh, scaled, dw = torch.ops.hexa.activate_backward(da, h, w, r.v, r.offs, activation, glu, [])
        wide, grad, a = (torch.nan_to_num(t.double(), 0) for t in (h, da, a))
        want_dh = weighted_backward(grad * row_w, wide, None, activation, glu, ())[0]
        want_dh[r.routed :] = 0
        assert_close(dh, want_dh, dtype, factor)
        assert_close(scaled, a * row_w, dtype, factor)
        dots = (grad * a).sum(1)
        want = torch.zeros_like(dots).index_copy_(0, r.v.long(), dots)
        size = (grad * a).abs().sum(1).max()
        assert float((dw.double().view(-1) - want).abs().max() / size) <= TOLERANCE[dtype]
