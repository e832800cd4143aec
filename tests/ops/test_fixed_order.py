"""`hexa::moe_ffn_fixed`: a token's bits in any batch, and everything else as `hexa::moe_ffn`.

`tests/gpu/test_fixed_order.py` runs the same cases on a device, in 16 bits.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.errors import InputError
from hexa_fx.formats.adapted_weight import AdaptedWeight
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import direct, fixed_order
from hexa_fx.ops.table_layers import parameters, static_of
from tests.ops.reference import ROUTINGS, rerouted
from tests.ops.reference import operands as operands_of

EXPERTS = 6


def operands(
    dtype, model=48, inner=33, tokens=150, glu="concat", layouts=("nk", "nk"), bias=True, seed=0, device="cpu"
):
    def random(shape, depth):
        return (torch.randn(shape) / depth**0.5).to(device, dtype)

    torch.manual_seed(seed)
    index = torch.rand(tokens, EXPERTS).argsort(1)[:, :3].to(device)
    spec = FfnSpec("silu", glu, *layouts)
    made = operands_of(spec, random, index, experts=EXPERTS, model_size=model, inner=inner, bias=bias)
    return made.x, index, torch.rand(tokens, 3).to(device, dtype), parameters(made)


def run(x, index, weights, experts, spec, operator=torch.ops.hexa.moe_ffn_fixed):
    return operator(x, index, weights, *experts, *static_of(spec))


SPECS = [
    FfnSpec("silu", "concat", "nk", "nk"),
    FfnSpec("gelu", "none", "kn", "kn"),
    FfnSpec("swiglu_oai", "interleaved", "kn", "kn"),
    FfnSpec("silu", "split", "nk", "kn"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bits_are_the_same_in_any_batch(dtype, spec):
    assert_same_bits(*operands(dtype, glu=spec.glu, layouts=(spec.layout1, spec.layout2)), spec)


SOURCES = [(None, 4), ("int8_rows", 0), ("nf4", 0), ("nf4", 8)]
"""Formats of packed weights, and ranks of what is added to them."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS[::3], ids=str)
@pytest.mark.parametrize(("format", "rank"), SOURCES)
def test_bits_of_packed_and_adapted_weights_are_the_same_in_any_batch(format, rank, spec, dtype):
    given = operands(dtype, 64, 128, 100, spec.glu, (spec.layout1, spec.layout2))
    assert_same_bits(*with_sources(given, format, rank), spec, direct.moe_ffn_fixed)


def with_sources(given, format, rank):
    """Operands with packed weights, or with additions, or both."""
    *rows, experts = given
    made = list(experts)
    for place in (0, 2, 4):
        if (weight := experts[place]) is None:
            continue
        made[place] = weight if format is None else QuantizedWeight.of(weight, format)
        if rank:
            left, right = (torch.randn(EXPERTS, size, rank, device=weight.device) / 8 for size in weight.shape[1:])
            made[place] = AdaptedWeight(made[place], left, right.transpose(1, 2), 0.5)
    return *rows, tuple(made)


def assert_same_bits(x, index, weights, experts, spec, operator=torch.ops.hexa.moe_ffn_fixed):
    """The whole batch against parts of permutations of it, with and without gradients."""
    whole = run(x, index, weights, experts, spec, operator)
    assert not torch.equal(whole, torch.zeros_like(whole))
    generator = torch.Generator().manual_seed(0)
    for number in range(25):
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for part in order.tensor_split(torch.randint(1, len(x), (number % 7,), generator=generator).sort()[0].tolist()):
            found = run(x[part], index[part], weights[part], experts, spec, operator)
            assert torch.equal(found, whole[part]), "a token's bits depend on its batch"
    training = run(x.clone().requires_grad_(), index, weights, experts, spec, operator)
    assert training.requires_grad
    assert torch.equal(training, whole)


def test_moe_ffn_itself_is_not_batch_invariant():
    """Otherwise the test above could not fail."""
    spec = SPECS[0]
    x, index, weights, experts = operands(torch.float32, model=512, inner=256)
    whole = run(x, index, weights, experts, spec, torch.ops.hexa.moe_ffn)
    single = run(x[:1], index[:1], weights[:1], experts, spec, torch.ops.hexa.moe_ffn)
    assert not torch.equal(single, whole[:1])
    torch.testing.assert_close(single, whole[:1])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("recompute_h", [False, True])
def test_gradients_are_those_of_moe_ffn(spec, recompute_h):
    spec = FfnSpec(spec.activation, spec.glu, spec.layout1, spec.layout2, spec.params, recompute_h)
    x, index, weights, experts = operands(torch.float64, glu=spec.glu, layouts=(spec.layout1, spec.layout2), tokens=40)
    leaves = [t.requires_grad_() for t in (x, weights, *experts) if t is not None]
    results = []
    for operator in (torch.ops.hexa.moe_ffn_fixed, torch.ops.hexa.moe_ffn):
        y = run(x, index, weights, experts, spec, operator)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def route(routing, x, index, weights, experts):
    return *rerouted(routing, x, index, weights, EXPERTS), experts


@pytest.mark.parametrize("routing", ROUTINGS)
def test_ugly_routings(routing):
    given = route(routing, *operands(torch.float64))
    found = run(*given, SPECS[0])
    torch.testing.assert_close(found, run(*given, SPECS[0], torch.ops.hexa.moe_ffn))


def test_a_nan_stays_with_its_token():
    assert_nan_stays(*operands(torch.float32))


def assert_nan_stays(x, index, weights, experts):
    expected = run(x, index, weights, experts, SPECS[0])
    x[7] = float("nan")
    found = run(x, index, weights, experts, SPECS[0])
    assert found[7].isnan().all()
    others = torch.arange(len(x), device=x.device) != 7
    assert torch.equal(found[others], expected[others])


def test_opcheck():
    x, index, weights, experts = operands(torch.float32, tokens=12)
    x.requires_grad_()
    static = ("silu", "concat", [], "nk", "nk", False)
    for operator in (torch.ops.hexa.moe_ffn_fixed.default, torch.ops.hexa.moe_ffn_fixed_forward.default):
        given = x if operator is torch.ops.hexa.moe_ffn_fixed.default else x.detach()
        torch.library.opcheck(operator, (given, index, weights, *experts, *static))


def test_products_that_depend_on_a_rows_place_are_taken_one_by_one(monkeypatch, caplog):
    x, index, weights, experts = operands(torch.float32)
    expected = run(x, index, weights, experts, SPECS[0])
    fixed_order._sizes.cache_clear()
    monkeypatch.setattr(fixed_order, "_same", lambda *_: False)
    try:
        found = run(x, index, weights, experts, SPECS[0])
    finally:
        fixed_order._sizes.cache_clear()
    torch.testing.assert_close(found, expected)
    assert "one by one" in caplog.text


@pytest.mark.parametrize(("rows", "expected"), [(16, (1,)), (64, (256, 16))])
def test_a_place_that_shows_in_a_few_numbers_is_seen(rows, expected, monkeypatch):
    """As on some processors, where one of 33 columns is added up in another order for some rows of a block."""

    def placed(x, weight, bias, expert):
        out = fixed_order_multiply(x, weight, bias, expert)
        if len(x) == rows and x[-1, 0] > 0.5:
            out[-1, -1] *= 1 + 1e-6
        return out

    fixed_order_multiply = fixed_order.multiply
    monkeypatch.setattr(fixed_order, "multiply", placed)
    fixed_order._sizes.cache_clear()
    try:
        sizes = fixed_order._sizes(torch.float32, torch.float32, (24, 33), (33, 1), False, 1)
    finally:
        fixed_order._sizes.cache_clear()
    assert set(sizes) <= set(expected)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, 160, 128) / 12)
        self.second = nn.Parameter(torch.randn(EXPERTS, 128, 80) / 9)

    def forward(self, x, top_k_index, top_k_weights):
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, slot = torch.where(top_k_index == number)
            gate, up = F.linear(x[token], self.first[number]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.second[number])
            out.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return out


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    block, x = Experts(), torch.randn(300, 128)
    index, weights = torch.rand(300, EXPERTS).argsort(1)[:, :2], torch.rand(300, 2)
    made = hexa_fx.optimize(block, (x[:40], index[:40], weights[:40]), HexaConfig(batch_invariant=True))
    return block, made, (x, index, weights)


def test_200_random_splits_of_a_batch_in_train_and_eval_mode(layer):
    block, made, inputs = layer
    whole = made.eval()(*inputs).detach()
    torch.testing.assert_close(whole, block(*inputs).detach())
    generator = torch.Generator().manual_seed(1)
    for number in range(200):
        cuts = torch.randint(0, 300, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator)
        made.train(number % 2 == 0)
        with torch.set_grad_enabled(number % 3 == 0):
            parts = [
                made(*pieces) for pieces in zip(*(t.tensor_split(cuts.sort()[0].tolist()) for t in inputs), strict=True)
            ]
        assert torch.equal(torch.cat(parts), whole)


def test_the_compiled_block_has_the_same_bits(layer):
    _, made, inputs = layer
    made.eval()
    with torch.no_grad():
        assert torch.equal(torch.compile(made, backend="aot_eager", fullgraph=True)(*inputs), made(*inputs))


def test_gradients_of_the_block_are_the_originals(layer):
    block, made, inputs = layer
    for module in (block, made.train()):
        module.zero_grad()
        module(*inputs).square().sum().backward()
        module.kept = [p.grad.clone() for p in module.parameters()]
    for found, expected in zip(made.kept, block.kept, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ablations_do_not_go_with_it():
    with pytest.raises(InputError, match="needs expert_operators"):
        HexaConfig(batch_invariant=True, expert_operators=False)
