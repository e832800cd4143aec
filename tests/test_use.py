"""Loaded models in the set-ups that people use: the operators ran in every call after the first of its kind.

The models are made by ``from_pretrained`` from a folder, and analysed as large ones are, in pieces: ``analysis_bytes`` is low.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.integrations.tiny_models import tiny_model
from hexa_fx.ops import grad_sums

transformers = pytest.importorskip("transformers")

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
CONFIG = hexa_fx.HexaConfig(own_code_when_small=False, analysis_bytes=200_000)
Model = Any


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model, inputs = tiny_model(request.param)
    model.save_pretrained(path)
    return path, inputs


def loaded(folder: tuple[Path, dict[str, Any]], **options: Any) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder[0], **options)


def step(model: Model, inputs: dict[str, Any], cast: torch.dtype | None = None) -> torch.Tensor:
    model.zero_grad()
    with torch.autocast("cpu", cast, cache_enabled=True) if cast is not None else nullcontext():
        loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    found: torch.Tensor = loss.detach()
    return found


def ran(model: Model, calls: Callable[[], Any]) -> None:
    """Asserts that every block ran rewritten in the second call."""
    calls()
    before = [block.calls for block in model.report.blocks]
    calls()
    for block, (rewritten, _, own, _) in zip(model.report.blocks, before, strict=True):
        now = block.calls
        assert now.rewritten > rewritten, f"{block.path}: {now}"
        assert dict(now.own) == dict(own), f"{block.path}: {now}"
    assert model.report.blocks


PRECISIONS = {
    "bf16": (torch.bfloat16, None, None),
    "float32, autocast to bf16": (torch.float32, torch.bfloat16, None),
    "float32, autocast to fp16": (torch.float32, torch.float16, None),
    "bf16, autocast to bf16": (torch.bfloat16, torch.bfloat16, None),
    "bf16, autocast to fp16": (torch.bfloat16, torch.float16, None),
    "cast after": (torch.float32, None, torch.bfloat16),
    "autocast after float32": (torch.float32, torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize("given", [False, True], ids=["at the first call", "by an example"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions(folder: tuple[Path, dict[str, Any]], name: str, given: bool) -> None:
    dtype, cast, after = PRECISIONS[name]
    original = loaded(folder, dtype=dtype)
    model = hexa_fx.optimize(original, folder[1] if given else None, CONFIG)
    if after is not None:
        step(model, folder[1])
        model, original = model.to(after), copy.deepcopy(original).to(after)
    ran(model, lambda: step(model, folder[1], cast))
    torch.testing.assert_close(step(model, folder[1], cast), step(original, folder[1], cast), rtol=0.02, atol=0.02)
    assert "checked in float64" in str(model.report)


def _assigned(model: Model) -> Model:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


CHANGES: dict[str, Callable[[Model], Model]] = {
    "deepcopy": copy.deepcopy,
    "packed": lambda model: hexa_fx.quantize_experts_(model, "int8_rows"),
    "assigned": _assigned,
    "frozen experts": lambda model: (
        [p.requires_grad_("experts" not in n) for n, p in model.named_parameters()] and model
    ),
    "eval": nn.Module.eval,
    "checkpoints": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}) or model,
    "reentrant checkpoints": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}) or model,
}


@pytest.mark.parametrize("called", [False, True], ids=["before its first call", "after a call"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(folder: tuple[Path, dict[str, Any]], name: str, called: bool) -> None:
    model = hexa_fx.optimize_(loaded(folder), folder[1], CONFIG)
    if called:
        step(model, folder[1])
    expected = step(loaded(folder), folder[1])
    model = CHANGES[name](model)
    ran(model, lambda: step(model, folder[1]))
    torch.testing.assert_close(step(model, folder[1]), expected, rtol=0.05, atol=0.05)


def test_generation_and_router_logits(folder: tuple[Path, dict[str, Any]]) -> None:
    original = loaded(folder).eval()
    model = hexa_fx.optimize(original, None, CONFIG)
    ids = folder[1]["input_ids"]
    found = [each.generate(ids, max_new_tokens=5, do_sample=False) for each in (original, model)]
    assert torch.equal(*found)
    ran(model, lambda: model.generate(ids, max_new_tokens=3, do_sample=False))


def test_settings_that_change_are_one_analysis_each(folder: tuple[Path, dict[str, Any]]) -> None:
    model = hexa_fx.optimize_(loaded(folder), folder[1], CONFIG)
    step(model, folder[1])
    for cast in (None, torch.bfloat16, None, torch.bfloat16):
        for training in (True, False):
            step(model.train(training), folder[1], cast)
    assert all(block.calls.kinds <= 4 and not block.calls.own for block in model.report.blocks)
    before = [block.calls.kinds for block in model.report.blocks]
    step(model, folder[1], torch.bfloat16)
    assert [block.calls.kinds for block in model.report.blocks] == before


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_gradients_of_micro_batches_add_up(
    folder: tuple[Path, dict[str, Any]], cast: torch.dtype | None, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second one on kernels add to what is there, also where that call is analysed: one in another mode."""
    added, real = [], grad_sums.beside
    monkeypatch.setattr(grad_sums, "beside", lambda *given: added.append(real(*given)) or added[-1])
    sums = []
    for model in (loaded(folder), hexa_fx.optimize_(loaded(folder), None, CONFIG)):
        model = CHANGES["checkpoints"](model) if checkpointed else model
        for training in (True, True, False):
            with torch.autocast("cpu", cast) if cast is not None else nullcontext():
                loss = model.train(training)(**folder[1], labels=folder[1]["input_ids"], use_cache=False).loss
            loss.backward()
        sums.append({name: p.grad for name, p in model.named_parameters()})
    assert all(any(t is not None for t in each) for each in added[-len(model.report.blocks) :])
    rough = {} if cast is None else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(sums[1], sums[0], **rough)
