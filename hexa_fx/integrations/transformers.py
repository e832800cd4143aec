"""transformers: the experts implementation ``hexa``, and small models by architecture name for the command line."""

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


def register(name: str = "hexa") -> None:
    """Makes ``experts_implementation="hexa"`` known to transformers 5, for the whole process.

    After it ``from_pretrained(..., experts_implementation="hexa")`` and ``model.set_experts_implementation("hexa")`` run the
    experts of every family that has the choice on `hexa::moe_ffn`. Routers, parameter names and checkpoints stay the
    library's; nothing of the choice is written to config.json. Calling it again changes nothing.

    Unlike `hexa_fx.optimize` it needs no example inputs and verifies nothing: it relies on the library's own contract. Families
    without the choice (dbrx, switch_transformers, ...) need `hexa_fx.optimize`.

    Raises:
        InputError: transformers is missing, or older than 5.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise InputError(
            "transformers 5 or later is needed for experts_implementation; pip install 'hexa-fx[hf]', "
            "or call hexa_fx.optimize on the model"
        ) from error
    from hexa_fx.integrations.experts import hexa_experts_forward

    ExpertsInterface.register(name, hexa_experts_forward)


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
