"""Models whose experts are packed when they are optimized: transformers' FP8 modules, and models that were packed before."""

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.cuda.fp8 import is_few
from hexa_fx.errors import InputError
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import library, moe_ffn_fp8
from hexa_fx.sources.packed_parameters import packed_parameters
from tests.api.test_quantize import D as WIDTH
from tests.api.test_quantize import Model

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
E, D, H = 4, 256, 128


def loaded():
    """A layer as `from_pretrained` leaves it for a checkpoint in FP8 blocks."""
    from transformers import Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=H, num_experts=E, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    experts = fp8.FP8Experts(config, block_size=(128, 128))
    for name in ("gate_up_proj", "down_proj"):
        weight, scales = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        weight.data = (torch.randn(weight.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales.data = torch.rand(scales.shape) / 1000 + 1e-4
        weight.requires_grad_(False)
        scales.requires_grad_(False)
    return experts


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = loaded()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def by_their_weights(layer, x):
    """The layer with what transformers' own function makes of its weights."""
    weights, index = layer.router(x).softmax(-1).topk(2)
    first, second = (
        fp8._dequantize_fp8_weight(
            getattr(layer.experts, name), getattr(layer.experts, f"{name}_scale_inv"), (128, 128), x.dtype
        )
        for name in ("gate_up_proj", "down_proj")
    )
    y = x.clone()
    for e in range(E):
        token, slot = torch.where(index == e)
        gate, up = (x[token] @ first[e].t()).chunk(2, -1)
        y = y.index_add(0, token, (nn.functional.silu(gate) * up @ second[e].t()) * weights[token, slot, None])
    return y


def test_fp8_experts_of_transformers_are_read_as_they_are():
    layer, x = Layer(), torch.randn(40, D)
    original = Layer()
    original.load_state_dict(layer.state_dict())
    made = hexa_fx.optimize_(layer, x)
    assert {p.format for p in packed_parameters(made).values()} == {"fp8_block"}
    assert "packed as fp8_block" in str(made.report)
    assert made.experts.gate_up_proj.packed.data_ptr() != 0
    outcomes = []
    for function, of in ((made, made), (lambda x: by_their_weights(original, x), original)):
        rows = x.clone().requires_grad_()
        y = function(rows)
        outcomes.append((y, *torch.autograd.grad(y.square().sum(), (rows, of.router.weight))))
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("first", ["adapters", "optimize_"])
def test_adapters_on_fp8_experts(first):
    """Against the sums, of the weights as transformers' own function reads them."""
    peft = pytest.importorskip("peft")
    model, x = nn.Sequential(Layer()), torch.randn(40, D)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    dense = [
        fp8._dequantize_fp8_weight(
            getattr(model[0].experts, name), getattr(model[0].experts, f"{name}_scale_inv"), (128, 128), x.dtype
        )
        for name in ("gate_up_proj", "down_proj")
    ]
    if first == "adapters":
        model = hexa_fx.optimize_(peft.get_peft_model(model, lora), x)
    else:
        model = peft.get_peft_model(hexa_fx.optimize_(model, x), lora)
    factors = [p for name, p in model.named_parameters() if "lora_" in name]
    for factor in factors:
        nn.init.normal_(factor, std=0.05)
    y = model.train()(x)
    found = torch.autograd.grad(y.square().sum(), factors)
    of_down, of_up = factors[2:], factors[:2]
    if factors[0].shape[1] != D:  # PEFT wraps one around the other
        of_down, of_up = of_up, of_down
    summed = [
        w + 2 * torch.einsum("nre,erk->enk", b.view(w.shape[1], -1, E), a.view(E, -1, w.shape[2]))
        for w, (a, b) in zip(dense, (of_up, of_down), strict=True)
    ]
    router = model.get_submodule("base_model.model.0.router")
    weights, index = router(x).softmax(-1).topk(2)
    expected = x.clone()
    for e in range(E):
        token, slot = torch.where(index == e)
        gate, up = (x[token] @ summed[0][e].t()).chunk(2, -1)
        rows = (nn.functional.silu(gate) * up @ summed[1][e].t()) * weights[token, slot, None]
        expected = expected.index_add(0, token, rows)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), factors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_optimize_leaves_nothing_of_peft_s_parametrizations_behind():
    """With which PEFT would not find the parameters again."""
    peft = pytest.importorskip("peft")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=4, target_parameters=targets, target_modules=[])
    model = hexa_fx.optimize_(peft.get_peft_model(nn.Sequential(Layer()), lora), torch.randn(40, D))
    assert not [module for module in model.modules() if hasattr(module, "parametrizations")]
    model.add_adapter("other", peft.LoraConfig(r=2, target_parameters=targets, target_modules=[]))


def test_fp8_experts_are_multiplied_in_fp8_as_they_lie(monkeypatch, caplog):
    layer, x = Layer(), torch.randn(40, D)
    original = Layer()
    original.load_state_dict(layer.state_dict())
    made = hexa_fx.optimize_(layer, x, hexa_fx.HexaConfig(compute="fp8_block"))
    assert "multiplies in FP8" in str(made.report)
    monkeypatch.delitem(library._KERNELS, ("quantize_weight_fp8", "cpu"))
    expected = by_their_weights(original, x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = made(x)
        assert 1e-3 < (y - expected).norm() / (expected - x).norm() < 0.08
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), made(x))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(moe_ffn_fp8.is_few_on, "cpu", is_few)
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(x), made(x))
    assert "weights that are packed" not in caplog.text
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(moe_ffn_fp8.why_not_on, "cpu", lambda o: "it is one")
        torch.testing.assert_close(made(x), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(moe_ffn_fp8.is_few_on, "cpu", is_few)
        few = x[: E // 2]  # a row an expert
        torch.testing.assert_close(made(few), by_their_weights(original, few), rtol=1e-3, atol=1e-3)
        assert (made(x) - expected).norm() / (expected - x).norm() > 1e-3
    rows = x.clone().requires_grad_()
    moe_ffn_fp8._log_once.cache_clear()
    torch.testing.assert_close(made(rows), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    said = "multiplies in torch.float32 by weights that are packed or have adapters: gradients are wanted"
    assert said in caplog.text


def test_scales_of_other_blocks_are_refused():
    layer = Layer()
    layer.experts.down_proj_scale_inv = nn.Parameter(torch.ones(E, 4, 2), requires_grad=False)
    with pytest.raises(InputError, match="load the model dequantised"):
        hexa_fx.optimize_(layer, torch.randn(40, D))


@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_a_packed_model_is_optimized_again(format):
    x = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
    model = hexa_fx.undo_(hexa_fx.quantize_experts_(hexa_fx.optimize_(Model(), x.detach()), format))
    expected = model(x)
    gradient = torch.autograd.grad(expected.square().sum(), x)[0]
    made = hexa_fx.optimize_(model, x.detach())
    assert len(made.report.rewritten) == 2
    assert all(isinstance(block.first, QuantizedWeight) for block in made.blocks), "packed again after the analysis"
    found = made(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x)[0], gradient)
