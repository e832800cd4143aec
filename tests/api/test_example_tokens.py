"""Models of transformers need no example: tokens are made by their configuration."""

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.errors import InputError
from hexa_fx.example_tokens import ExampleTokens, example_tokens

transformers = pytest.importorskip("transformers", minversion="5")

from hexa_fx.integrations.tiny_models import tiny_model  # noqa: E402

QUICK = hexa_fx.HexaConfig(verify=False)


@pytest.mark.parametrize("model_type", ["mixtral", "switch_transformers", "qwen3_vl_moe"])
def test_a_model_is_optimized_without_an_example(model_type: str) -> None:
    """A decoder, one with an encoder, and the text part of one that sees; padded inputs and others run what was written."""
    model, _ = tiny_model(model_type)
    optimized = hexa_fx.optimize(model, config=QUICK)
    assert "first call" in str(optimized.report)
    inputs = {name: value.roll(1, -1) for name, value in example_tokens(model).items()}
    torch.testing.assert_close(optimized(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert optimized.report.rewritten
    assert not optimized.report.refused


def test_in_place_and_in_an_explanation() -> None:
    model, _ = tiny_model("mixtral")
    assert len(hexa_fx.explain(model, config=QUICK).rewritten) == 2
    assert hexa_fx.optimize_(model, config=QUICK) is model


def test_ids_are_of_ordinary_words_and_random_state_stays() -> None:
    model, _ = tiny_model("mixtral")
    model.config.eos_token_id, model.config.image_token_index, model.config.pad_token_id = [5, 6], 7, 0
    state = torch.get_rng_state()
    made = example_tokens(model)
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(made, ExampleTokens)
    assert not {0, 5, 6, 7} & set(made["input_ids"].unique().tolist())
    assert made["input_ids"].max() < model.config.vocab_size
    assert made["attention_mask"].sum() == made["input_ids"].numel() - 3


def test_adapted_models_too() -> None:
    peft = pytest.importorskip("peft")
    model, _ = tiny_model("mixtral")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert len(hexa_fx.explain(adapted, config=QUICK).rewritten) == 2


class Words(nn.Module):
    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(8, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.words(pixel_values)


def test_other_models_say_what_to_give() -> None:
    with pytest.raises(InputError, match=r"Words is no model of transformers, .*; give example_inputs: a tensor"):
        hexa_fx.explain(Words())
    with pytest.raises(InputError, match=r"Words takes no token ids, .*; give example_inputs"):
        hexa_fx.explain(Words(transformers.MixtralConfig()))


def test_a_model_that_needs_more_than_tokens_says_so() -> None:
    class Reads(Words):
        def forward(self, input_ids: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
            return self.words(input_ids) + pictures

    model = Reads(transformers.MixtralConfig(vocab_size=8))
    model.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])  # something to look at
    with pytest.raises(TypeError, match="pictures") as caught:
        hexa_fx.explain(model)
    assert "tokens made by its configuration (give example_inputs if it needs others)" in caught.value.__notes__[0]


def test_a_global_batch_is_never_guessed() -> None:
    model, _ = tiny_model("mixtral")
    with pytest.raises(InputError, match="stand for the global batch"):
        hexa_fx.optimize_(model, mesh=object())
