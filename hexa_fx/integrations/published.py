"""Known models at their published widths, without weights: what `hexa-fx bench --like` builds, a few layers deep.

Sizes are those of the config.json that each model was published with.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.integrations.tiny_models import auto_class, default_config

_QWEN3 = {"num_experts_per_tok": 8, "num_experts": 128, "head_dim": 128, "num_key_value_heads": 4, "vocab_size": 151936}
_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4, "vocab_size": 201088}
_GRANITE = {"intermediate_size": 512, "num_experts_per_tok": 8, "num_key_value_heads": 8, "vocab_size": 49155}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Granite-3.0-1B-A400M": (
        "granitemoe",
        {"hidden_size": 1024, "num_local_experts": 32, "num_attention_heads": 16, **_GRANITE},
    ),
    "Granite-3.0-3B-A800M": (
        "granitemoe",
        {"hidden_size": 1536, "num_local_experts": 40, "num_attention_heads": 24, **_GRANITE},
    ),
    "OLMoE-1B-7B": (
        "olmoe",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
        },
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, **_QWEN3},
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64, **_QWEN3},
    ),
    "Mixtral-8x7B": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_local_experts": 32, **_OSS}),
    "gpt-oss-120b": ("gpt_oss", {"num_local_experts": 128, **_OSS}),
}
"""transformers model type and the fields that size a layer, by name, the smaller ones first."""


def like(name: str, layers: int, dtype: torch.dtype, device: str) -> nn.Module:
    """A model of published widths with random weights and ``layers`` layers, in eval mode.

    Raises:
        InputError: no such model is known, or transformers does not know its type.
    """
    config = _config(name, layers)
    with torch.device(device):
        model: nn.Module = auto_class(config, name).from_config(config, dtype=dtype)
    return model.eval()


def bytes_of(name: str, layers: int, dtype: torch.dtype) -> int:
    """Bytes of such a model's parameters. Raises as `like`."""
    config = _config(name, layers)
    with torch.device("meta"):
        model = auto_class(config, name).from_config(config, dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def vocabulary_of(name: str) -> int:
    """Words that such a model knows. Raises as `like`."""
    return int(_config(name, 1).vocab_size)


def _config(name: str, layers: int) -> Any:
    by_lower = {known.lower(): known for known in PUBLISHED}
    if name.lower() not in by_lower:
        near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.4)
        hint = f" Did you mean {' or '.join(by_lower[each] for each in near)}?" if near else ""
        raise InputError(
            f"--like {name}: the sizes of no such model are known here.{hint} There are {', '.join(PUBLISHED)}"
        )
    model_type, sizes = PUBLISHED[by_lower[name.lower()]]
    config = default_config(model_type)
    for field, value in {**sizes, "num_hidden_layers": layers}.items():
        setattr(config, field, value)
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:layers]
    return config
