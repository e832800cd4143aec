"""Every language model type of the installed transformers that has experts: built tiny and run, or refused with its own error."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hexa_fx.errors import InputError  # noqa: E402
from hexa_fx.integrations.tiny_models import default_config, tiny_config, tiny_model  # noqa: E402
from hexa_fx.targets import load_whole  # noqa: E402

DO_NOT_BUILD = {"qwen4_exp", "qwen4_exp_text"}
"""Their default configuration leaves the sizes of an indexer open, and no published one says what they are."""


def types_with_experts() -> list[str]:
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    return sorted(name for name in names if "expert" in _fields(name))


def _fields(name: str) -> str:
    try:
        text = transformers.AutoConfig.for_model(name).get_text_config()
    except Exception:  # some have two text configurations, or a default that their own checks refuse; none has experts
        return ""
    inside = vars(getattr(text, "ffn_config", text))
    return " ".join(key for key in (*text.to_dict(), *inside) if not key.startswith("_"))


@pytest.mark.parametrize("model_type", types_with_experts())
def test_a_type_is_built_and_runs_or_says_why_not(model_type: str) -> None:
    if model_type in DO_NOT_BUILD:
        with pytest.raises(InputError, match=r"does not build with tiny widths \(.*\); write a factory for it"):
            tiny_model(model_type)
        return
    model, inputs = tiny_model(model_type)
    assert sum(parameter.numel() for parameter in model.parameters()) < 15_000_000
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


def test_there_are_many() -> None:
    assert len(types_with_experts()) > 55


@pytest.mark.parametrize("model_type", ["llama4", "qwen3_5_moe"])
def test_widths_reach_the_configuration_inside(model_type: str) -> None:
    text = tiny_config(default_config(model_type)).get_text_config()
    assert (text.hidden_size, text.num_hidden_layers) < (65, 5)


def test_a_whole_model_keeps_its_layers_and_experts() -> None:
    model, _ = load_whole("qwen3_moe")
    assert (model.config.num_hidden_layers, model.config.num_experts, model.config.hidden_size) == (24, 128, 64)


def test_a_type_that_nobody_knows() -> None:
    with pytest.raises(InputError, match="nonesuch"):
        tiny_model("nonesuch")
