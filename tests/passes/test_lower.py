"""Passes over graphs: einsums over three tensors, lowering, fusion and the unfused backward."""

from collections import Counter

import pytest
import torch
import torch.fx
from torch import nn

from hexa_fx.capture import capture, record_of
from hexa_fx.capture.records import memory_of, nodes_by_call
from hexa_fx.ir import FfnSpec
from hexa_fx.observers import listening
from hexa_fx.ops import program
from hexa_fx.ops.program import FfnRequest
from hexa_fx.ops.table_layers import static_of
from hexa_fx.passes.canonicalize import canonicalize_block
from hexa_fx.passes.lowering.fuse import FuseActivation
from hexa_fx.passes.lowering.lower import lower_backward, lower_forward
from hexa_fx.passes.options import moe_ffn_without_esfk
from tests.capture.run import run
from tests.ops.reference import NAMES, Layer, layer

GIVEN = frozenset({"x", "top_k_weights", "w1", "w2"})


def forward_of(spec: FfnSpec, training: bool = True) -> torch.fx.GraphModule:
    return lower_forward(FfnRequest(spec, GIVEN, GIVEN, training))


def backward_of(spec: FfnSpec, *beside: str, grads: frozenset[str] | None = None) -> torch.fx.GraphModule:
    given = GIVEN.union(beside)
    return lower_backward(FfnRequest(spec, given, given if grads is None else grads, training=True))


def operators(gm: torch.fx.GraphModule) -> Counter[str]:
    return Counter(
        n.target._opname
        for n in gm.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "hexa"
    )


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved"])
def test_forward_is_reindex_two_products_activation_combine(glu):
    forward = forward_of(FfnSpec("silu", glu))
    assert operators(forward) == {"reindex": 1, "esmm": 2, "activate": 1, "combine": 1}


def test_backward_has_the_fused_operator_and_no_second_reindex():
    backward = backward_of(FfnSpec("silu", "concat"), "b1", "b2")
    found = operators(backward)
    assert found["esfk"] == 1
    assert found["estmm"] == 1
    assert found["reindex"] == 0
    assert found["activate_backward"] == 1


def test_without_the_fused_operator_there_is_one_for_each_gradient():
    given = frozenset({"x", "w1", "b1", "w2"})
    backward = lower_backward(FfnRequest(FfnSpec("silu"), given, given, training=True, fused_backward=False))
    assert operators(backward) == {"esmm": 2, "activate_backward": 1, "estmm": 2, "ess": 1, "combine": 1}


@pytest.mark.parametrize("glu", ["none", "concat", "split"])
def test_fusion_folds_the_activation(glu):
    given = GIVEN | ({"w3"} if glu == "split" else frozenset())
    forward = lower_forward(FfnRequest(FfnSpec("silu", glu), given, given, training=True))
    assert FuseActivation()(forward) == 1
    found = operators(forward)
    assert found["esmm_act"] == 1
    assert found["activate"] == 0
    assert found["esmm"] == 1


def test_the_unfused_graph_runs():
    spec, generator = FfnSpec("gelu"), torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(*size, generator=generator) for size in ((7, 6), (3, 5, 6), (3, 6, 5)))
    index, weights = torch.randint(0, 3, (7, 2), generator=generator), torch.rand(7, 2, generator=generator)
    y = forward_of(spec, training=False)(x, index, weights, w1, w2)
    y = y[0] if isinstance(y, tuple) else y
    expected = torch.ops.hexa.moe_ffn(
        x, index, weights, w1, None, None, None, w2, None, "gelu", "none", [], "nk", "nk", False
    )
    torch.testing.assert_close(y, expected)


T, E, I, D = 5, 3, 4, 6  # noqa: E741


class Fused(nn.Module):
    def __init__(self, equation: str, as_list: bool = False) -> None:
        super().__init__()
        self.weight, self.equation, self.as_list = nn.Parameter(torch.randn(E, D, I)), equation, as_list

    def forward(self, hidden: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        given = (hidden, self.weight, combine)
        return torch.einsum(self.equation, list(given)) if self.as_list else torch.einsum(self.equation, *given)


class Around(nn.Module):
    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.fused, self.first, self.last = fused, nn.Linear(I, I), nn.Linear(D, D)

    def forward(self, hidden: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        return self.last(self.fused(self.first(hidden), combine))


def einsums(captured) -> list[str]:
    return [str(n.args[0]) for n in captured.graph.nodes if getattr(n.target, "__name__", "") == "einsum"]


@pytest.mark.parametrize("as_list", [False, True])
def test_weight_meets_its_operand_first(as_list):
    block = Around(Fused("tei, edi, te -> td", as_list))
    inputs = torch.randn(T, E, I), torch.rand(T, E)
    before = capture(block, inputs, {})
    inside = {call.path: _operations(before, call) for call in before.calls}
    after = canonicalize_block(before)
    assert einsums(after) == ["tei,edi->ted", "ted,te->td"]
    torch.testing.assert_close(run(after, *inputs), block(*inputs))
    for call in after.calls:
        expected = ["einsum", "einsum"] if call.path == "fused" else inside[call.path]
        assert _operations(after, call) == expected, call.path


def test_the_new_product_has_memory_of_its_own():
    """It may be computed where a recorded value lay, whose memory is free again: its address tells them not apart."""
    after = canonicalize_block(capture(Fused("tei,edi,te->td"), (torch.randn(T, E, I), torch.rand(T, E)), {}))
    places = {node: record_of(node) for node in after.graph.nodes if node.op.startswith("call")}
    assert len({record.storage for record in places.values()}) == len(places) == 2
    assert all(record.storage != memory_of(record.value) for record in places.values())


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("tei,edi,te->tedi", "nothing is summed over"),
        ("...ei,edi,...e->...d", "dimensions that are not spelled out"),
    ],
)
def test_left_alone(equation, why):
    after = canonicalize_block(capture(Fused(equation), (torch.randn(T, E, I), torch.rand(T, E)), {}))
    assert einsums(after) == [equation], why


def _operations(captured, call) -> list[str]:
    nodes = nodes_by_call(captured.graph)[call.number]
    return [getattr(n.target, "__name__", n.target) for n in nodes if n.op not in ("get_attr", "placeholder")]


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
