"""TRL's SFTTrainer on packed experts with adapters. Skipped where TRL is not installed; its GRPO loop is examples/grpo_trl.py."""

import pytest
import torch

import hexa_fx
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.integrations.tiny_models import built, default_config, tiny_config
from tests.ops.test_moe_ffn_sources import Launches

trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS = 4


def tokenizer(size):
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1, **{str(number): number for number in range(2, size)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")


def model(packed):
    config = tiny_config(default_config("qwen3_moe"))
    config._experts_implementation = "eager"
    made, inputs = built(config, "qwen3_moe")
    optimized = hexa_fx.optimize_(made, inputs["input_ids"], hexa_fx.HexaConfig(own_code_when_small=False))
    quantized = hexa_fx.quantize_experts_(optimized, "nf4")
    if packed:
        return quantized
    numbers = {n: p.dense() for n, p in quantized.named_parameters() if isinstance(p, QuantizedWeight)}
    dense, _ = built(config, "qwen3_moe")
    dense.load_state_dict(numbers, strict=False)
    return dense


def trainer(model, folder):
    torch.manual_seed(0)
    rows = [" ".join(str(2 + step) for step in range(6 + row % 2)) for row in range(8)]
    options = trl.SFTConfig(
        folder,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=2e-2,
        logging_steps=1,
        save_steps=STEPS,
        gradient_checkpointing=True,
        bf16=False,
        use_cpu=True,
        report_to=[],
        max_length=16,
        seed=0,
    )
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=TARGETS)
    return trl.SFTTrainer(
        model,
        options,
        train_dataset=datasets.Dataset.from_dict({"text": rows}),
        processing_class=tokenizer(model.config.vocab_size),
        peft_config=lora,
    )


def test_losses_are_those_of_dequantised_weights(tmp_path, caplog):
    found = []
    for packed in (True, False):
        made = trainer(model(packed), tmp_path / str(packed))
        torch.manual_seed(1)
        for name, parameter in made.model.named_parameters():
            if "lora" in name and parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
        with Launches() as launches:
            made.train()
        assert ("hexa::moe_ffn_sources" in " ".join(launches.names_seen())) == packed
        found.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert len(found[0]) == STEPS
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert found[0][-1] < found[0][0]
    assert (tmp_path / "True" / f"checkpoint-{STEPS}" / "adapter_model.safetensors").exists()
    assert "runs its original forward" not in caplog.text
    unpacked = [record.message for record in caplog.records if "unpacked" in record.message]
    assert all("baddbmm" in said for said in unpacked), "PEFT asks for a weight once, when it first wraps it"
