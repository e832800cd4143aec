"""Every model type of the installed transformers that has experts: built tiny and run, or refused with its own error."""

import re
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

from hexa_fx.errors import InputError  # noqa: E402
from hexa_fx.example_tokens import nested  # noqa: E402
from hexa_fx.integrations.tiny_models import LARGEST, default_config, tiny_config, tiny_model  # noqa: E402
from hexa_fx.targets import load_whole  # noqa: E402

REFUSED = {
    "qwen3_omni_moe": "takes no token ids, which could be made; give example_inputs",  # its parts are called by themselves
    **dict.fromkeys(
        "deepseek_ocr2_text diffusion_gemma_text dots3_note_vision_encoder ernie4_5_vl_moe_text qwen3_omni_moe_talker_text "
        "qwen3_omni_moe_text step3p5 unlimited_ocr_text vitpose vitpose_backbone".split(),
        "is a part of other models",
    ),
}


@cache
def types_with_experts() -> list[str]:
    """Found when a test asks: it builds every configuration, which takes seconds."""
    return sorted(name for name in CONFIG_MAPPING_NAMES if "expert" in _fields(name))


def _fields(name: str) -> str:
    try:
        config = transformers.AutoConfig.for_model(name)
    except Exception:  # a default that their own checks refuse; none of these has experts
        return ""
    return " ".join(key for inside in nested(config) for key in vars(inside) if not key.startswith("_"))


def _problem(model_type: str) -> str:
    """Of a type that is neither built and run nor says why not."""
    try:
        model, inputs = tiny_model(model_type)
    except InputError as error:
        expected = REFUSED.get(model_type)
        return "" if expected is not None and re.search(expected, str(error)) else str(error)
    if model_type in REFUSED:
        return "is built now"
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        return "is large"
    with torch.no_grad():
        return "" if model(**inputs)[0].isfinite().all() else "gives numbers that are not finite"


def test_every_type_is_built_and_runs_or_says_why_not() -> None:
    assert {name: problem for name in types_with_experts() if (problem := _problem(name))} == {}


def test_there_are_many() -> None:
    assert len(types_with_experts()) > 90


@pytest.mark.parametrize("model_type", ["llama4", "qwen3_5_moe"])
def test_widths_reach_the_configuration_inside(model_type: str) -> None:
    text = tiny_config(default_config(model_type)).get_text_config()
    assert (text.hidden_size, text.num_hidden_layers) < (65, 5)


def test_a_layer_with_experts_is_among_those_that_stay() -> None:
    model, _ = tiny_model("nllb-moe")
    assert sum(path.endswith(".experts") for path, _ in model.named_modules()) == 2


def test_a_whole_model_keeps_its_layers_and_experts() -> None:
    model, _ = load_whole("qwen3_moe")
    assert (model.config.num_hidden_layers, model.config.num_experts, model.config.hidden_size) == (24, 128, 64)


@pytest.mark.slow
def test_a_whole_model_may_be_as_large_as_deepseek_v3() -> None:
    model, _ = load_whole("deepseek_v3")
    assert (model.config.num_hidden_layers, model.config.n_routed_experts) == (61, 256)


def test_a_type_that_nobody_knows() -> None:
    with pytest.raises(InputError, match="nonesuch"):
        tiny_model("nonesuch")
