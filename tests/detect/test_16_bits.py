"""Blocks whose tensors are in 16 bits are understood as in 32: rounding hides nothing from the experiments."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.capture import capture, record_of
from hexa_fx.capture.replay import Replay, is_coarse
from tests.zoo import families, pattern_table
from tests.zoo.agree import rewritten, tokens
from tests.zoo.common import MLP, experts
from tests.zoo.met import KeptLogits, Looped, ScaledBefore
from tests.zoo.registry import VARIANTS
from tests.zoo.variant import D, E, K, Variant, weight

ROUNDED = (
    "dense_scaled_input_bmm",  # rows times the router's weight, rounded before the experts
    "library_onto_shared",  # added onto a shared expert's output
    "library_detached_scaled",
    "library_straight_through_dispatch",
    "router_z_loss_record",  # returns an object of its own
)
CHOSEN = [v for v in VARIANTS if v.name in ROUNDED]
REST = [v for v in VARIANTS if v.expect == "rewritten" and not v.gap and v not in CHOSEN]


def is_rewritten(v: Variant, dtype: torch.dtype) -> bool:
    block = v.make(0).to(dtype).eval()
    args, kwargs = v.inputs(2, 7, dtype, 0)
    try:
        with torch.no_grad():
            expected = block(*args, **kwargs)
    except RuntimeError as error:
        pytest.skip(f"its own code does not run in {dtype}: {error}")
    args, kwargs = v.inputs(2, 7, dtype, 0)  # anew, since some blocks write to theirs
    model = pattern_table.optimized(block, args, kwargs)
    for one, other in zip(tensors(expected), tensors(model(*args, **kwargs)), strict=True):
        assert one.dtype == other.dtype
    return any(found.status == "rewritten" for found in model.report.blocks)


def tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("v", CHOSEN, ids=lambda v: v.name)
def test_rounded_numbers_are_recognised(v: Variant) -> None:
    assert is_rewritten(v, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("v", REST, ids=lambda v: v.name)
def test_the_rest_of_the_zoo(v: Variant) -> None:
    assert is_rewritten(v, torch.bfloat16)


FAMILIES = [name for name, family in families.FAMILIES.items() if family.expect == "rewritten"]
SOME = ("llama4_text", "longcat_flash", "mixtral")


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in SOME else pytest.mark.slow) for f in FAMILIES])
def test_families(family: str) -> None:
    model = families.make(family, "eager", torch.bfloat16)
    optimized = hexa_fx.optimize(model, families.inputs(2, 7))
    assert {found.status for found in optimized.report.blocks} == {"rewritten"}
    example = families.inputs(2, 7)
    torch.testing.assert_close(optimized(**example).loss, model(**example).loss, rtol=2e-2, atol=0)


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        third = x / 3
        third.add_(third * 7)
        noise = torch.rand(4).to(x.dtype)
        part = (x.argmax() / 7).to(x.dtype)
        return third + noise + part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_exact_but_for_choices_and_random_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.7, 0.3, 0.2]).to(dtype)
    captured = capture(Chain(), (x,), {})
    assert is_coarse(captured.graph.nodes) == (dtype == torch.bfloat16)
    replay, nodes = Replay(captured), {node.name: node for node in captured.graph.nodes}
    value = replay.value(nodes["div"])
    exact = x.double() / 3
    assert torch.equal(value, exact) == (dtype == torch.bfloat16)
    torch.testing.assert_close(value, exact, rtol=1e-2, atol=0)
    assert torch.equal(replay.value(nodes["rand"]), record_of(nodes["rand"]).value.double())
    torch.testing.assert_close(replay.value(nodes["to_1"]).double(), torch.tensor(1 / 7).double(), rtol=0, atol=1e-6)


class ScaledAlone(ScaledBefore):
    """As tokens are scaled in float32 whatever their dtype; biases looked up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, ids = self.gate(flat).float().softmax(-1).topk(K, -1)
        order, counts = ids.view(-1).argsort(stable=True), torch.bincount(ids.view(-1), minlength=E)
        rows = (flat[order // K].float() * weights.view(-1)[order][:, None]).to(x.dtype)
        chosen = ids.view(-1)[order]
        rows = self.products(rows, self.up, counts) + F.embedding(chosen, self.up_bias)
        rows = self.products(F.silu(rows), self.down, counts) + F.embedding(chosen, self.down_bias)
        return torch.zeros_like(flat).index_add(0, order // K, rows).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_are_scaled_in_a_wider_dtype(dtype: torch.dtype) -> None:
    x, tolerance = tokens(2, 7).to(dtype), 1e-2 if dtype == torch.bfloat16 else 1e-5
    rewritten(ScaledAlone().to(dtype), x, x, train=False, tolerance=tolerance)


def test_what_a_router_keeps_has_its_gradient() -> None:
    block, x = KeptLogits().double(), torch.randn(2, 7, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    found = []
    for model in (block.train(), opt.train()):
        torch.manual_seed(1)
        loss = model(x).square().sum() + model.router.loss + model.router.logits.sin().sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, [*model.router.parameters()])))
    for one, other in zip(*found):
        torch.testing.assert_close(other, one)


class ByBmm(Looped):
    """A router's matrix that is expanded for each sequence, beside a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = weight(D, E), experts(MLP)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.bmm(flat[None].expand(2, -1, -1), self.gate.unsqueeze(0).expand(2, -1, -1))[1]
        return logits.softmax(-1).topk(K, -1)


def test_a_routers_matrix_for_each_sequence_is_no_stack_of_experts() -> None:
    rewritten(ByBmm().double(), *[tokens(2, 7)] * 2)
