"""Stacked experts that other libraries load in four bits: bitsandbytes' parameters, transformers' gpt-oss in MXFP4.

With bitsandbytes where it is installed, and with a stand-in everywhere. Triton's tensors are stood in for: they hold codes in the
order of a kernel, and say how to take it back.
"""

import importlib.util
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.errors import InputError
from hexa_fx.formats import MXFP4
from hexa_fx.integrations.tiny_models import built, default_config, tiny_config
from hexa_fx.sources.packed_parameters import packed_parameters
from tests.api import test_quantize
from tests.api.test_quantize import D, E, Model, Transposed
from tests.integrations import linear4bit_stand_in as stand_in

ALWAYS = HexaConfig(own_code_when_small=False)
INSTALLED = importlib.util.find_spec("bitsandbytes") is not None


class Dequantized(nn.Module):
    """A parametrization, as bitsandbytes registers it."""

    def __init__(self, state):
        super().__init__()
        self.quant_state = state

    def forward(self, codes):
        return stand_in.dequantized(SimpleNamespace(data=codes, quant_state=self.quant_state))


def replace_parameter(module, name, double, quant_type="nf4"):
    weight = getattr(module, name).detach()
    packed = stand_in.quantized(weight.reshape(-1, weight.shape[-1]), double)
    state = packed.quant_state
    state.shape, state.dtype, state.quant_type = weight.shape, weight.dtype, quant_type
    setattr(module, name, nn.Parameter(packed.data.view(-1), requires_grad=False))
    parametrize.register_parametrization(module, name, Dequantized(state), unsafe=True)


def replace_by_bitsandbytes(module, name, double, quant_type="nf4"):
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    replace_parameter_4bit(module, name, compress_statistics=double, quant_type=quant_type)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """bitsandbytes reads rows of less than 64 numbers wrongly on a CPU."""
    monkeypatch.setattr(test_quantize, "H", 64)


@pytest.fixture(params=["stand-in", pytest.param("installed", marks=pytest.mark.skipif(not INSTALLED, reason="none"))])
def replace(request):
    return replace_parameter if request.param == "stand-in" else replace_by_bitsandbytes


def outcome(function, x):
    rows = x.clone().requires_grad_()
    y = function(rows)
    return y, *torch.autograd.grad(y.square().sum(), rows)


@pytest.mark.parametrize("double", [False, True])
def test_stacks_of_bitsandbytes_are_read_expert_by_expert(replace, double, caplog):
    model, x = Model().float(), torch.randn(20, D)
    for block in model.blocks:
        for name in ("first", "second"):
            replace(block, name, double)
    expected = outcome(model, x)
    hexa_fx.optimize_(model, x, ALWAYS)
    assert len(model.report.rewritten) == 2
    formats = [p.format for p in packed_parameters(model).values()]
    assert len(formats) == 4
    assert set(formats) == {"nf4"}, "256 scales of one expert share one only from 256 blocks on"
    for found, wanted in zip(outcome(model, x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert "unpacked" not in caplog.text
    torch.testing.assert_close(hexa_fx.undo_(model)(x), expected[0], rtol=1e-4, atol=1e-5)
    assert "blocks.0.nf4_first_packed" in model.state_dict()


def test_scales_of_scales_are_kept_where_they_are_an_experts_own(replace):
    block = nn.Module()
    block.weight = nn.Parameter(torch.randn(3, 128, 128 * 2))
    replace(block, "weight", True)
    expected = block.weight
    hexa_fx.sources.loaded.adopt_loaded(block)
    assert block.weight.format == "nf4_double"
    torch.testing.assert_close(block.weight.dense(), expected, rtol=1e-5, atol=1e-6)


def test_other_codes_stay_a_parametrization(replace):
    model, x = Model().float(), torch.randn(20, D)
    replace(model.blocks[0], "first", False, quant_type="fp4")
    expected = model(x)
    hexa_fx.optimize_(model, x, ALWAYS)
    assert not packed_parameters(model)
    torch.testing.assert_close(model(x), expected)


def test_a_stack_that_its_library_reads_otherwise_stays_its_own(monkeypatch, caplog):
    plain = stand_in.dequantized
    monkeypatch.setattr(stand_in, "dequantized", lambda parameter: plain(parameter).flip(1))
    torch.manual_seed(0)
    model, x = Model().float(), torch.randn(20, D)
    replace_parameter(model.blocks[0], "first", False)
    expected = model(x)
    torch.testing.assert_close(hexa_fx.optimize_(model, x, ALWAYS)(x), expected)
    assert "blocks.0.first stands for other numbers" in caplog.text


def test_stacks_that_are_stored_transposed(replace):
    block, x = Transposed().float(), torch.randn(20, D)
    index, weights = torch.rand(20, E).argsort(1)[:, :2], torch.rand(20, 2)
    for name in ("first", "second"):
        replace(block, name, False)
    expected = outcome(lambda rows: block(rows, index, weights), x)
    hexa_fx.optimize_(block, (x, index, weights), ALWAYS)
    assert block.first.shape == (E, D, 128)
    assert block.report.rewritten
    for found, wanted in zip(outcome(lambda rows: block(rows, index, weights), x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Layout:
    """The order of a kernel: here, backwards. As in layouts of GPUs, rows are padded, and stay so when they are taken back."""

    def unswizzle_data(self, data):
        return data.flip(1)


def as_triton_has_it(codes):
    """(E, ., N), backwards and padded."""
    data = F.pad(codes.transpose(1, 2), (0, 3, 0, 5), value=77)
    return SimpleNamespace(storage=SimpleNamespace(layout=Layout(), data=data.flip(1)))


def loaded_gpt_oss():
    """A tiny gpt-oss as it is loaded on a GPU, and one with the dequantised weights."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    config = tiny_config(default_config("gpt_oss"))
    config._experts_implementation = "eager"
    packed, inputs = built(config, "gpt_oss")
    dense, _ = built(config, "gpt_oss")
    for path, module in list(packed.named_modules()):
        if type(module).__name__ != "GptOssMLP":
            continue
        experts, same = mxfp4.Mxfp4GptOssExperts(config), dense.get_submodule(path).experts
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module.experts, name).detach()
            blocks, scales = MXFP4.pack_all(weight.transpose(1, 2))
            getattr(same, name).data.copy_(
                mxfp4.convert_moe_packed_tensors(blocks.unflatten(2, (-1, 16)), scales, dtype=weight.dtype)
            )
            bias = torch.randn_like(getattr(same, f"{name}_bias"))
            getattr(same, f"{name}_bias").data.copy_(bias)
            getattr(experts, f"{name}_bias").data.copy_(bias)
            experts._parameters.pop(name, None)
            setattr(experts, name, as_triton_has_it(blocks))
            setattr(experts, f"{name}_precision_config", SimpleNamespace(weight_scale=as_triton_has_it(scales)))
        if hasattr(mxfp4, "Mxfp4GptOssMLP"):
            packed.set_submodule(path, mxfp4.Mxfp4GptOssMLP(module.router, experts))
        else:
            module.experts, module.forward = experts, MethodType(mxfp4.mlp_forward, module)
    return packed, dense, inputs


def test_gpt_oss_in_mxfp4_is_read_as_it_lies(caplog):
    packed, dense, inputs = loaded_gpt_oss()
    hexa_fx.optimize_(packed, inputs["input_ids"], ALWAYS)
    assert {p.format for p in packed_parameters(packed).values()} == {"mxfp4"}
    assert len(packed.report.rewritten) == len(packed.report.blocks)
    torch.testing.assert_close(packed(**inputs).logits, dense(**inputs).logits, rtol=1e-4, atol=1e-5)
    routers = [p for name, p in packed.named_parameters() if "router" in name]
    others = [dense.get_parameter(name) for name, _ in packed.named_parameters() if "router" in name]
    found = torch.autograd.grad(packed(**inputs).logits.square().sum(), routers)
    for one, other in zip(found, torch.autograd.grad(dense(**inputs).logits.square().sum(), others), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    assert "unpacked" not in caplog.text


def test_trainer_takes_adapters_on_a_gpt_oss_that_was_loaded_in_mxfp4():
    peft, quantizers = pytest.importorskip("peft"), pytest.importorskip("transformers.quantizers.quantizer_mxfp4")
    trainer_utils, transformers = pytest.importorskip("transformers.trainer_utils"), pytest.importorskip("transformers")
    if not hasattr(trainer_utils, "validate_quantization_for_training"):
        pytest.skip("in transformers 4 Trainer asks elsewhere")
    packed, _, inputs = loaded_gpt_oss()
    config = transformers.Mxfp4Config()
    packed.hf_quantizer, packed.is_quantized = quantizers.Mxfp4HfQuantizer(config, pre_quantized=True), True
    packed.config.quantization_config = config
    adapters = peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="purely quantized"):
        trainer_utils.validate_quantization_for_training(packed)
    copied = hexa_fx.optimize(packed, inputs["input_ids"], ALWAYS)
    assert packed.is_quantized
    adapted = peft.get_peft_model(copied, adapters).train()
    trainer_utils.validate_quantization_for_training(adapted)
    assert not hasattr(copied.config, "quantization_config")
    adapted(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("layout", [SimpleNamespace(), SimpleNamespace(unswizzle_data=lambda data: data[:, :1])])
def test_a_layout_that_is_not_read_is_an_error_with_the_remedy(layout):
    packed, _, inputs = loaded_gpt_oss()
    experts = next(module for module in packed.modules() if type(module).__name__ == "Mxfp4GptOssExperts")
    experts.down_proj.storage.layout = layout
    with pytest.raises(InputError, match=r"down_proj lies in the layout SimpleNamespace.*dequantize=True"):
        hexa_fx.optimize_(packed, inputs["input_ids"], ALWAYS)


def test_codes_in_another_order_are_noticed(monkeypatch):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed, _, inputs = loaded_gpt_oss()
    plain = mxfp4.convert_moe_packed_tensors
    monkeypatch.setattr(mxfp4, "convert_moe_packed_tensors", lambda blocks, *a, **k: plain(blocks.flip(1), *a, **k))
    with pytest.raises(InputError, match=r"gate_up_proj stands for other numbers"):
        hexa_fx.optimize_(packed, inputs["input_ids"], ALWAYS)


@pytest.mark.parametrize("others", [False, True])
def test_the_original_of_an_optimized_copy_keeps_its_parametrizations(replace, others):
    model, x = Model().float(), torch.randn(20, D)
    for block in model.blocks:
        replace(block, "first", False)
        if others:
            replace(block, "second", False, quant_type="fp4")
    expected = model(x)
    made = hexa_fx.optimize(model, x, ALWAYS)
    assert len(packed_parameters(made)) == 2
    torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), expected)
    assert not packed_parameters(model)
