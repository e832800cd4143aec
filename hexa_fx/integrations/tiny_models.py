"""Tiny models of transformers' architectures: for the command line, the examples and the tests.

A configuration is made small by what its fields are called, and so is every configuration inside it, such as that of the text in a
model that sees pictures too. The model is sized on the meta device before anything is allocated.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from hexa_fx.errors import InputError, kind_and_line
from hexa_fx.example_tokens import example_tokens, nested

LARGEST = 50_000_000
"""Parameters. A model that stays larger is refused: a field that sizes it has a name that is not known here."""

LARGEST_WHOLE = 4 * LARGEST
"""The same with all layers and experts: DeepSeek-V3's are 139 million."""

_WIDTHS = {
    **dict.fromkeys("hidden_size d_model n_embd embedding_size hidden_dim dim".split(), 64),
    **dict.fromkeys("intermediate_size ffn_dim d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim".split(), 96),
    **dict.fromkeys("intermediate_size_mlp dense_intermediate_size shared_intermediate_size".split(), 96),
    **dict.fromkeys("prefix_dense_intermediate_size mlp_intermediate_size".split(), 96),
    **dict.fromkeys("moe_intermediate_size expert_ffn_hidden_size routed_expert_intermediate_size".split(), 48),
    **dict.fromkeys("shared_expert_intermediate_size moe_shared_expert_intermediate_size".split(), 48),
    **dict.fromkeys("shared_experts_intermediate_size expert_dim expert_intermediate_size".split(), 48),
    **dict.fromkeys("moe_hidden_size router_hidden_size moe_latent_size share_expert_dim".split(), 48),
    **dict.fromkeys("num_attention_heads n_heads num_heads n_head".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads index_n_heads".split(), 4),
    **dict.fromkeys("num_key_value_heads kv_n_heads".split(), 2),
    **dict.fromkeys("head_dim d_kv kv_channels v_head_dim qk_nope_head_dim index_head_dim swa_head_dim".split(), 16),
    **dict.fromkeys("swa_num_attention_heads swa_num_key_value_heads".split(), 4),
    **dict.fromkeys("text_hidden_size out_hidden_size projector_hidden_size projection_hidden_dim".split(), 64),
    **dict.fromkeys("vision_hidden_size projector_input_dim projector_output_dim vision_output_dim".split(), 64),
    **dict.fromkeys("qk_rope_head_dim rope_head_dim".split(), 8),
    **dict.fromkeys("kv_lora_rank q_lora_rank o_lora_rank".split(), 24),
    **dict.fromkeys(
        "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim".split(), 16
    ),
    **dict.fromkeys("linear_num_key_heads linear_num_value_heads linear_num_heads".split(), 4),
    "mamba_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_dt_rank": 4,
    **dict.fromkeys("vocab_size unpadded_vocab_size vocab_size_per_layer_input".split(), 128),
    **dict.fromkeys("max_position_embeddings max_seq_len n_positions".split(), 128),
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "decoder_dim": 64,
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What makes a configuration cheap to run, by field. Layers, experts and their routing stay as they are."""

_EXPERTS = "num_experts n_routed_experts num_local_experts moe_num_experts".split()

_COUNTS = {
    **dict.fromkeys(_EXPERTS, 8),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts".split(), 2),
    **dict.fromkeys("n_group topk_group num_expert_group".split(), 1),
    **dict.fromkeys("zero_expert_num expert_capacity".split(), 8),
}
"""Experts and their routing."""

_OPEN: dict[str, dict[str, Any]] = {
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"] * 16, "num_experts_per_tok": 2},
    "DiffusionGemmaTextConfig": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 48},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 3},
    "Step3p7TextConfig": {"sliding_window": 16},
    "Qwen4ExpTextConfig": {
        "layer_types": ["linear_attention", "indexed_attention"] * 20,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
}
"""Fields that a default configuration leaves open, or sets so that its own code cannot run; by class."""

_LAYERS = "num_hidden_layers n_layers num_layers n_layer num_decoder_layers encoder_layers decoder_layers depth".split()


def tiny_model(model_type: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A language model of ``model_type`` with random weights, tiny widths, few layers and experts, and a batch for it.

    Raises:
        InputError: transformers is missing, does not know the type, or cannot build or run it that small.
    """
    return built(tiny_config(default_config(model_type)), model_type, seed)


def default_config(model_type: str) -> Any:
    """transformers' default configuration of a type.

    Raises:
        InputError: transformers is missing or does not know the type.
    """
    try:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise InputError("transformers is not installed; pip install '.[hf]'") from error
    known = list(CONFIG_MAPPING.keys())
    if model_type not in known:
        near = difflib.get_close_matches(str(model_type), known, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"transformers knows no model type {model_type!r}.{hint}")
    return AutoConfig.for_model(model_type)


def tiny_config(config: Any, whole: bool = False) -> Any:
    """The configuration with tiny widths, changed in place; with few layers and experts too, unless it is to stay ``whole``."""
    for inner in nested(config):
        _narrow(inner)
        if not whole:
            _shorten(inner)
    return config


def built(config: Any, name: str, seed: int = 0, largest: int = LARGEST) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of the configuration in eval mode, and a batch of token ids for it.

    Raises:
        InputError: transformers has no language model for it, it does not build, or has more than ``largest`` parameters;
            ``name`` says of what.
    """
    auto = auto_class(config, name)
    _check_counts(config, name)
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
        if size > largest:
            raise InputError(
                f"{name!r} keeps {size / 1e6:.0f} million parameters with tiny widths; write a factory for it"
            )
        torch.manual_seed(seed)
        model: nn.Module = auto.from_config(config)
    except InputError:
        raise
    except Exception as error:  # of the library's own code
        raise InputError(
            f"{name!r} does not build with tiny widths ({kind_and_line(error)}); write a factory for it"
        ) from error
    return model.eval(), example_tokens(model)


def _check_counts(config: Any, name: str) -> None:
    """Raises `InputError` where layers or experts are so many that their modules alone would take minutes."""
    for inner in nested(config):
        known = _fields(inner)
        for key, most in {**dict.fromkeys(_LAYERS, 1000), **dict.fromkeys(_EXPERTS, 10_000)}.items():
            if _whole_number(known.get(key)) and known[key] > most:
                raise InputError(f"{name!r} has {key} {known[key]}; at most {most} are built here: give it fewer")


_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForTokenClassification",
    "AutoModel",
)
"""Classes that build a model from a configuration, those of language first."""


def auto_class(config: Any, name: str) -> Any:
    """The class of transformers that builds a model of the configuration.

    Raises:
        InputError: there is none for language; ``name`` says of what.
    """
    import transformers

    known = (getattr(transformers, auto, None) for auto in _AUTO)
    found = next((auto for auto in known if auto is not None and type(config) in auto._model_mapping), None)
    if found is None:
        raise InputError(
            f"{name!r} is a part of other models, for which transformers has no class of its own; name the whole one"
        )
    return found


def _fields(config: Any) -> dict[str, Any]:
    """Its values by the names that it stores them under."""
    return {key: value for key, value in vars(config).items() if not key.startswith("_")}


def _narrow(config: Any) -> None:
    for key, value in _OPEN.get(type(config).__name__, {}).items():
        if not getattr(config, key, None) or len({*getattr(config, "layer_types", ())}) == 1:
            setattr(config, key, value)
    known = _fields(config)
    for key, value in _WIDTHS.items():
        if _whole_number(known.get(key)) and known[key]:  # zero is for what a model does not have
            setattr(config, key, value)
        elif isinstance(known.get(key), list) and all(map(_whole_number, known[key])):
            setattr(config, key, [value] * len(known[key]))
    heads = known.get("num_attention_heads")
    if known.get("num_key_value_heads") == heads:  # each head has its own, and has to keep it
        config.num_key_value_heads = _WIDTHS["num_attention_heads"]
    if known.get("qk_rope_head_dim"):
        _keep_rotary(config, known)
    sections = getattr(config, "ignore_keys_at_rope_validation", ())
    if "mrope_section" in sections and "mrope_interleaved" not in sections:
        _keep_sections(config)


def _keep_rotary(config: Any, known: dict[str, Any]) -> None:
    """Latent attention turns ``qk_rope_head_dim`` channels, whether or not ``head_dim`` and its factor say so too."""
    if "qk_head_dim" in known:
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if "head_dim" in known:
        config.head_dim = config.qk_rope_head_dim * (known["head_dim"] // known["qk_rope_head_dim"])


def _keep_sections(config: Any) -> None:
    """Time, height and width share the channels that positions turn; the code has widths of its own if the field is missing."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(head * config.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    third = turned // 3
    config.rope_parameters["mrope_section"] = [third, third, turned - 2 * third]


def _shorten(config: Any) -> None:
    known = _fields(config)
    for key, value in _COUNTS.items():
        if _whole_number(known.get(key)):
            setattr(config, key, min(value, known[key]))
    kept = _layers_of_all_kinds(known)
    for key in _LAYERS:
        if _whole_number(known.get(key)):
            setattr(config, key, min(kept, known[key]))
            for name in _per_layer(known, known[key]):
                setattr(config, name, known[name][:kept])


_FIRST = ("_layer_offset", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Ends of the names of fields that say how many layers come before the first of a kind."""

_EVERY = ("_sparse_step",)
"""Ends of the names of fields that say how many layers there are to one with experts."""


def _layers_of_all_kinds(known: dict[str, Any]) -> int:
    """How many of the first layers hold one of every kind; at least two."""
    offsets = [value + 1 for key, value in known.items() if key.endswith(_FIRST) and _whole_number(value)]
    offsets += [value for key, value in known.items() if key.endswith(_EVERY) and _whole_number(value)]
    kinds = [known[name] for key in _LAYERS if _whole_number(known.get(key)) for name in _per_layer(known, known[key])]
    found: list[int] = [2, *offsets, *(max(map(kind.index, kind)) + 1 for kind in kinds)]
    return max(found)


def _per_layer(known: dict[str, Any], layers: int) -> list[str]:
    return [
        n for n, v in known.items() if isinstance(v, list) and len(v) == layers and all(isinstance(i, str) for i in v)
    ]


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
