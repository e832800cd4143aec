"""QLoRA: adapters on packed experts train as on the dequantised weights, under checkpointing and transformers' Trainer, too."""

import copy

import pytest
import torch

import hexa_fx
from hexa_fx.errors import InputError
from hexa_fx.formats import adapted_weight, quantized_weight
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.integrations.tiny_models import built, default_config, tiny_config
from tests.ops.test_moe_ffn_sources import Launches

peft = pytest.importorskip("peft")
pytest.importorskip("peft.tuners.lora.layer").__dict__.get("ParamWrapper") or pytest.skip("no target_parameters")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def optimized():
    config = tiny_config(default_config("qwen3_moe"))
    config._experts_implementation = "eager"
    model, inputs = built(config, "qwen3_moe")
    return hexa_fx.optimize_(model.double(), inputs["input_ids"]), inputs["input_ids"]


def with_adapters(model):
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "lm_head"], target_parameters=TARGETS)
    return peft.get_peft_model(model, lora).train()


def pair(optimized, format, order="packed first"):
    """A packed model with adapters, and plain PEFT on the numbers that it stands for."""
    model, ids = copy.deepcopy(optimized[0]), optimized[1]
    if order == "packed first":
        packed = with_adapters(hexa_fx.quantize_experts_(model, format))
    else:
        packed = hexa_fx.quantize_experts_(with_adapters(model), format)
    dense = hexa_fx.undo_(copy.deepcopy(optimized[0]))
    base = packed.get_base_model()
    weights = {name: p for name, p in base.named_parameters() if isinstance(p, QuantizedWeight)}
    assert len(weights) == 4
    numbers = {name.replace("base_layer.", ""): p.dense() for name, p in weights.items()}
    dense.load_state_dict(numbers, strict=False)
    assert all(torch.equal(dense.get_parameter(name), p) for name, p in numbers.items())
    return packed, with_adapters(dense), ids


def losses(model, ids, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("order", ["packed first", "adapters first"])
def test_a_batch_is_learnt_as_with_dequantised_weights(optimized, order, caplog):
    quantized_weight._say_once.cache_clear()
    adapted_weight.say_once.cache_clear()
    packed, dense, ids = pair(optimized, "nf4", order)
    before = {name: p.dense() for name, p in packed.named_parameters() if isinstance(p, QuantizedWeight)}
    found, expected = losses(packed, ids, 30), losses(dense, ids, 30)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert found[-1] < 0.5 * found[0]
    assert all(torch.equal(p.dense(), before[name]) for name, p in packed.named_parameters() if name in before)
    with Launches() as launches:
        packed(ids)
    assert "hexa::moe_ffn_sources" in " ".join(launches.names_seen())
    assert "added to their weights" not in caplog.text
    if order == "adapters first":
        assert "unpacked" not in caplog.text


@pytest.mark.parametrize("format", [None, "nf4", "fp8_block"], ids=["16 bits", "nf4", "fp8"])
def test_adapters_in_a_model_that_computes_in_fp8(optimized, format):
    """Low-rank products beside a weight that is kept as it is, as without FP8: quantising the sum in every step would cost more."""
    model, ids = copy.deepcopy(optimized[0]), optimized[1]
    in_fp8 = hexa_fx.optimize_(hexa_fx.undo_(copy.deepcopy(model)), ids, hexa_fx.HexaConfig(compute="fp8_block"))
    if format is not None:
        model, in_fp8 = (hexa_fx.quantize_experts_(each, format) for each in (model, in_fp8))
    model, in_fp8 = with_adapters(model), with_adapters(in_fp8)
    with Launches() as launches:
        found = losses(in_fp8, ids, 3)
    assert found == losses(model, ids, 3)
    assert {name for name in launches.names_seen() if "moe_ffn" in name and "backward" not in name} == {
        "hexa::moe_ffn_sources_forward"
    }


@pytest.mark.parametrize("format", ["nf4_double", "int8_rows"])
def test_gradient_checkpointing(optimized, format):
    packed, dense, ids = pair(optimized, format)
    for model in (packed, dense):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(losses(packed, ids, 4), losses(dense, ids, 4), rtol=1e-9, atol=1e-9)


def test_adapters_are_saved_switched_off_and_loaded(optimized, tmp_path):
    packed, dense, ids = pair(optimized, "fp8_block")
    losses(packed, ids, 2)
    packed.eval().save_pretrained(tmp_path)
    dense.unload()
    loaded = peft.PeftModel.from_pretrained(dense.get_base_model(), tmp_path).eval()
    torch.testing.assert_close(packed(ids).logits, loaded(ids).logits)
    with packed.disable_adapter(), loaded.disable_adapter():
        torch.testing.assert_close(packed(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("order", ["packed first", "adapters first"])
def test_merging_into_packed_weights_is_refused_before_anything_is_merged(optimized, order):
    packed, _, ids = pair(optimized, "nf4", order)
    losses(packed, ids, 2)
    before, modules = packed.eval()(ids).logits, dict(packed.named_modules())
    for merge in (packed.merge_and_unload, packed.merge_adapter):
        with pytest.raises(InputError, match=r"at .*layers\.0\.mlp\.experts is on packed weights.*nothing was merged"):
            merge()
    assert dict(packed.named_modules()) == modules
    torch.testing.assert_close(packed(ids).logits, before, rtol=0, atol=0)
    assert hexa_fx.undo_(packed.unload()).lm_head.weight.dtype == torch.float64


def test_transformers_trainer(optimized, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    packed, dense, ids = pair(optimized, "nf4", "adapters first")
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {
        "per_device_train_batch_size": 1,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
    }
    found = []
    for name, model in (("packed", packed), ("dense", dense)):
        arguments = TrainingArguments(
            tmp_path / name, logging_steps=1, gradient_checkpointing=True, save_steps=3, **options
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 3
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert (tmp_path / "packed" / "checkpoint-3" / "adapter_model.safetensors").exists()
