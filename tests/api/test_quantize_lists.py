"""`quantize_experts_` of experts in lists: their matrices are packed parameters that operators read as one packed weight."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hexa_fx
from hexa_fx.errors import InputError
from hexa_fx.formats import quantized_weight
from hexa_fx.formats.quantized_weight import QuantizedWeight
from tests.integrations.test_transformers import operators_run
from tests.zoo.common import Looped

E, D, H = 4, 64, 128


class Gated(nn.Module):
    def __init__(self, dim=D, hidden=H):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Transposed(nn.Module):
    """Multiplies by (in, out), with no module of its own for a matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(D, H) / 8), nn.Parameter(torch.randn(H, D) / 11)

    def forward(self, x):
        return torch.relu(x @ self.first) @ self.second


class Block(Looped):
    def __init__(self, expert=Gated, **options):
        super().__init__(lambda: expert(**options), D, E)


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randn(20, D, dtype=torch.float64)


def packed(tokens, format, expert=Gated):
    """A packed block, and a dense one with the numbers that the former stands for."""
    torch.manual_seed(0)
    block = nn.Sequential(Block(expert)).double()
    dense = copy.deepcopy(block)
    block = hexa_fx.quantize_experts_(hexa_fx.optimize_(block, tokens), format)
    dense.load_state_dict({n: p.dense() if is_packed(p) else p.detach() for n, p in block.named_parameters()})
    return block, dense


def is_packed(parameter):
    return isinstance(parameter, QuantizedWeight)


def outcome(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, dense, x, rewritten=True):
    """Outputs and the gradients of what is not packed."""
    found, expected = outcome(model, x), outcome(dense, x)
    torch.testing.assert_close(found[:2], expected[:2])
    for name, gradient in found[2].items():
        torch.testing.assert_close(gradient, expected[2].get(name, torch.zeros_like(gradient)))
    assert any("router" in name for name in found[2])
    assert (operators_run(model, (x,)) > 0) == rewritten


@pytest.mark.parametrize(
    ("format", "expert"),
    [("nf4", Gated), ("mxfp4", Gated), ("fp8_block", Gated), ("nf4_double", Transposed)],
)
def test_results_and_gradients_are_those_of_dequantised_weights(format, expert, tokens, caplog):
    quantized_weight._say_once.cache_clear()
    block, dense = packed(tokens, format, expert)
    assert sum(map(is_packed, block.parameters())) == E * (3 if expert is Gated else 2)
    assert f"packed as {format}" in str(block.report)
    for rows in (tokens, tokens[:1], tokens[:0]):
        assert_same(block, dense, rows)
    assert_same(hexa_fx.undo_(block), dense, tokens, rewritten=False)
    assert_same(hexa_fx.optimize_(block, tokens), dense, tokens)
    assert f"packed as {format}" in str(block.report)
    assert "unpacked" not in caplog.text
    assert "original forward" not in caplog.text


def test_matrices_lie_in_one_place_only_whatever_moves_them(tokens):
    block, dense = packed(tokens, "nf4")
    whole = block[0].hexa_w1()
    assert block[0].hexa_w1() is whole
    first, last = block[0].experts[0].gate.weight, block[0].experts[E - 1].up.weight
    assert whole.shape == (E, 2 * H, D)
    assert (first.packed.data_ptr(), last.scale0[-1].data_ptr()) == (
        whole.packed.data_ptr(),
        whole.scale0[-1, -1].data_ptr(),
    )
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), copy.deepcopy(block).share_memory()):
        assert_same(other, dense, tokens)
        other[0].experts[1].down.weight.copy_(first.new_ones(D, H))  # what is written is seen
        assert not torch.allclose(other(tokens), dense(tokens))
    single = copy.deepcopy(block).float()
    torch.testing.assert_close(single(tokens.float()), dense(tokens).float(), rtol=1e-4, atol=1e-4)
    assert operators_run(single, (tokens.float(),))


@pytest.mark.parametrize("assign", [False, True])
def test_saved_and_loaded(assign, tokens):
    block, _ = packed(tokens, "fp8_block")
    state, buffer = block.state_dict(), io.BytesIO()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = hexa_fx.quantize_experts_(hexa_fx.optimize_(nn.Sequential(Block()).double(), tokens), "fp8_block")
    fresh.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    assert torch.equal(fresh(tokens), block(tokens))
    assert operators_run(fresh, (tokens,))
    del state["0.experts.1.up.fp8_block_weight_scales"]
    other = {"0.experts.1.up.nf4_weight_packed": torch.zeros(1)}
    for incomplete in (state, other):
        with pytest.raises(
            RuntimeError, match=r"0.experts.1.up.weight is packed as fp8_block, .* pack a dense model as"
        ):
            fresh.load_state_dict(incomplete, strict=False)


def test_an_expert_that_is_exchanged_runs_its_own_code(tokens, caplog):
    block, dense = packed(tokens, "mxfp4")
    for model in (block, dense):
        model[0].experts[2].up.weight = nn.Parameter(torch.ones(H, D, dtype=torch.float64))
    assert_same(block, dense, tokens, rewritten=False)
    assert "no longer packed alike" in caplog.text
    assert "packed as" in str(block.report)


def test_experts_of_two_blocks_are_packed_once(tokens):
    first, second = Block(), Block()
    second.experts = first.experts
    model = nn.Sequential(first, second).double()
    hexa_fx.quantize_experts_(hexa_fx.optimize_(model, tokens), "nf4")
    dense = nn.Sequential(Block(), Block()).double()
    dense.load_state_dict(
        {n: p.dense() if is_packed(p) else p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    )
    for _ in range(2):
        torch.testing.assert_close(model(tokens), dense(tokens))
    assert operators_run(model, (tokens,)) == 2
    assert model[0].hexa_w1() is model[1].hexa_w1()


@pytest.mark.parametrize("order", ["packed first", "adapters first"])
def test_adapters_train_on_them(order, tokens):
    peft = pytest.importorskip("peft")
    block, dense = packed(tokens, "nf4")
    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["gate", "down", "router"])
    made = []
    for model in (dense, block if order == "packed first" else hexa_fx.optimize_(copy.deepcopy(dense), tokens)):
        torch.manual_seed(2)
        made.append(peft.get_peft_model(model, lora))
    if order == "adapters first":
        hexa_fx.quantize_experts_(made[1], "nf4")
        packed_again = {n: p.dense() for n, p in made[1].named_parameters() if is_packed(p)}
        made[0].load_state_dict(packed_again, strict=False)
    assert_same(made[1], made[0], tokens)
    with made[0].disable_adapter(), made[1].disable_adapter():
        torch.testing.assert_close(made[1](tokens), made[0](tokens))
    with pytest.raises(InputError, match="nothing was merged; load the adapters on the dense model"):
        made[1].merge_adapter()


def test_a_compiler_gets_them_in_one_graph(tokens):
    block, dense = packed(tokens, "nf4")
    torch.compiler.reset()
    code = []
    compiled = torch.compile(block, backend=lambda graph, _: code.append(graph.code) or graph.forward, fullgraph=True)
    found, expected = outcome(compiled, tokens), outcome(dense, tokens)
    torch.testing.assert_close(found[:2], expected[:2])
    with torch.no_grad():
        block[0].experts[1].down.weight.copy_(torch.ones(D, H))
    assert not torch.allclose(compiled(tokens), expected[0])
    before = len(code)
    block[0].experts[2].up.weight = nn.Parameter(QuantizedWeight.of(torch.ones(H, D).double(), "nf4"), False)
    block[0].experts[3].gate.weight.data = torch.ones(H, D, dtype=torch.float64)
    torch.testing.assert_close(compiled(tokens), block(tokens))
    assert len(code) == before + 1
    assert all(text.count("stack(") == 1 and "cat(" not in text for text in code), "biases alone are copied"
    torch.compiler.reset()


def test_what_cannot_lie_side_by_side_is_said(tokens):
    block = hexa_fx.optimize_(nn.Sequential(Block(hidden=100)).double(), tokens)
    with pytest.raises(
        InputError, match=r"0.experts.0.gate.weight and .*128 rows share scales, and it has 100; nf4, int8_rows can"
    ):
        hexa_fx.quantize_experts_(block, "fp8_block")
    with pytest.raises(InputError, match="each has scales of its own"):
        hexa_fx.quantize_experts_(block, "nf4_double")
    odd = hexa_fx.optimize_(nn.Sequential(Block(hidden=33)).double(), tokens)
    with pytest.raises(InputError, match=r"128 rows share scales, and it has 33; int8_rows can"):
        hexa_fx.quantize_experts_(odd, "fp8_block")  # down takes no other
    del odd[0].experts[3]
    with pytest.raises(InputError, match=r"no longer a submodule 'experts.3.gate'.*call hexa_fx.undo_"):
        hexa_fx.quantize_experts_(odd, "int8_rows")
    with pytest.raises(InputError, match="on the meta device and has no values to pack"):
        hexa_fx.quantize_experts_(block.to("meta"), "int8_rows")
    assert not any(map(is_packed, block.parameters()))


def test_on_the_meta_device_and_back(tokens):
    block, dense = packed(tokens, "nf4")
    moved = copy.deepcopy(block).to("meta")
    assert moved(tokens.to("meta")).shape == tokens.shape
    moved.to_empty(device="cpu").load_state_dict(block.state_dict())
    assert_same(moved, dense, tokens)


def test_a_block_that_shares_experts_packed_through_another_is_analysed_anew(tokens, caplog):
    model = nn.Sequential(Block(), Block()).double()
    model[1].experts = model[0].experts
    hexa_fx.optimize_(model, tokens)
    model(tokens)
    hexa_fx.quantize_experts_(model[0], "nf4")
    found = model(tokens)
    torch.testing.assert_close(model(tokens), found)
    assert operators_run(model, (tokens,)) == 2
    model[1].experts = nn.ModuleList(Gated().double() for _ in range(E))
    hexa_fx.optimize_(hexa_fx.undo_(model), tokens)
    model[1].experts[2].up.weight = nn.Parameter(QuantizedWeight.of(torch.ones(H, D).double(), "nf4"), False)
    model(tokens)
    assert "runs its original forward" in caplog.text


def test_adapters_of_another_kind_are_rewritten_if_they_are_optimized_after_packing(tokens):
    """Gate and up, which lay in one place, are then read apart."""
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["gate", "down"], feedforward_modules=["down"], init_ia3_weights=False)
    made = []
    for model in packed(tokens, "nf4"):
        torch.manual_seed(2)
        made.append(peft.get_peft_model(model, config))
    block = hexa_fx.optimize_(hexa_fx.undo_(made[0]), tokens)
    torch.testing.assert_close(outcome(block, tokens)[:2], outcome(made[1], tokens)[:2])
    assert operators_run(block, (tokens,))
