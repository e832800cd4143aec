"""An optimized model in transformers' own hands: Trainer, generate, save_pretrained and from_pretrained; PEFT and accelerate."""

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

import transformers

import hexa_fx
from hexa_fx.integrations.tiny_models import tiny_model
from hexa_fx.runtime.install import is_installed
from tests.zoo import families
from tests.zoo.common import Looped
from tests.zoo.compare import operators_run


def pair(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Two models of equal but separate weights, the second optimized."""
    original = families.make(family, dtype=dtype)
    return original, hexa_fx.optimize_(copy.deepcopy(original), families.inputs(2, 7))


def blocks(model: nn.Module) -> int:
    return sum(is_installed(module) for module in model.modules())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_generate_gives_the_same_tokens_in_float32(family: str) -> None:
    original, optimized = pair(family)
    ids = families.inputs(2, 5)["input_ids"]
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}, {"num_beams": 2}):
        tokens = []
        for model in (original, optimized):
            torch.manual_seed(3)
            tokens.append(model.generate(ids, max_new_tokens=6, pad_token_id=0, **sampling))
        assert torch.equal(*tokens), sampling


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_mixed_precision_and_another_dtype_run_rewritten(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Under autocast norms give float32 and routers bfloat16; the library's check of a dtype is not reached unless compiled."""
    original, inputs = tiny_model(family)
    original.train().set_experts_implementation("grouped_mm")
    optimized = hexa_fx.optimize_(copy.deepcopy(original), inputs)
    losses = []
    for model in (original, optimized):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
        losses[-1].backward()
        losses.append(model.bfloat16()(**inputs, labels=inputs["input_ids"]).loss)
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-2, atol=1e-2)
    assert "runs its original forward" not in caplog.text


@pytest.mark.parametrize("family", ["mixtral", "switch_transformers"])
def test_save_pretrained_and_from_pretrained(family: str, tmp_path: Path) -> None:
    """Optimized, saved, and loaded by plain transformers; and a saved plain model loaded and optimized."""
    original, optimized = pair(family)
    original.save_pretrained(tmp_path / "plain")
    optimized.save_pretrained(tmp_path / "optimized")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_text() == (tmp_path / "optimized" / name).read_text()
    plain = type(original).from_pretrained(tmp_path / "optimized", attn_implementation="eager").eval()
    assert blocks(plain) == 0
    theirs = original.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in plain.state_dict().items())
    loaded = type(original).from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    loaded = hexa_fx.optimize(loaded, families.inputs(2, 7))
    assert blocks(loaded) == families.FAMILIES[family].blocks
    batch = families.inputs(3, 5)
    torch.testing.assert_close(loaded(**batch).logits, original(**batch).logits, rtol=1e-4, atol=1e-5)


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = families.inputs(1, 7, seed=index)["input_ids"][0]
        return {"input_ids": ids, "labels": ids}


def losses(model: nn.Module, folder: Path) -> list[float]:
    """The loss of every step of a Trainer run, with clipping, accumulation and weight decay as it comes."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Sentences())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_follows_the_original(tmp_path: Path) -> None:
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    original, optimized = pair("qwen3_moe", torch.float64)
    first = losses(original, tmp_path / "a")
    second = losses(optimized, tmp_path / "b")
    assert len(first) == 4
    assert first[-1] < first[0]
    torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-6)
    assert operators_run(optimized, (), families.inputs(3, 5)) == 2
    for (name, a), b in zip(original.named_parameters(), optimized.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8, msg=name)


# -- PEFT --------------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module, **where: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, task_type="CAUSAL_LM", **where)
    return peft.get_peft_model(model, config)


def same_training(first: nn.Module, second: nn.Module) -> None:
    """Logits, and the gradients of what is trained, agree; frozen experts get none."""
    outcomes = [families.logits_and_gradients(model, families.inputs(3, 5), train=True) for model in (first, second)]
    torch.testing.assert_close(outcomes[1].logits, outcomes[0].logits, rtol=1e-9, atol=1e-10)
    trained = [name for name, gradient in outcomes[0].gradients.items() if gradient is not None]
    assert trained
    assert all("lora" in name for name in trained)
    for name in trained:
        torch.testing.assert_close(outcomes[1].gradients[name], outcomes[0].gradients[name], rtol=1e-8, atol=1e-10)
    assert [n for n, g in outcomes[1].gradients.items() if g is not None] == trained


def test_lora_on_attention_of_an_optimized_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    original, optimized = pair("mixtral", torch.float64)
    plain = copy.deepcopy(original)
    original, optimized = (adapted(m, target_modules=["q_proj", "v_proj"]) for m in (original, optimized))
    same_training(original, optimized)
    assert blocks(optimized) == 2
    optimized.eval().save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    batch = families.inputs(2, 5)
    torch.testing.assert_close(loaded(**batch).logits, optimized(**batch).logits, rtol=1e-9, atol=1e-10)
    merged = optimized.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, loaded(**batch).logits, rtol=1e-6, atol=1e-8)


def test_optimize_after_lora() -> None:
    """The other order: experts are rewritten inside the adapted model."""
    original = adapted(families.make("mixtral", dtype=torch.float64), target_modules=["q_proj", "v_proj"])
    optimized = hexa_fx.optimize(original, families.inputs(2, 7))
    assert blocks(optimized) == 2
    same_training(original, optimized)


class Listed(Looped):
    """Experts in a list, whose linears PEFT exchanges for its own."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}), 8)

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        return self.experts[e]["down"](nn.functional.gelu(self.experts[e]["up"](rows)))


# -- accelerate --------------------------------------------------------------------------------------------------------


def test_accelerate(tmp_path: Path) -> None:
    """prepare, backward, clipping, save_state and load_state, step by step as with the original."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    finals = []
    for name, model in zip("ab", pair("qwen2_moe", torch.float64)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model.train(), optimizer)
        for step in range(4):
            if step == 2:
                accelerator.save_state(str(tmp_path / name))
            loss = train_step(accelerator, model, optimizer, step)
        accelerator.load_state(str(tmp_path / name))
        again = [train_step(accelerator, model, optimizer, step) for step in (2, 3)][-1]
        torch.testing.assert_close(again, loss, rtol=1e-9, atol=1e-9)
        finals.append(loss)
        accelerator.free_memory()
    torch.testing.assert_close(finals[1], finals[0], rtol=1e-7, atol=1e-8)


def train_step(accelerator: object, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss = model(**families.inputs(2, 5, seed=step)).loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def test_an_optimized_model_can_be_pickled() -> None:
    """What is noted of transformers' decorated forwards holds types that Python has no name for."""
    model, example = tiny_model("qwen3_moe")
    optimized = hexa_fx.optimize(model, example, hexa_fx.HexaConfig(own_code_when_small=False))
    copied = pickle.loads(pickle.dumps(optimized))
    torch.testing.assert_close(copied(**example).logits, optimized(**example).logits)
    assert operators_run(copied, (), example)
    before = copied.report.blocks[0].calls.rewritten
    copied(**example)
    assert copied.report.blocks[0].calls.rewritten > before


@pytest.mark.parametrize("family", ["llama4_text", "mixtral", "granitemoe"])
def test_experts_that_are_cut_off_an_optimized_model(family: str) -> None:
    """The number of experts is a size of stacks and of what the router gives."""
    model, example = tiny_model(family)
    optimized = hexa_fx.optimize_(copy.deepcopy(model), example, hexa_fx.HexaConfig(own_code_when_small=False))
    for each in (model, optimized):
        for module in each.modules():
            for name, number in vars(module).items():
                if name in ("num_experts", "num_local_experts", "out_features") and number == 8:
                    setattr(module, name, 4)
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter[:4].detach().clone() if len(parameter) == 8 else parameter.data
    for _ in range(2):
        torch.testing.assert_close(optimized(**example).logits, model(**example).logits, rtol=1e-4, atol=1e-5)
    assert operators_run(optimized, (), example)
    assert all("E=4 " in block.sizes and block.as_dict()["num_experts"] == 4 for block in optimized.report.blocks)
