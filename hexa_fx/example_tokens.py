"""The example for a model of transformers: tokens by its configuration, so that nobody has to give one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hexa_fx.errors import InputError

BATCH, LENGTH, PADDING = 2, 16, 3
"""Sequences, their length, and the tokens of padding at the end of the last one."""

_EXPECTED = "give example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments"


class ExampleTokens(dict[str, Any]):
    """Keyword arguments that nobody gave: made by `example_tokens`."""


def example_tokens(model: nn.Module) -> ExampleTokens:
    """Random token ids for a language model of transformers, the text part of one that also takes pictures or sound included.

    Ids are those of ordinary tokens: none that the configuration names (padding, ends, places of pictures). The last sequence is
    padded where the model takes a mask. A model with encoder and decoder gets tokens for both. The global random state is not used.

    Returns:
        ``input_ids``, (2, 16) int64, and where they apply ``attention_mask`` and ``decoder_input_ids`` of the same shape.

    Raises:
        InputError: the model is none of transformers', or takes no token ids.
    """
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's passes everything on
    config, kind = getattr(inner, "config", None), type(inner).__name__
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"example_inputs is None, and {kind} is no model of transformers, whose inputs are known; {_EXPECTED}"
        )
    taken = inspect.signature(inner.forward).parameters
    vocabulary = getattr(_text_config(config), "vocab_size", None)
    if "input_ids" not in taken or not isinstance(vocabulary, int):
        raise InputError(f"example_inputs is None, and {kind} takes no token ids, which could be made; {_EXPECTED}")
    named = {value for each in nested(config) for value in _token_ids(each)}
    ordinary = torch.tensor([number for number in range(vocabulary) if number not in named] or [0], device="cpu")
    generator = torch.Generator().manual_seed(0)
    device = _device(inner)

    def tokens() -> torch.Tensor:
        return ordinary[torch.randint(len(ordinary), (BATCH, LENGTH), generator=generator, device="cpu")].to(device)

    made = ExampleTokens(input_ids=tokens())
    if "attention_mask" in taken:
        made["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long, device=device)
        made["attention_mask"][-1, -PADDING:] = 0
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = tokens()
    return made


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # there are several: the first one that has words
        return next((inner for inner in nested(config) if hasattr(inner, "vocab_size")), config)


def nested(config: Any) -> Iterator[Any]:
    """A configuration and all that are inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from nested(value)


def _token_ids(config: Any) -> Iterator[int]:
    """Ids of special tokens, by the names that the configuration has for them."""
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            values = value if isinstance(value, (list, tuple)) else (value,)
            yield from (each for each in values if isinstance(each, int))


def _device(model: nn.Module) -> torch.device:
    """That of the first weights, which are those of the words; weights that accelerate keeps elsewhere aside."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))
