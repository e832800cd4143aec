"""Small transformers models by architecture name, for the command line and the demonstration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hexa_fx.errors import InputError

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(model_type: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A causal language model of ``model_type`` with random weights and tiny widths, and a batch for it.

    Raises:
        InputError: transformers is missing, does not know the type, or cannot build it that small.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InputError("transformers is not installed; pip install 'hexa-fx[hf]'") from error
    torch.manual_seed(seed)
    try:
        known = set(AutoConfig.for_model(model_type).to_dict())
        config: Any = AutoConfig.for_model(model_type, **{key: value for key, value in _TINY.items() if key in known})
        model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{model_type!r}: {error}; give a causal language model type, or MODULE:FACTORY") from error
    return model.eval(), {"input_ids": torch.randint(0, config.vocab_size, (2, 16))}
