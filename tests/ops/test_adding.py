"""Gradients added to a buffer before they are rounded: the operators, and moe_ffn with ``main_grad``."""

import logging
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hexa_fx import ops
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library, main_grad
from tests.ops.reference import GATED, Layer, Operators, layer, row_error

T, K, E, D, N = 30, 2, 5, 12, 8
EMPTY = 3
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LAYOUTS = ("nk", "kn")


def routing() -> tuple[Tensor, Tensor, Tensor]:
    """Expert 3 has no rows, and some rows no expert."""
    index = torch.randint(0, E + 1, (T, K))
    return ops.reindex(torch.where(index == EMPTY, 0, index), E)


def product(x: Tensor, g: Tensor, offs: Tensor, layout: str) -> Tensor:
    parts = [x[a:b].double().t() @ g[a:b].double() for a, b in pairwise(offs)]
    return torch.stack(parts if layout == "kn" else [part.t() for part in parts])


def sums(g: Tensor, offs: Tensor) -> Tensor:
    return torch.stack([g[a:b].double().sum(0) for a, b in pairwise(offs)])


def weight_shape(layout: str) -> tuple[int, int, int]:
    return (E, N, D) if layout == "nk" else (E, D, N)


def buffers(layout: str, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random ones; NaN where an expert has no rows, so that any arithmetic there would spread."""
    into, into_bias = torch.randn(weight_shape(layout), dtype=wide), torch.randn(E, N, dtype=wide)
    into[EMPTY], into_bias[EMPTY] = float("nan"), float("nan")
    return into, into_bias


def assert_added(after: Tensor, before: Tensor, change: Tensor, tolerance: float) -> None:
    others = [e for e in range(E) if e != EMPTY]
    assert after[EMPTY].isnan().all()
    assert row_error(after[others], before[others].double() + change[others]) < tolerance


@pytest.mark.parametrize(("dtype", "wide"), [(BF16, F32), (torch.float16, F32), (F32, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", ["contiguous", "transposed", "sliced"])
def test_operators_add_to_what_is_there(dtype, wide, layout, stored):
    v, _, offs = routing()
    x, g = torch.randn(T, D).to(dtype), torch.randn(T * K, N).to(dtype)
    g[offs[-1] :] = float("nan")
    w = torch.randn(weight_shape(layout)).to(dtype)
    rows, tolerance = x[v.long() // K], 1e-6 if wide == F32 else 1e-14
    want, want_sums = product(rows, g, offs, layout), sums(g, offs)

    for fused in (False, True):
        into, into_bias = buffers(layout, wide)
        if stored == "transposed":
            into = into.transpose(1, 2).contiguous().transpose(1, 2)
        if stored == "sliced":
            into, into_bias = into.repeat(1, 1, 2)[..., : into.shape[2]], into_bias.repeat(1, 2)[:, :N]
        before, before_bias = into.clone(), into_bias.clone()
        if fused:
            dx = ops.esfk_add(into, into_bias, x, g.nan_to_num(), w, v, offs, K, layout)
            torch.testing.assert_close(dx, ops.esfk(x, g.nan_to_num(), w, v, offs, K, layout, False)[0])
        else:
            ops.estmm_add(into, x, g, v, None, offs, K, layout)
            ops.ess_add(into_bias, g, None, offs, 1)
        assert_added(into, before, want, tolerance)
        assert_added(into_bias, before_bias, want_sums, tolerance)


def test_an_indexed_sum_with_weights():
    v, _, offs = routing()
    g, scale = torch.randn(T, N).bfloat16(), torch.rand(T, K)
    _, into = buffers("nk", F32)
    before = into.clone()
    ops.ess_add(into, g, v, offs, K, scale)
    assert_added(into, before, sums(g[v.long() // K].double() * scale.reshape(-1, 1)[v.long()], offs), 1e-6)


def test_a_functional_compiler_sees_what_is_written():
    v, _, offs = routing()
    x, g = torch.randn(T, D).bfloat16(), torch.randn(T * K, N).bfloat16()
    w = torch.randn(weight_shape("nk")).bfloat16()

    def both(into: Tensor, into_bias: Tensor) -> tuple[Tensor, Tensor]:
        ops.estmm_add(into, x, g, v, None, offs, K, "nk")
        return ops.esfk_add(into, into_bias, x, g, w, v, offs, K, "nk"), into * 2

    eager, compiled = [(torch.zeros(weight_shape("nk")), torch.zeros(E, N)) for _ in range(2)]
    want = both(*eager)
    got = torch.compile(both, backend="aot_eager", fullgraph=True)(*compiled)
    for a, b in zip((*got, *compiled), (*want, *eager)):
        torch.testing.assert_close(a, b)


def test_autograd_knows_that_the_buffer_changed():
    _, _, offs = routing()
    into = torch.zeros(E, N)
    before = into._version
    with torch.no_grad():
        ops.ess_add(into, torch.randn(T * K, N), None, offs, 1)
    assert into._version > before


def test_what_does_not_fit_is_named():
    v, _, offs = routing()
    x, g = torch.randn(T, D).bfloat16(), torch.randn(T * K, N).bfloat16()
    with pytest.raises(InputError, match=r"estmm_add: into is .*expected torch.float32 \(E, N, K\)"):
        ops.estmm_add(torch.zeros(E, N, D, dtype=BF16), x, g, v, None, offs, K, "nk")
    with pytest.raises(InputError, match=r"estmm_add: x is .*expected \(n, 8\) beside into torch.float32 \(5, 12, 8\)"):
        ops.estmm_add(torch.zeros(E, D, N), x, g, v, None, offs, K, "nk")
    with pytest.raises(InputError, match="has no gradient"):
        ops.estmm_add(torch.zeros(E, N, D), x.requires_grad_(), g, v, None, offs, K, "nk")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_without_kernels_adds_what_torch_makes(layout):
    v, _, offs = routing()
    x, g, w = torch.randn(T, D), torch.randn(T * K, N), torch.randn(weight_shape(layout))
    into, into_bias, want, want_bias = (torch.ones(s) for s in 2 * (weight_shape(layout), (E, N)))
    dx = library.kernel_for("esfk_add", "any")(into, into_bias, x, g, w, v, offs, K, layout)
    torch.testing.assert_close(dx, ops.esfk_add(want, want_bias, x, g, w, v, offs, K, layout))
    library.kernel_for("estmm_add", "any")(into, x, g, v, None, offs, K, layout)
    library.kernel_for("ess_add", "any")(into_bias, g, None, offs, 1, None)
    ops.estmm_add(want, x, g, v, None, offs, K, layout)
    ops.ess_add(want_bias, g, None, offs, 1)
    torch.testing.assert_close(into, want)
    torch.testing.assert_close(into_bias, want_bias)


SPLIT = FfnSpec("silu", "split", "kn", "kn")
UNGATED = FfnSpec("gelu", "none")


def with_buffers(one: Layer, *but: str) -> dict[str, Tensor]:
    """Gives all weights and biases a main_grad of ones, and returns them by name."""
    named = dict(zip(("w1", "b1", "w3", "b3", "w2", "b2"), one.operands[2:]))
    found = {name: t for name, t in named.items() if t is not None and name not in but}
    for t in found.values():
        t.main_grad = torch.ones_like(t, dtype=F64 if t.dtype == F64 else F32)
    return found


@pytest.mark.parametrize("spec", [GATED, SPLIT, UNGATED], ids=str)
@pytest.mark.parametrize("without", [(), ("b1", "b3"), ("w1", "w3"), ("w2",)], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_main_grad_gets_what_grad_would(spec, without, fused):
    one = layer(spec, bias=True)
    one.operands[0].requires_grad_(fused)  # dX is wanted too, so that one kernel computes all three
    dy = torch.randn(one.run().shape, dtype=F64)
    want = dict(zip(map(id, one.leaves()), torch.autograd.grad(one.run(), one.leaves(), dy)))
    into = with_buffers(one, *without)
    one.run().backward(dy)
    for t in one.leaves():
        if any(t is other for other in into.values()):
            assert t.grad is None
            torch.testing.assert_close(t.main_grad, 1 + want[id(t)])
        else:
            torch.testing.assert_close(t.grad, want[id(t)])


@pytest.mark.parametrize("names", [("w1",), ("w2",), ("b2",), ("b1",), ("w1", "w2")], ids="-".join)
def test_only_some_want_gradients_and_all_of_them_have_buffers(names):
    one = layer(bias=True)
    into = with_buffers(one)
    one.run().sum().backward()
    want = {name: t.main_grad.clone() for name, t in into.items()}
    for t in one.leaves():
        t.requires_grad_(any(t is into[name] for name in names))
        if hasattr(t, "main_grad"):
            t.main_grad.fill_(1)
    one.run().sum().backward()
    for name, t in into.items():
        torch.testing.assert_close(t.main_grad, want[name] if name in names else torch.ones_like(want[name]))


def test_main_grad_is_never_rounded():
    one = layer(tokens=40).to(BF16)
    into = with_buffers(one)
    one.run().sum().backward()
    for t in into.values():
        change = t.main_grad - 1
        assert (change == change.bfloat16().float()).double().mean() < 0.2


def test_a_backward_that_is_run_twice_adds_twice():
    one = layer()
    into = with_buffers(one)
    y = one.run().sum()
    y.backward(retain_graph=True)
    first = {name: t.main_grad.clone() for name, t in into.items()}
    y.backward()
    for name, t in into.items():
        torch.testing.assert_close(t.main_grad, 2 * first[name] - 1)


@pytest.fixture
def said(caplog):
    main_grad._say_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hexa_fx.ops.main_grad")
    return caplog


@pytest.mark.parametrize("case", ["another dtype", "second derivative", "a mode"])
def test_torch_adds_where_the_program_cannot_and_says_so_once(case, said):
    one = layer(bias=True)
    want = torch.autograd.grad(one.run().sum(), one.leaves())
    for t in (parameters := one.leaves()[2:]):
        t.main_grad = torch.ones_like(t, dtype=F32 if case == "another dtype" else t.dtype)
    for _ in range(2):
        if case == "a mode":
            with Operators() as operators:
                one.run().sum().backward()
            assert "moe_ffn_backward" in operators.seen
        else:
            one.run().sum().backward(create_graph=case == "second derivative")
    for t, gradient in zip(parameters, want[2:]):
        assert t.grad is None
        assert not t.main_grad.requires_grad
        torch.testing.assert_close(t.main_grad.double(), 1 + 2 * gradient, rtol=1e-5, atol=1e-5)
    assert len([r for r in said.records if "main_grad" in r.message]) == 1


def test_a_compiled_layer_leaves_the_gradient_to_autograd():
    one = layer()
    want = torch.autograd.grad(one.run().sum(), one.leaves())
    with_buffers(one)
    torch.compile(one.run, backend="aot_eager", fullgraph=True)().sum().backward()
    for t, gradient in zip(one.leaves(), want):
        torch.testing.assert_close(t.grad, gradient)
