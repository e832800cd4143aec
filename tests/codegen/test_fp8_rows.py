"""quantize_fp8's and activate_fp8's own text, run on the host, beside the reference: elements, scales, and where they lie."""

import shutil

import pytest
import torch

from benchmarks.launching import run
from hexa_fx.cuda import fp8 as kernels
from hexa_fx.formats.fp8_scaling import first_groups, quantize_groups, read_groups, read_rows, rows_as_bytes
from hexa_fx.ops.activations import activation_forward, weighted_backward
from hexa_fx.ops.table_fp8 import EsmmActBackwardFp8
from tests.codegen.emulated import emulated  # noqa: F401

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.usefixtures("emulated"),
]
fp8 = torch.ops.hexa
E, K, TOKENS, WIDTH = 3, 2, 90, 200
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(found, expected):
    """Elements but for those that lie between two, and scales: a kernel multiplies where the reference divides."""
    (q, s), (q0, s0) = found, expected
    assert (q.shape, q.dtype, s.shape) == (q0.shape, q0.dtype, s0.shape)
    torch.testing.assert_close(s, s0, rtol=1e-6, atol=0, equal_nan=True)
    near = (q.view(torch.uint8).int() - q0.view(torch.uint8).int()).abs()
    both_nan = q.float().isnan() & q0.float().isnan()
    assert (near[~both_nan] <= 1).all()
    assert (near[~both_nan] > 0).float().mean() < 0.01


def routed(kind="random"):
    torch.manual_seed(0)
    index = torch.rand(TOKENS, E).argsort(1)[:, :K]
    if kind == "an expert without rows, and rows of none":
        index[index == 0] = E
    elif kind == "all to one":
        index[:] = 1
    return torch.ops.hexa.reindex(index, E)


ROUTINGS = ("random", "an expert without rows, and rows of none", "all to one")


@pytest.mark.parametrize(("dtype", "width"), list(zip(DTYPES, (WIDTH, 129, 256), strict=True)), ids=str)
def test_rows(dtype, width):
    x = (torch.randn(7, width) * torch.logspace(-6, 6, 7)[:, None]).clamp(-6e4, 6e4).to(dtype)
    x[2], x[3, 1] = 0, -0.0
    for binary in (False, True):
        same(kernels.quantize_rows_fp8(x, binary), fp8.quantize_rows_fp8(x, binary))


def test_a_number_that_is_none_stays_so_alone():
    x = torch.ones(2, 256)
    x[1, 5] = torch.nan
    for binary in (False, True):
        read = read_rows(*kernels.quantize_rows_fp8(x, binary))
        assert read[1, 5].isnan()
        assert (read.nan_to_num(1.0) == 1).all()


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("gathers", "dtype", "width"),
    [
        (True, torch.bfloat16, WIDTH),
        (False, torch.bfloat16, WIDTH),
        (True, torch.float16, 129),
        (True, torch.float32, 640),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["quantize_columns_fp8", "group_rows_fp8"])
def test_columns(kind, op, gathers, dtype, width):
    """The last of them has more tiles than a block takes at a time."""
    v, _, offs = routed(kind)
    x = torch.randn(TOKENS if gathers else len(v), width).to(dtype)
    x[:, 3] *= 1e3
    x[5] *= 1e-6
    x[6, ::2] = 0
    rows = (x,) if op == "quantize_columns_fp8" else fp8.quantize_rows_fp8(x, True)
    if op == "group_rows_fp8":  # with scales of other rows, larger and smaller
        rows[0].view(torch.uint8)[4:7, 7] = 0x7F  # NaN
    args = (*rows, *((v, offs, K) if gathers else (None, offs, 1)))
    used = int(first_groups(offs)[-1])
    found, expected = getattr(kernels, op)(*args), getattr(fp8, op)(*args)
    assert [t.shape for t in found] == [t.shape for t in expected]
    same([t[:used] for t in found], [t[:used] for t in expected])


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
@pytest.mark.parametrize(
    ("layout", "dtype"), [("nk", torch.bfloat16), ("kn", torch.bfloat16), ("kn", torch.float32)], ids=str
)
def test_weights(glu, layout, dtype):
    inner, depth = 72, 136
    shape = (2, inner if glu in ("none", "split") else 2 * inner, depth)
    w, w3 = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if glu == "split" else None
    if layout == "kn":
        w, w3 = w.transpose(1, 2).contiguous(), None if w3 is None else w3.transpose(1, 2).contiguous()
    high = 128 if glu == "none" else 256

    def buffers(turned=True):
        sizes = ((high, 256), (256, high))[: 2 if turned else 1]
        each = [
            (torch.full((2, a, b), 7.0).to(torch.float8_e4m3fn), torch.full((2, a // 128, b // 128), 7.0))
            for a, b in sizes
        ]
        return [t for pair in each for t in pair] + [None] * (0 if turned else 2)

    found, expected, single = buffers(), buffers(), buffers(turned=False)
    kernels.quantize_weight_fp8(*found, w, w3, layout, glu)
    fp8.quantize_weight_fp8(*expected, w, w3, layout, glu)
    kernels.quantize_weight_fp8(*single, w, w3, layout, glu)
    for pair in (found[:2], single[:2]):
        same(pair, expected[:2])
    same(found[2:], expected[2:])


@pytest.mark.parametrize("kind", ROUTINGS)
def test_sums_over_rows(kind):
    v, _, offs = routed(kind)
    g = fp8.quantize_columns_fp8(torch.randn(len(v), WIDTH), None, offs, 1)
    torch.testing.assert_close(kernels.ess_fp8(*g, offs), fp8.ess_fp8(*g, offs), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False)])
def test_gradient_of_the_activation(kind, activation, gated):
    """Its results are those of float32, quantised: bf16 in between moves an element by one at most."""
    v, _, offs = routed(kind)
    n, inner = len(v), 256
    width, routed_rows = inner * (2 if gated else 1), int(offs[-1])
    da, (h, hs) = torch.randn(n, inner).bfloat16(), fp8.quantize_rows_fp8(torch.randn(n, width), False)
    weights = torch.rand(n)
    groups = n // 128 + E
    wanted = [
        *(torch.full((n, width), 7.0).to(torch.float8_e4m3fn), torch.full((n, width // 128), 7.0)),
        *(torch.full((groups, width, 128), 7.0).to(torch.float8_e4m3fn), torch.full((groups, width), 7.0)),
        *(torch.full((groups, inner, 128), 7.0).to(torch.float8_e4m3fn), torch.full((groups, inner), 7.0)),
        torch.full((n, inner // 128), 7.0),
    ]
    given = EsmmActBackwardFp8(da, None, None, None, h, hs, weights, v, offs, K, activation, gated, (), ())
    run(kernels.activation_gradient, given, into=wanted)
    wide, glu = read_rows(h, hs), "concat" if gated else "none"
    a, share = activation_forward(wide, activation, glu, ()), weights[v.long()][:, None]
    dh = weighted_backward(da.float() * share, wide, None, activation, glu, ())[0]
    used = int(first_groups(offs)[-1])

    def near(found, expected, rtol=0.07):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=float(expected.abs().max()) * 2e-3)

    near(read_rows(*wanted[:2])[:routed_rows], dh[:routed_rows])
    for (q, s), rows, shared in ((wanted[2:4], dh, False), (wanted[4:6], a * share, True)):
        expected = read_groups(*quantize_groups(rows, offs, shared))
        near(read_groups(q, s)[:used], expected[:used], 0.13)
    near(wanted[6][:routed_rows], (da.float() * a).view(n, -1, 128).sum(2)[:routed_rows], 1e-3)
    assert (wanted[0][routed_rows:].float() == 7).all()
    dots = torch.full_like(wanted[6], 7.0)
    run(kernels.activation_gradient, given._replace(top_k_weights=None), into=[*[None] * 6, dots])
    assert torch.equal(dots, wanted[6])


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("dtype", "weights", "columns"), [(torch.bfloat16, torch.bfloat16, 200), (torch.float32, None, 333)], ids=str
)
def test_sums_of_rows_in_bytes(kind, dtype, weights, columns):
    _, inv, offs = routed(kind)
    y, ys = rows_as_bytes(torch.randn(len(inv), 128 * (columns // 128 + 1)) * torch.logspace(-3, 3, len(inv))[:, None])
    ys[int(offs[-1]) :] = torch.nan  # of no expert
    gates = None if weights is None else torch.rand(TOKENS, K).to(weights)
    args = (y, ys, gates, inv, offs, K, columns, dtype)
    found, expected = kernels.combine_fp8(*args), fp8.combine_fp8(*args)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(60, 3, 200), (5, 2, 4200), (0, 2, 200)], ids=str)
def test_sums_of_slots_and_widths_that_no_block_has_at_a_time(tokens, top_k, columns):
    """Three slots, which no kernel is made for; rows of more columns than a block has threads for; no tokens."""
    index = torch.rand(tokens, E).argsort(1)[:, :top_k]
    _, inv, offs = torch.ops.hexa.reindex(index, E)
    y, ys = rows_as_bytes(torch.randn(len(inv), 128 * (columns // 128 + 1)))
    args = (y, ys, torch.rand(tokens, top_k), inv, offs, top_k, columns, torch.float32)
    torch.testing.assert_close(kernels.combine_fp8(*args), fp8.combine_fp8(*args), rtol=1e-5, atol=1e-3)
