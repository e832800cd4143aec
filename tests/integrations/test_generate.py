"""`generate` runs the operators, though it sets another `experts_implementation` while it decodes on a GPU."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hexa_fx
from hexa_fx.runtime import attribute_guards
from tests.zoo.compare import _CountHexa


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
