"""`quantize_experts_`: results and gradients are those of dequantised weights; what is saved loads; refusals are said."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.errors import InputError
from hexa_fx.formats import quantized_weight
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.sources.packed_parameters import packed_parameters
from tests.zoo.common import MLP, Looped

E, D, H = 4, 64, 32


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(E, 2 * H, D, dtype=torch.float64) / 8)
        self.second = nn.Parameter(torch.randn(E, D, H, dtype=torch.float64) / 6)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for number in range(len(self.first)):
            token, slot = torch.where(index == number)
            gate, up = F.linear(x[token], self.first[number]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.second[number]) * weights[token, slot, None])
        return out


class Model(nn.Module):
    """Two layers that share the second one's experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False, dtype=torch.float64)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            weights, index = self.router(x).softmax(-1).topk(2)
            x = x + block(x, index, weights)
        return x


@pytest.fixture(scope="module")
def optimized():
    torch.manual_seed(0)
    return hexa_fx.optimize_(Model(), torch.randn(20, D, dtype=torch.float64))


def packed(optimized, format):
    """A packed copy, and a dense one with the numbers that the former stands for."""
    model = hexa_fx.quantize_experts_(copy.deepcopy(optimized), format)
    dense = Model()
    weights = {n: p.dense() if isinstance(p, QuantizedWeight) else p.detach() for n, p in model.named_parameters()}
    dense.load_state_dict(weights)
    return model, dense


def test_no_dense_weight_outlives_packing_or_an_analysis():
    def dense_weights():
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        return sum(t.shape == (E + 1, 2 * H, D) and not t.is_meta for t in tensors)

    class Wider(Model):
        """Of shapes that no other test has."""

        def __init__(self):
            super().__init__()
            self.router = nn.Linear(D, E + 1, bias=False)
            for block in self.blocks:
                block.first = nn.Parameter(torch.randn(E + 1, 2 * H, D))
                block.second = nn.Parameter(torch.randn(E + 1, D, H))

    x, collects = torch.randn(20, D), gc.isenabled()
    gc.disable()
    try:
        model = hexa_fx.optimize_(Wider(), x)
        assert dense_weights()
        hexa_fx.quantize_experts_(model, "nf4")
        assert not dense_weights()
        hexa_fx.optimize_(hexa_fx.undo_(model), x)
        assert not dense_weights()
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("format", ["nf4", "nf4_double", "mxfp4", "fp8_block", "int8_rows"])
def test_results_and_gradients_are_those_of_dequantised_weights(optimized, format, caplog):
    quantized_weight._say_once.cache_clear()
    model, dense = packed(optimized, format)
    assert {p.format for p in packed_parameters(model).values()} == {format}
    assert len(packed_parameters(model)) == 4
    for rows, training in ((20, True), (1, False), (0, True)):
        x = torch.randn(rows, D, dtype=torch.float64, requires_grad=True)
        outcomes = []
        for module in (model, dense):
            y = module.train(training)(x)
            outcomes.append((y, *torch.autograd.grad(y.square().sum(), (x, module.router.weight))))
        for found, expected in zip(*outcomes, strict=True):
            torch.testing.assert_close(found, expected)
    assert "unpacked" not in caplog.text
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "router" not in name]


def test_saved_loaded_copied_and_moved(optimized):
    model, dense = packed(optimized, "nf4_double")
    x = torch.randn(9, D, dtype=torch.float64)
    expected = model(x)
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert "blocks.0.nf4_double_first_absmax" in state
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = hexa_fx.quantize_experts_(hexa_fx.optimize(Model(), x), "nf4_double")
    assert not torch.allclose(fresh(x), expected)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(x), expected)
    assert torch.equal(copy.deepcopy(model).to("cpu")(x), expected)
    single = copy.deepcopy(model).float()
    assert single.blocks[0].first.dtype == torch.float32
    torch.testing.assert_close(single(x.float()), expected.float(), rtol=1e-4, atol=1e-4)
    fresh.load_state_dict(dense.state_dict())  # dense numbers are packed when they are loaded
    torch.testing.assert_close(fresh(x), expected, rtol=0.1, atol=0.1)
    other = hexa_fx.quantize_experts_(hexa_fx.optimize(Model(), x), "nf4")
    with pytest.raises(RuntimeError, match="nf4_double_first_packed"):
        other.load_state_dict(state)


class Transposed(nn.Module):
    """Stores (E, in, out), as gpt-oss does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(E, D, 2 * H, dtype=torch.float64) / 8)
        self.bias = nn.Parameter(torch.randn(E, 2 * H, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(E, H, D, dtype=torch.float64) / 6)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for number in range(len(self.first)):
            token, slot = torch.where(index == number)
            gate, up = (x[token] @ self.first[number] + self.bias[number]).chunk(2, -1)
            out.index_add_(0, token, F.silu(gate) * up @ self.second[number] * weights[token, slot, None])
        return out


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "fp8_block"])
def test_weights_that_are_stored_transposed_share_scales_along_the_same_dimension(format):
    block, x = Transposed(), torch.randn(20, D, dtype=torch.float64, requires_grad=True)
    index, weights = torch.rand(20, E).argsort(1)[:, :2], torch.rand(20, 2, dtype=torch.float64, requires_grad=True)
    made = hexa_fx.quantize_experts_(hexa_fx.optimize(block, (x.detach(), index, weights.detach())), format)
    assert made.first.shape == block.first.shape
    assert made.first.packed.shape[1] == 2 * H
    same = QuantizedWeight.of(block.first.transpose(1, 2), format).dense().transpose(1, 2)
    assert torch.equal(made.first.dense(), same)
    assert torch.equal(made.first[1], same[1])
    dense = Transposed()
    dense.load_state_dict({n: p.dense() if isinstance(p, QuantizedWeight) else p for n, p in made.named_parameters()})
    outcomes = []
    for module in (made, dense):
        y = module(x, index, weights)
        outcomes.append((y, *torch.autograd.grad(y.square().sum(), (x, weights, module.bias))))
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected)
    again = hexa_fx.quantize_experts_(hexa_fx.optimize(dense, (x.detach(), index, weights.detach())), format)
    if format == "mxfp4":  # what came from it goes back without a loss
        assert torch.equal(again.first.dense(), made.first.dense())
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x, index, weights), made(x, index, weights))


def test_a_weight_that_blocks_share_is_packed_once():
    model = Model()
    model.blocks[1].first = model.blocks[0].first
    x = torch.randn(20, D, dtype=torch.float64)
    model = hexa_fx.quantize_experts_(hexa_fx.optimize_(model, x), "nf4")
    assert model.blocks[1].first is model.blocks[0].first
    assert isinstance(model.blocks[1].first, QuantizedWeight)


def test_undone_the_blocks_read_it_themselves(optimized, caplog):
    model, dense = packed(optimized, "fp8_block")
    x = torch.randn(9, D, dtype=torch.float64)
    torch.testing.assert_close(hexa_fx.undo_(model)(x), dense(x))
    assert "unpacked" not in caplog.text, "a loop over experts takes one at a time"


def test_packed_weights_are_not_changed_in_place(optimized):
    model, _ = packed(optimized, "nf4")
    with pytest.raises(InputError, match="merge adapters into the dense weights"):
        model.blocks[0].first.data += 1


def test_what_cannot_be_packed_is_said(optimized):
    x = torch.randn(20, D, dtype=torch.float64)
    with pytest.raises(InputError, match="expected one of nf4"):
        hexa_fx.quantize_experts_(optimized, "int3")
    with pytest.raises(InputError, match=r"call hexa_fx.optimize_ before"):
        hexa_fx.quantize_experts_(Model(), "nf4")
    model, _ = packed(optimized, "nf4")
    with pytest.raises(InputError, match="packed as nf4 already"):
        hexa_fx.quantize_experts_(model, "mxfp4")
    apart = hexa_fx.optimize_(Model(), x, HexaConfig(expert_operators=False))
    with pytest.raises(InputError, match="an ablation"):
        hexa_fx.quantize_experts_(apart, "nf4")


class Listed(Looped):
    def __init__(self, size):
        super().__init__(lambda: MLP(size, 12), size, E)

    def forward(self, x, index, weights):
        return self.mix(x, weights, index)


def test_sizes_that_do_not_fit():
    x, index, weights = torch.randn(20, 20), torch.rand(20, E).argsort(1)[:, :2], torch.rand(20, 2)
    with pytest.raises(
        InputError, match=r"experts.0.fc1.weight of shape \(12, 20\) cannot be packed as nf4: blocks of 64"
    ):
        hexa_fx.quantize_experts_(hexa_fx.optimize(Listed(20), (x, index, weights)), "nf4")
    block = Experts().float()
    block.first = nn.Parameter(torch.randn(E, 2 * H, 20))
    block.second = nn.Parameter(torch.randn(E, 20, H))
    made = hexa_fx.optimize(block, (x, index, weights))
    with pytest.raises(
        InputError, match=r"first of shape .* cannot be packed as mxfp4: .*; nf4, nf4_double, fp8_block"
    ):
        hexa_fx.quantize_experts_(made, "mxfp4")
    with torch.no_grad():
        made.second[1, 0, 0] = torch.inf
    with pytest.raises(InputError, match="second holds NaN, infinity or what float32 cannot hold in expert 1"):
        hexa_fx.quantize_experts_(made, "fp8_block")
    assert not packed_parameters(made), "nothing is packed where something cannot be"
