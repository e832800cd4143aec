"""The unfused backward, which ablations put in the place of `hexa::moe_ffn`: the same values from more operators."""

import pytest
import torch

from hexa_fx.ir import FfnSpec
from hexa_fx.observers import listening
from hexa_fx.ops import program
from hexa_fx.ops.table_layers import static_of
from hexa_fx.passes.options import moe_ffn_without_esfk
from tests.ops.reference import NAMES, Layer, layer

SPECS = (FfnSpec("silu", "concat"), FfnSpec("silu", "split", "kn", "kn"), FfnSpec("gelu", recompute_h=True))


def separate(one: Layer) -> torch.Tensor:
    x, *weights = one.operands
    return moe_ffn_without_esfk(x, one.index, *weights, *static_of(one.spec))


def gradients(one: Layer, y: torch.Tensor) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), one.leaves())]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("frozen", [(), ("x",), ("w1", "b1"), ("w2", "b2", "top_k_weights")], ids="-".join)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_values_and_gradients_stay(spec, frozen, tokens):
    one = layer(spec, bias=True, tokens=tokens)
    for name, t in zip(NAMES, one.operands, strict=True):
        if t is not None and name in frozen:
            t.requires_grad_(False)
    for got, want in zip(gradients(one, separate(one)), gradients(one, one.run()), strict=True):
        torch.testing.assert_close(got, want)


def test_each_gradient_has_an_operator_of_its_own():
    one, backward = layer(FfnSpec("silu", "concat"), bias=True), []
    program.programs.cache_clear()
    with listening(lambda event: event.name == "lower" and backward.append(str(event.graph))):
        separate(one).sum().backward()
    assert "esfk" not in backward[-1]
    assert all(name in backward[-1] for name in ("hexa.ess", "hexa.estmm", "dx_rows"))


def test_autocast_as_for_the_operator():
    one = layer(FfnSpec("silu", "concat"), bias=True).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = separate(one), one.run()
    assert got.dtype == want.dtype == torch.bfloat16
    for a, b in zip(gradients(one, got), gradients(one, want), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_second_derivatives():
    one, found = layer(FfnSpec("gelu"), bias=True), []
    for y in (separate(one), one.loop()):
        (dx,) = torch.autograd.grad(y.square().sum(), one.leaves()[:1], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), one.leaves()))
    torch.testing.assert_close(*found)
