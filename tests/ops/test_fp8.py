"""The operators of FP8 block compute: quantisation, products on what was quantised, and torch's own opcheck."""

import pytest
import torch

import hexa_fx.ops  # noqa: F401  (defines the operators)
from hexa_fx.errors import InputError
from hexa_fx.formats import fp8_scaling
from hexa_fx.ops.table_fp8 import weight_sizes

fp8 = torch.ops.hexa
E, D, INNER, TOKENS, K = 3, 136, 72, 150, 2
"""Neither width is a multiple of 128."""
ROUTINGS = ("random", "an expert without tokens", "all to one", "out of range", "one token", "none")


def route(routing):
    torch.manual_seed(0)
    count = {"none": 0, "one token": 1}.get(routing, TOKENS)
    index = torch.rand(count, E).argsort(1)[:, :K]
    if routing == "an expert without tokens":
        index = index % (E - 1)
    elif routing == "all to one":
        index = torch.full_like(index, 1)
    elif routing == "out of range":
        index = torch.where(index == 0, E, index)
    return torch.ops.hexa.reindex(index, E)


def weight(glu, layout):
    """A weight as it is given, and (E, N, K) with gate and up as halves."""
    width = INNER if glu == "none" else 2 * INNER
    plain = torch.randn(E, width, D)
    given = plain
    if glu == "interleaved":
        given = torch.stack(plain.chunk(2, 1), 2).flatten(1, 2)
    parts = plain.chunk(2, 1) if glu == "split" else (given, None)
    turned = [None if p is None else p if layout == "nk" else p.transpose(1, 2).contiguous() for p in parts]
    return turned, plain


def quantized(w, w3=None, layout="nk", glu="none"):
    experts, rows, columns = weight_sizes(w, layout, glu)
    made = [
        torch.full(shape, 7.0).to(dtype)
        for high, wide in ((rows, columns), (columns, rows))
        for shape, dtype in (
            ((experts, high, wide), torch.float8_e4m3fn),
            ((experts, high // 128, wide // 128), torch.float32),
        )
    ]
    fp8.quantize_weight_fp8(*made, w, w3, layout, glu)
    return made


def close(found, expected, tolerance=0.04):
    assert found.shape == expected.shape
    error = (found - expected).norm() / expected.norm().clamp_min(1e-20)
    assert error < tolerance, error


@pytest.mark.parametrize("binary", [False, True])
def test_rows(binary):
    x = torch.randn(5, D) * torch.logspace(-3, 3, 5)[:, None]
    x[2] = 0
    q, s = fp8.quantize_rows_fp8(x.bfloat16(), binary)
    assert (q.shape, q.dtype, s.shape) == ((5, 256), torch.float8_e4m3fn, (5, 2))
    read = fp8_scaling.read_rows(q, s)
    assert (read[:, D:] == 0).all()
    assert (read[2] == 0).all()
    for row in (0, 1, 3, 4):
        close(read[row, :D], x[row])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_in_its_row(value):
    x = torch.ones(3, D)
    x[1, 7] = value
    read = fp8_scaling.read_rows(*fp8.quantize_rows_fp8(x, True))
    assert not read[1, 7].isfinite()
    assert read[[0, 2]].isfinite().all()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shared", [False, True])
def test_columns(routing, shared):
    v, _, offs = route(routing)
    x = torch.randn(len(v) // K, D)
    given = v, offs, K
    q, s = (
        fp8.group_rows_fp8(*fp8.quantize_rows_fp8(x, True), *given) if shared else fp8.quantize_columns_fp8(x, *given)
    )
    scales = s.view(len(s), 2, 128)
    assert torch.equal(scales, scales[..., :1].expand_as(scales)) == (shared or not len(s))
    assert q.shape == (len(v) // 128 + min(E, len(v)), 256, 128)
    read, group = fp8_scaling.read_groups(q, s), 0
    for start, end in zip(offs.tolist(), offs.tolist()[1:]):
        for first in range(start, end, 128):
            rows = x[v[first : min(first + 128, end)].long() // K]
            close(read[group, :D, : len(rows)].t(), rows)
            assert (read[group, :, len(rows) :] == 0).all()
            group += 1


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_weights(glu, layout):
    (w, w3), plain = weight(glu, layout)
    q, s, q_t, s_t = quantized(w, w3, layout, glu)
    assert torch.equal(q.float().transpose(1, 2), q_t.float())
    assert torch.equal(s.transpose(1, 2), s_t)
    for expert in range(E):
        read = fp8_scaling.read_weight(q[expert], s[expert])
        halves = [read[:INNER, :D]] if glu == "none" else [read[:INNER, :D], read[128 : 128 + INNER, :D]]
        close(torch.cat(halves), plain[expert])
        assert read.count_nonzero() == torch.cat(halves).count_nonzero()


def operands(routing="random", gated=True):
    v, inv, offs = route(routing)
    glu = "concat" if gated else "none"
    (w1, _), _ = weight(glu, "nk")
    w2 = torch.randn(E, D, INNER) / INNER**0.5
    x, dy = torch.randn(len(v) // K, D), torch.randn(len(v) // K, D)
    return v, inv, offs, x, dy, quantized(w1 / D**0.5, glu=glu), quantized(w2), torch.rand(len(v) // K, K)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gated", [True, False])
def test_products_are_those_of_the_numbers_that_were_quantised(routing, gated):
    v, inv, offs, x, dy, w1, w2, weights = operands(routing, gated)
    xq, dyq = fp8.quantize_rows_fp8(x, True), fp8.quantize_rows_fp8(dy, False)
    bias = torch.randn(E, w1[0].shape[1])
    h, hs, a, a_scales = fp8.esmm_act_fp8(*xq, *w1[:2], bias, v, offs, K, "silu", gated, (), True)
    y, ys = fp8.esmm_fp8(a, a_scales, *w2[:2], None, offs)
    out = fp8.combine_fp8(y, ys, weights, inv, offs, K, D, torch.float32)
    found = fp8.esmm_act_backward_fp8(*dyq, *w2[2:], h, hs, weights, v, offs, K, "silu", gated, (), [True] * 4)
    routed, token = int(offs[-1]), v.long() // K
    assert not found[6][routed:].any()
    expert = torch.repeat_interleave(torch.arange(E), offs.diff().long())
    rows, grads = (fp8_scaling.read_rows(*q)[token[:routed]] for q in (xq, dyq))
    first, second = (
        torch.stack([fp8_scaling.read_weight(q, s) for q, s in zip(*w[:2])]) if len(expert) else w[0][:0].float()
        for w in (w1, w2)
    )
    pre = torch.einsum("pk,pnk->pn", rows, first[expert]) + bias[expert]
    close(fp8_scaling.read_rows(h, hs)[:routed], pre)
    pre = fp8_scaling.read_rows(h, hs)[:routed].requires_grad_()  # which is what backward is told
    act = torch.nn.functional.silu(pre.chunk(2, 1)[0]) * pre.chunk(2, 1)[1] if gated else torch.nn.functional.silu(pre)
    share = weights.reshape(-1)[v[:routed].long()][:, None]
    da = torch.einsum("pn,pnk->pk", grads, second[expert])
    (dh,) = torch.autograd.grad(act, pre, da * share)
    close(fp8_scaling.read_rows(a, a_scales)[:routed], act, 0.08)
    rows_of_y = torch.einsum("pk,pnk->pn", act, second[expert])[:, :D]
    close(fp8_scaling.read_bytes(y, ys)[:routed, :D], rows_of_y, 0.08)
    close(out, torch.zeros_like(out).index_add(0, token[:routed], rows_of_y * share), 0.08)
    close(fp8_scaling.read_rows(*found[:2])[:routed], dh, 0.06)
    close(found[6][:routed].sum(1), (da * act).sum(1), 1e-4)
    out = torch.full((E, w1[0].shape[1], D), 5.0)
    of_x = fp8.group_rows_fp8(*xq, v, offs, K)
    fp8.estmm_fp8(out, *found[2:4], *of_x, offs, True, False)
    by_expert = torch.nn.functional.one_hot(expert, E).float()
    close(out, torch.einsum("pe,pn,pk->enk", by_expert, dh, x[token[:routed]]), 0.08)
    close(fp8.ess_fp8(*found[2:4], offs), by_expert.t() @ dh, 0.08)
    fp8.estmm_fp8(out, *found[2:4], *of_x, offs, True, True)
    second_out = torch.zeros(E, D, INNER)
    fp8.estmm_fp8(second_out, *fp8.quantize_columns_fp8(dy, v, offs, K), *found[4:6], offs, True, False)
    close(second_out, torch.einsum("pe,pn,pk->enk", by_expert, dy[token[:routed]], (act * share)[:, :INNER]), 0.08)


def test_results_that_are_not_wanted_are_empty():
    v, _, offs, x, dy, w1, w2, weights = operands()
    h, hs, a, _ = fp8.esmm_act_fp8(*fp8.quantize_rows_fp8(x, True), *w1[:2], None, v, offs, K, "silu", True, (), False)
    assert (len(h), len(hs), len(a)) == (0, 0, len(v))
    h, hs, _, _ = fp8.esmm_act_fp8(*fp8.quantize_rows_fp8(x, True), *w1[:2], None, v, offs, K, "silu", True, (), True)
    found = fp8.esmm_act_backward_fp8(
        *fp8.quantize_rows_fp8(dy, False), *w2[2:], h, hs, weights, v, offs, K, "silu", True, (), [False] * 4
    )
    assert [len(t) for t in found] == [0] * 7


@pytest.mark.parametrize(
    "name", ["rows", "columns", "weight", "groups", "esmm_act", "esmm", "combine", "esmm_act_backward", "estmm", "ess"]
)
def test_opcheck(name):
    v, inv, offs, x, dy, w1, w2, weights = operands()
    xq, dyq, xt = (
        fp8.quantize_rows_fp8(x, True),
        fp8.quantize_rows_fp8(dy, False),
        fp8.quantize_columns_fp8(x, v, offs, K),
    )
    static = (v, offs, K, "silu", True, [])
    h, hs, a, a_scales = fp8.esmm_act_fp8(*xq, *w1[:2], None, *static, True)
    arguments = {
        "rows": ("quantize_rows_fp8", x, True),
        "columns": ("quantize_columns_fp8", x, v, offs, K),
        "groups": ("group_rows_fp8", *xq, v, offs, K),
        "weight": ("quantize_weight_fp8", *w2, torch.randn(E, D, INNER), None, "nk", "none"),
        "esmm_act": ("esmm_act_fp8", *xq, *w1[:2], None, *static, True),
        "esmm": ("esmm_fp8", a, a_scales, *w2[:2], None, offs),
        "combine": (
            "combine_fp8",
            *fp8.esmm_fp8(a, a_scales, *w2[:2], None, offs),
            weights,
            inv,
            offs,
            K,
            D,
            torch.bfloat16,
        ),
        "esmm_act_backward": ("esmm_act_backward_fp8", *dyq, *w2[2:], h, hs, weights, *static, [True] * 4),
        "estmm": ("estmm_fp8", torch.zeros(E, D, D), *xt, *xt, offs, False, False),
        "ess": ("ess_fp8", *xt, offs),
    }
    operator, *given = arguments[name]
    parts = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if name in ("rows", "columns"):  # torch has no arithmetic on elements of 8 bits, which that part does on operands
        parts = (*parts, "test_schema")
    torch.library.opcheck(getattr(torch.ops.hexa, operator).default, tuple(given), test_utils=parts)


def test_operands_that_do_not_fit_are_refused():
    v, _, offs, x, _, w1, w2, _ = operands()
    xq = fp8.quantize_rows_fp8(x, True)
    with pytest.raises(InputError, match="float64"):
        fp8.quantize_rows_fp8(x.double(), True)
    with pytest.raises(InputError, match=r"w is .* beside x"):
        fp8.esmm_fp8(*xq, *w2[:2], None, offs)
    with pytest.raises(InputError, match="ws is"):
        fp8.esmm_act_fp8(*xq, w1[0], w1[1][:, :1], None, v, offs, K, "silu", True, (), True)
