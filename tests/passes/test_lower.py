"""Lowering and fusion: which operators, how often, and that the graphs run."""

from collections import Counter

import pytest
import torch

from hexa_fx.ir import FfnSpec
from hexa_fx.ops.program import FfnRequest
from hexa_fx.passes.lowering.fuse import FuseActivation
from hexa_fx.passes.lowering.lower import lower_backward, lower_forward

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
