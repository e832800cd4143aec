"""An optimized model in transformers' own hands: Trainer, generate, save_pretrained, PEFT, accelerate; and experts as its own."""

import copy
import logging
import math
import pickle
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.runtime import attribute_guards
from tests.zoo.compare import _CountHexa

pytest.importorskip("transformers", minversion="5")

import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from hexa_fx import patch_transformers
from hexa_fx.integrations import experts as hexa_experts
from hexa_fx.integrations.experts import Gate
from hexa_fx.integrations.tiny_models import tiny_model
from hexa_fx.runtime.install import is_installed
from tests.zoo import families
from tests.zoo.common import Looped
from tests.zoo.compare import operators_run
from tests.zoo.family_table import errors_of

patch_transformers()


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


E, D, H, T, K = 5, 8, 6, 11, 3


def make_experts(act: str = "silu", gate: object = None, norm: bool = False, **flags: bool) -> nn.Module:
    """An experts module as transformers' own are written, in float64, with biases if the flags say so."""
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, **flags}

    class Experts(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts, self.alpha, self.limit = E, 1.3, 2.0
            width = 2 * H if flags["has_gate"] else H
            first, second = ((E, D, width), (E, H, D)) if flags["is_transposed"] else ((E, width, D), (E, D, H))
            name = "gate_up_proj" if flags["has_gate"] else "up_proj"
            self.register_parameter(name, nn.Parameter(torch.randn(first)))
            self.down_proj = nn.Parameter(torch.randn(second))
            if flags["has_bias"]:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, width)))
                self.down_proj_bias = nn.Parameter(torch.randn(E, D))
            if norm:
                self.post_expert_norm = nn.LayerNorm(D)
            self.act_fn = ACT2FN[act] if isinstance(act, str) else act

        def forward(self, *args: object) -> None:
            raise NotImplementedError

    if gate is not None:
        Experts._apply_gate = gate
    torch.manual_seed(0)
    made = use_experts_implementation(Experts, has_post_expert_norm=norm, **flags)(types.SimpleNamespace())
    return made.double()


def run(module: nn.Module, implementation: str, index: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of x, routing weights and parameters."""
    torch.manual_seed(1)
    module.config._experts_implementation = implementation
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    y = module(x, index, weights * (index < E))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weights, *module.parameters()])]


def gpt_oss_gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
    gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def clamped_gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up


def shifted_gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return self.act_fn(gate + self.limit) * up


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


CASES = {
    "gated": ({}, Gate("silu", "concat")),
    "gelu, biases": ({"act": "gelu", "has_bias": True}, Gate("gelu", "concat")),
    "transposed, biases": ({"is_transposed": True, "has_bias": True}, Gate("silu", "concat")),
    "ungated relu squared": ({"act": "relu2", "has_gate": False}, Gate("relu2", "none")),
    "clamped and interleaved": (
        {"gate": gpt_oss_gate, "is_transposed": True, "has_bias": True},
        Gate("swiglu_oai", "interleaved", (1.3, 2.0)),
    ),
    "a clamped gate": ({"gate": clamped_gate}, Gate("swiglu_limited", "concat", (2.0, math.inf))),
    "a gate of its own": ({"gate": shifted_gate}, None),
    "ungated, unknown": ({"act": "mish", "has_gate": False, "has_bias": True}, None),
    "a learned activation, silu at the start": ({"act": Swish()}, None),
    "norm behind the experts": ({"norm": True, "is_transposed": True}, None),
}
ROUTINGS = ("random", "one expert", "sentinels", "twice the same")


def routing(name: str) -> torch.Tensor:
    torch.manual_seed(2)
    index = torch.randint(0, E - 1, (T, K))  # expert E-1 is empty
    if name == "one expert":
        index[:] = 2
    if name == "sentinels":
        index[::2, 1:] = E
    if name == "twice the same":
        index[:, 1] = index[:, 0]
    return index


@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str) -> None:
    made, expected = CASES[case]
    module = make_experts(**made)
    if not made.get("norm"):
        assert hexa_experts.identify_gate(module) == expected
    for name in ROUTINGS:
        module._is_expert_parallel = name == "sentinels"
        index = routing(name)
        reference, value = run(module, "batched_mm", index), run(module, "hexa", index)
        for a, b in zip(reference, value):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_dropout_in_the_activation_is_not_lost_in_train_mode() -> None:
    module = make_experts(act=nn.Sequential(nn.SiLU(), nn.Dropout(0.5)))
    module.config._experts_implementation = "hexa"
    x, weights = torch.randn(T, D, dtype=torch.float64), torch.rand(T, K, dtype=torch.float64)
    index = routing("random")
    plain = module.eval()(x, index, weights)
    torch.testing.assert_close(module(x, index, weights), plain)
    assert not torch.allclose(module.train()(x, index, weights), plain)


def test_no_tokens() -> None:
    module = make_experts()
    module.config._experts_implementation = "hexa"
    empty = torch.zeros(0, D, dtype=torch.float64)
    assert module(empty, torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K).double()).shape == (0, D)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "aria_text", "phimoe"])
def test_families_equal_eager(family: str) -> None:
    """Logits, loss, router logits and the gradient of every parameter, in float64; 6 of the 18 that were tried by hand."""
    model = families.make(family, dtype=torch.float64)
    batch = families.inputs(3, 5)
    for train in (False, True):
        model.set_experts_implementation("eager")
        reference = families.logits_and_gradients(model, batch, train)
        model.set_experts_implementation("hexa")
        errors = errors_of(reference, families.logits_and_gradients(model, batch, train))
        assert errors.forward <= 1e-12, (train, errors)
        assert errors.gradient <= 1e-12, (train, errors)
    assert operators_run(model.eval(), (), batch) >= families.FAMILIES[family].blocks


@pytest.mark.parametrize("case", ["gated", "norm behind the experts"])
def test_bf16_autocast_and_bf16_weights(case: str) -> None:
    """Under autocast, and with bf16 weights for float32 tokens (a norm in front that computes in float32)."""
    module = make_experts(**CASES[case][0])
    index = routing("random")
    reference = run(module, "hexa", index)[0]
    torch.manual_seed(1)
    x, weights = torch.randn(T, D, dtype=torch.float64).float(), torch.rand(T, K, dtype=torch.float64).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module.float()(x, index, weights)
    y.float().sum().backward()
    z = module.bfloat16()(x, index, weights)
    assert z.dtype == torch.float32
    for value in (y, z):
        assert (value.double() - reference).abs().max() < 0.02 * reference.abs().max()


def test_generate_and_compile_and_export() -> None:
    """Greedy tokens are eager's; the whole model compiles as one graph and exports, which eager does not."""
    model = families.make("gpt_oss", dtype=torch.float64)
    ids = families.inputs(2, 5)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected, logits = model.generate(ids, **options), model(ids, use_cache=False).logits
    model.set_experts_implementation("hexa")
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    assert sum("moe_ffn" in str(node.target) for node in exported.graph.nodes) == 2
    torch.testing.assert_close(exported.module()(input_ids=ids, use_cache=False).logits, logits)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, logits)
    assert torch.equal(model.generate(ids, **options), expected)


def test_unknown_implementation_is_the_librarys_error_and_patching_repeats() -> None:
    patch_transformers(), patch_transformers()
    assert "hexa" in transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    with pytest.raises(ValueError, match="hexa"):
        families.make("mixtral").set_experts_implementation("hexagon")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("grouped_mm")
    hexa_fx.optimize_(model, torch.randint(1, 64, (1, 12)))
    assert model.config._experts_implementation == "grouped_mm"
    return model


@contextmanager
def as_on_a_gpu(self: Any) -> Iterator[None]:
    self.set_experts_implementation({"": "batched_mm"})
    yield
    self.set_experts_implementation({"": "grouped_mm"})


def operators_in_generate(model: Any, new: int) -> int:
    with _CountHexa() as count:
        model.generate(torch.randint(1, 64, (1, 5)), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return count.calls


def test_every_step_runs_the_operators(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(type(model), "_optimize_model_for_decode", as_on_a_gpu)
    with caplog.at_level(logging.WARNING, logger="hexa_fx"):
        more = operators_in_generate(model, 6) - operators_in_generate(model, 3)
    assert more >= 3
    assert "original forward" not in caplog.text


def test_only_the_first_decoding_looks_for_what_code_reads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "_optimize_model_for_decode", as_on_a_gpu)
    operators_in_generate(model, 3)
    made: list[Any] = []
    monkeypatch.setattr(attribute_guards, "Resolution", lambda *args: made.append(args))
    assert operators_in_generate(model, 3) >= 3
    assert not made


def test_another_implementation_is_another_kind(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The two that transformers exchanges are one, whoever sets them; another one is looked at."""
    ids = torch.randint(1, 64, (1, 40))
    for implementation, operators in (("batched_mm", True), ("grouped_mm", True), ("eager", False)):
        model.set_experts_implementation(implementation)
        with caplog.at_level(logging.WARNING, logger="hexa_fx"), _CountHexa() as count, torch.no_grad():
            model(ids)
        assert bool(count.calls) is operators, implementation
    assert "_experts_implementation_internal" in caplog.text
