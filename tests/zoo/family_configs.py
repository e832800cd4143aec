"""Every family of `transformers` that is tried: its config, and what is expected of its blocks.

Sizes are chosen to be pairwise different where the library allows it, so that a mixed-up dimension cannot go unseen.
"""

from dataclasses import dataclass
from typing import Any

VOCAB = 67

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""`torch.nn.functional.grouped_mm` takes no float64 and wants rows of a multiple of 16 bytes: hence the widths."""


@dataclass(frozen=True)
class Family:
    """One family of `transformers`.

    Args:
        model_type: the library's name of the config.
        config: overrides that make it tiny.
        kind: which auto class builds it; `seq2seq` models take `labels` and decode from them.
        blocks: MoE blocks that the tiny model holds.
        implementations: the experts implementations that the class accepts.
        expect: what `hexa_fx.optimize` should do with the blocks; ``either`` says that the family is odd and why.
        why: a sentence on what is special here.
    """

    model_type: str
    config: dict[str, Any]
    kind: str = "causal"
    blocks: int = 2
    implementations: tuple[str, ...] = EXPERTS_IMPLEMENTATIONS
    expect: str = "rewritten"
    why: str = ""


COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOW_RANKS = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
MLA = {**COMMON, **LOW_RANKS, "num_key_value_heads": 4}
ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
TWO_OF_SIX = {**COMMON, **ROUTER_LOSS, "num_local_experts": 6, "num_experts_per_tok": 2}
THREE_OF_SEVEN = {**COMMON, **ROUTER_LOSS, "num_experts": 7, "num_experts_per_tok": 3}
NARROW = {**THREE_OF_SEVEN, "moe_intermediate_size": 12}
THREE_OF_EIGHT = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 12}
BEHIND_A_DENSE_LAYER = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
NLLB_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 20, "sparse_step": 2, "layerdrop": 0.0}
GROUPS = {**THREE_OF_EIGHT, **BEHIND_A_DENSE_LAYER, "n_group": 4, "topk_group": 2}


def _family(model_type: str, *parts: dict[str, Any], **options: Any) -> Family:
    """Parts of a config that families share, and what one has of its own."""
    return Family(model_type, {name: value for part in parts for name, value in part.items()}, **options)


FAMILIES: dict[str, Family] = {
    "mixtral": _family("mixtral", TWO_OF_SIX, {"head_dim": 6}),
    "qwen2_moe": _family(
        "qwen2_moe", NARROW, {"shared_expert_intermediate_size": 14}, why="a shared expert with its own sigmoid gate"
    ),
    "qwen3_moe": _family("qwen3_moe", NARROW, {"head_dim": 6, "norm_topk_prob": True}),
    "qwen3_next": _family(
        "qwen3_next",
        NARROW,
        {"head_dim": 8, "shared_expert_intermediate_size": 14, "layer_types": ["linear_attention", "full_attention"]},
        {"linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "olmoe": _family("olmoe", THREE_OF_SEVEN),
    "flex_olmo": _family("flex_olmo", THREE_OF_SEVEN, {"num_experts": 5}),
    "deepseek_v2": _family(
        "deepseek_v2",
        MLA,
        {"head_dim": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 3},
        {"moe_intermediate_size": 12, "topk_method": "group_limited_greedy", "topk_group": 2},
        {"routed_scaling_factor": 1.5},
        why="group-limited greedy router, shared experts",
    ),
    "deepseek_v3": _family(
        "deepseek_v3", MLA, GROUPS, why="sigmoid router with a bias that only selects, and a dense first layer"
    ),
    "phimoe": _family(
        "phimoe", TWO_OF_SIX, {"router_jitter_noise": 0.01}, why="sparsemixer: two maskings, random in train mode"
    ),
    "gpt_oss": _family(
        "gpt_oss",
        TWO_OF_SIX,
        {"head_dim": 6, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        why="interleaved gate and up, biases, (E, in, out) weights, clamped swiglu",
    ),
    "llama4_text": _family(
        "llama4_text",
        TWO_OF_SIX,
        {"head_dim": 6, "intermediate_size_mlp": 28, "layer_types": ["full_attention"] * 2},
        implementations=("eager",),
        why="every expert on every token, scaled at the input by the router score",
    ),
    "granitemoe": _family("granitemoe", TWO_OF_SIX),
    "jamba": _family(
        "jamba",
        COMMON,
        ROUTER_LOSS,
        {"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2, "attn_layer_period": 2},
        {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
        {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_dt_rank": 3},
        why="dense and MoE layers, mamba and attention layers",
    ),
    "dbrx": _family(
        "dbrx",
        {"d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCAB},
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "output_router_logits": True},
        {"ffn_config": {"hidden_size": 24, "ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 2}},
        implementations=("eager",),
        why="all experts packed side by side in one 2-D weight",
    ),
    "switch_transformers": _family(
        "switch_transformers",
        {"vocab_size": VOCAB, "d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 2},
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "encoder_sparse_step": 2},
        {"decoder_sparse_step": 2, "num_heads": 4, "num_experts": 5, "expert_capacity": 6, "dropout_rate": 0.0},
        {"decoder_start_token_id": 0, "output_router_logits": True, "router_jitter_noise": 0.01},
        kind="seq2seq",
        implementations=("eager",),
        why="top-1 with a capacity that drops tokens; jitter in train mode; an expert's own dropout is 0 here",
    ),
    "nllb_moe": _family(
        "nllb-moe",
        {"vocab_size": VOCAB, "d_model": 24, "max_position_embeddings": 64, "num_experts": 5, "expert_capacity": 6},
        {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in NLLB_STACK.items()},
        {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "moe_token_dropout": 0.0},
        {"decoder_start_token_id": 2, "output_router_logits": True},
        kind="seq2seq",
        implementations=("eager",),
        why="transformers 5 one-hots the top-1 mask, so that only experts 0 and 1 ever run, expert 0 several times a token",
    ),
    "glm4_moe": _family("glm4_moe", COMMON, GROUPS, {"head_dim": 8}),
    "ernie4_5_moe": _family(
        "ernie4_5_moe",
        COMMON,
        ROUTER_LOSS,
        {"num_hidden_layers": 3, "moe_intermediate_size": 12, "moe_num_experts": 7, "moe_k": 3},
        {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "hunyuan_v1_moe": _family(
        "hunyuan_v1_moe",
        COMMON,
        {"head_dim": 6, "num_experts": 6, "moe_topk": 2},
        why="one shared MLP beside the experts",
    ),
    "minimax": _family(
        "minimax",
        TWO_OF_SIX,
        {"head_dim": 6, "block_size": 4, "layer_types": ["full_attention", "linear_attention"]},
    ),
    "lfm2_moe": _family(
        "lfm2_moe",
        COMMON,
        {"num_hidden_layers": 3, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2},
        {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "longcat_flash": _family(
        "longcat_flash",
        {"vocab_size": VOCAB, "hidden_size": 24, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"ffn_hidden_size": 28, "expert_ffn_hidden_size": 10, "n_routed_experts": 6, "zero_expert_num": 3},
        LOW_RANKS,
        {"moe_topk": 3, "head_dim": 4, "routed_scaling_factor": 1.5, "max_position_embeddings": 64},
        implementations=("eager",),
        why="zero experts: identity for ids past the real experts",
    ),
    "aria_text": _family(
        "aria_text",
        COMMON,
        {"head_dim": 6, "intermediate_size": 12, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2},
        why="(E, in, out) weights",
    ),
    "jetmoe": _family(
        "jetmoe",
        COMMON,
        {"kv_channels": 6, "num_key_value_heads": 4, "num_local_experts": 6, "num_experts_per_tok": 2},
        {"output_router_logits": True, "aux_loss_coef": 0.1},
        blocks=4,
        implementations=("eager",),
        expect="either",
        why="MLP experts, and attention whose query and output projections are experts too",
    ),
}
