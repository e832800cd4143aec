"""Gradients added to float32 buffers, or to ``.grad``, in the kernels' epilogues, against float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import rows as cuda_rows
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import grad_sums
from tests.gpu.cases import ROUTINGS, graph_of, make_routing, randn, reference_esmm, reference_estmm, row_error, sums
from tests.gpu.test_moe_ffn import SPECS, TOLERANCE, E, Expert, K, T

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOKENS, TOP_K, EXPERTS, D, N, STEPS = 301, 3, 7, 200, 328, 4
FLOAT32 = 2e-5
"""What tensor cores' float32 sums over some hundred rows differ by; a product rounded to bf16 is off by 2e-3."""


@pytest.fixture(params=["native", "80"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """This device's own family, then the one for sm_80, forced."""
    if request.param == "80":
        monkeypatch.setenv("HEXA_FX_CUDA_ARCH", "80")
    cuda_choosing.forget_choices()
    yield request.param
    monkeypatch.undo()
    cuda_choosing.forget_choices()


def size(layout: str) -> tuple[int, int, int]:
    return (EXPERTS, N, D) if layout == "nk" else (EXPERTS, D, N)


def assert_sum(into: Tensor, want: Tensor, tolerance: float = FLOAT32) -> None:
    error = row_error(into, want)
    assert error < tolerance, f"per-row relative error {error:.2e}"


SIDES = [(BF16, side) for side in ("x", "g", "neither", "both")] + [(F16, "g"), (F32, "x"), (F64, "x")]


@pytest.mark.parametrize(("dtype", "side"), SIDES, ids=str)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_micro_batches_add_up(family: str, dtype: torch.dtype, side: str, layout: str) -> None:
    """Rows of no expert are NaN; experts without rows keep what they have."""
    wide = F64 if dtype == F64 else F32
    into, into_bias = (
        torch.ones(size(layout), dtype=wide, device="cuda"),
        torch.ones(EXPERTS, N, dtype=wide, device="cuda"),
    )
    want, want_bias = into.double(), into_bias.double()
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x = randn(TOKENS if side in ("x", "both") else r.n, D, dtype=dtype)
        g = randn(TOKENS if side in ("g", "both") else r.n, N, dtype=dtype)
        for rows in (x, g):
            if rows.shape[0] == r.n:
                rows[r.routed :] = float("nan")
        xi, gi = (r.v if side in ("x", "both") else None), (r.v if side in ("g", "both") else None)
        empty = r.offs[1:] == r.offs[:-1]
        before = into.clone()
        torch.ops.hexa.estmm_add(into, x, g, xi, gi, r.offs, TOP_K, layout)
        torch.ops.hexa.ess_add(into_bias, g, gi, r.offs, TOP_K if gi is not None else 1, None)
        assert torch.equal(into[empty], before[empty])
        want += reference_estmm(x, g, xi, gi, r, layout)
        rows = g if gi is None else g[r.v.long() // TOP_K]
        want_bias += sums(rows, r)
    assert_sum(into, want, FLOAT32 if wide == F32 else 1e-12)
    assert_sum(into_bias, want_bias, FLOAT32 if wide == F32 else 1e-12)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("side", ["x", "g", "neither"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_sums_of_16_bits_are_those_of_torch(family: str, dtype: torch.dtype, side: str, layout: str) -> None:
    """To the bit. Experts without rows keep what they have, NaN included."""
    into, into_bias = (randn(*shape, dtype=dtype) for shape in (size(layout), (EXPERTS, N)))
    for kind in ROUTINGS:
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x = randn(TOKENS if side == "x" else r.n, D, dtype=dtype)
        g = randn(TOKENS if side == "g" else r.n, N, dtype=dtype)
        xi, gi = (r.v if side == "x" else None), (r.v if side == "g" else None)
        empty = r.offs[1:] == r.offs[:-1]
        into[empty] = float("nan")
        want = into + torch.ops.hexa.estmm(x, g, xi, gi, r.offs, TOP_K, layout)
        sums = torch.ops.hexa.ess(g, gi, r.offs, TOP_K if gi is not None else 1, None)
        want_bias = into_bias + sums
        torch.ops.hexa.estmm_add(into, x, g, xi, gi, r.offs, TOP_K, layout)
        torch.ops.hexa.ess_add(into_bias, g, gi, r.offs, TOP_K if gi is not None else 1, None)
        assert torch.equal(into.nan_to_num(7), want.nan_to_num(7))
        assert torch.equal(into_bias, want_bias)
        into[empty] = 0


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_esfk_adds_to_16_bits(family: str, layout: str, bias: bool, transposed: bool) -> None:
    into, into_bias = randn(*size(layout), dtype=BF16), randn(EXPERTS, N, dtype=BF16) if bias else None
    if transposed:
        into = into.mT.contiguous().mT
    w = randn(*size(layout), dtype=BF16, scale=D**-0.5)
    for kind in (*ROUTINGS, "random"):
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x, g = randn(TOKENS, D, dtype=BF16), randn(r.n, N, dtype=BF16)
        before = into.double(), None if into_bias is None else into_bias.double()
        torch.ops.hexa.esfk_add(into, into_bias, x, g, w, r.v, r.offs, TOP_K, layout)
        want = before[0] + reference_estmm(x, g, r.v, None, r, layout)
        assert float((into.double() - want).norm() / want.norm()) < 5e-3
        if into_bias is not None and before[1] is not None:
            want_bias = before[1] + sums(g, r)
            assert float((into_bias.double() - want_bias).norm() / want_bias.norm()) < 5e-3


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    ("stored", "bias"),
    [("contiguous", False), ("contiguous", True), ("transposed", True), ("scattered", False), ("unaligned", True)],
)
def test_esfk_adds(family: str, layout: str, stored: str, bias: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Buffers as they lie; those that no kernel knows, through a second one, which is said."""
    cuda_rows._say_once.cache_clear()
    e, rows, columns = size(layout)
    into = torch.zeros(e, rows, columns, device="cuda")
    if stored == "transposed":
        into = torch.zeros(e, columns, rows, device="cuda").transpose(1, 2)
    if stored == "scattered":
        into = torch.zeros(e, rows, columns, 2, device="cuda")[..., 0]
    if stored == "unaligned":
        into = torch.zeros(e * rows * columns + 1, device="cuda")[1:].view(e, rows, columns)
    into_bias = torch.zeros(e, N, device="cuda") if bias else None
    want, want_bias = torch.zeros(size(layout), dtype=F64, device="cuda"), torch.zeros(e, N, dtype=F64, device="cuda")
    w = randn(*size(layout), dtype=BF16, scale=D**-0.5)
    for kind in (*ROUTINGS, "random"):
        r = make_routing(kind, TOKENS, TOP_K, EXPERTS)
        x, g = randn(TOKENS, D, dtype=BF16), randn(r.n, N, dtype=BF16)
        dx = torch.ops.hexa.esfk_add(into, into_bias, x, g, w, r.v, r.offs, TOP_K, layout)
        assert row_error(dx, reference_esmm(g, w, None, None, r, "kn" if layout == "nk" else "nk")) < 4e-3
        want += reference_estmm(x, g, r.v, None, r, layout)
        want_bias += sums(g, r)
    assert_sum(into, want)
    if into_bias is not None:
        assert_sum(into_bias, want_bias)
    said = any("no kernel supports" in record.message for record in caplog.records)
    assert said == (stored == "scattered" or (stored == "unaligned" and family == "native" and sm90_device()))


def sm90_device() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def with_buffers(expert: Expert) -> dict[str, Tensor]:
    found = {name: t for name, t in expert.operands.items() if name != "x"}
    for t in found.values():
        t.main_grad = torch.zeros_like(t, dtype=F32)
    return found


def backward(expert: Expert) -> None:
    expert.run().backward(expert.dy)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_main_grad_of_several_micro_batches(spec: FfnSpec) -> None:
    expert = Expert(spec, BF16, True)
    named = with_buffers(expert)
    want: dict[str, Tensor] = {}
    for kind in ("random", "all_to_one", "empty_experts", "sentinels"):
        expert.index = make_routing(kind, T, K, E).index
        expert.dy = randn(*expert.dy.shape, dtype=BF16)
        backward(expert)
        _, *grads = expert.reference()
        for name, gradient in zip(expert.operands, grads, strict=False):
            want[name] = want.get(name, 0) + gradient
    for name, t in named.items():
        assert t.grad is None
        error = float((t.main_grad.double() - want[name]).norm() / want[name].norm())
        assert error < TOLERANCE[BF16]
        change = t.main_grad[t.main_grad != 0]
        assert float((change == change.bfloat16().float()).double().mean()) < 0.2  # nothing was rounded to bf16


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("cast", [False, True])
def test_grad_of_several_micro_batches(spec: FfnSpec, cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second on kernels add; to floats, if operands are casts of parameters."""
    added = []
    real = grad_sums.beside
    monkeypatch.setattr(grad_sums, "beside", lambda *given: added.append(real(*given)) or added[-1])
    expert = Expert(spec, BF16, True)
    if cast:
        held = {name: t.detach().float().requires_grad_() for name, t in expert.operands.items() if name != "x"}
    else:
        held = {name: t for name, t in expert.operands.items() if name != "x"}
    x = expert.record.x
    want: dict[str, Tensor] = {}
    for kind in ("random", "all_to_one", "empty_experts", "sentinels"):
        expert.index = make_routing(kind, T, K, E).index
        expert.dy = randn(*expert.dy.shape, dtype=BF16)
        if cast:
            expert.record = expert.record._replace(x=x, **{name: t.to(BF16) for name, t in held.items()})
        backward(expert)
        if cast:
            expert.record = expert.record._replace(
                **{name: t.detach().requires_grad_() for name, t in expert.operands.items() if name != "x"}
            )
        _, *grads = expert.reference()
        for name, gradient in zip(expert.operands, grads, strict=False):
            want[name] = want.get(name, 0) + gradient
    assert [sum(t is not None for t in sums) for sums in added] == [0, *[len(held)] * 3]
    for name, t in held.items():
        assert t.grad is not None
        error = float((t.grad.double() - want[name]).norm() / want[name].norm())
        assert error < TOLERANCE[BF16]


def test_the_same_bits_every_time_and_no_host_read() -> None:
    expert = Expert(SPECS[0], BF16, True)
    runs = []
    for _ in range(3):
        named = with_buffers(expert)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if runs else "default")
        for _ in range(2):
            backward(expert)
        torch.cuda.set_sync_debug_mode("default")
        runs.append([t.main_grad for t in named.values()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_captured_step_adds_at_every_replay() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    expert = Expert(SPECS[0], BF16, True)
    named = with_buffers(expert)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            backward(expert)
    torch.cuda.synchronize()
    once = {name: t.main_grad / 2 for name, t in named.items()}
    graph, _ = graph_of(lambda: backward(expert))
    for t in named.values():
        t.main_grad.zero_()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    for name, t in named.items():
        assert row_error(t.main_grad, STEPS * once[name]) < 1e-6


def test_adding_compiles_in_one_graph() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    r = make_routing("random", TOKENS, TOP_K, EXPERTS)
    x, g = randn(TOKENS, D, dtype=BF16), randn(r.n, N, dtype=BF16)

    def step(into: Tensor) -> Tensor:
        torch.ops.hexa.estmm_add(into, x, g, r.v, None, r.offs, TOP_K, "nk")
        return into.sum()

    into = torch.zeros(size("nk"), device="cuda")
    torch.compile(step, backend="inductor", fullgraph=True)(into)
    assert_sum(into, reference_estmm(x, g, r.v, None, r, "nk"))
