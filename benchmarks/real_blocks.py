"""One layer of models as large as they really are: transformers' classes with stacked weights, and lists of experts.

Widths, experts and top-k are those of the published configurations; depth and vocabulary are cut, since neither reaches a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RealBlock:
    """A transformers model type and the fields of its configuration that size an MoE layer; ``listed``: a list of experts instead.

    Args:
        kind: model type, or ``list`` for `ListMixture`.
        sizes: fields of the configuration; of a list, hidden_size, intermediate_size, experts and top_k.
    """

    kind: str
    sizes: dict[str, int]
    extra: dict[str, Any] = field(default_factory=dict)


_ALL_MOE = {"first_k_dense_replace": 0}
_DSV3 = {"hidden_size": 7168, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4}

REAL_BLOCKS = {
    "mixtral-8x7b": RealBlock("mixtral", {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}),
    "mixtral-8x22b": RealBlock("mixtral", {"hidden_size": 6144, "intermediate_size": 16384, "num_local_experts": 8}),
    "qwen3-30b": RealBlock(
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "qwen3-235b": RealBlock(
        "qwen3_moe",
        {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "olmoe": RealBlock(
        "olmoe", {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    ),
    "gpt-oss-20b": RealBlock("gpt_oss", {**_OSS, "num_local_experts": 32}),
    "gpt-oss-120b": RealBlock("gpt_oss", {**_OSS, "num_local_experts": 128}),
    "glm-4.5": RealBlock(
        "glm4_moe",
        {"hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_experts_per_tok": 8},
        _ALL_MOE,
    ),
    "deepseek-v2-lite": RealBlock(
        "deepseek_v2",
        {"hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6},
        {**_ALL_MOE, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
    ),
    "deepseek-v3": RealBlock("deepseek_v3", {**_DSV3, "n_routed_experts": 256}, _ALL_MOE),
    "kimi-k2": RealBlock(
        "deepseek_v3", {**_DSV3, "n_routed_experts": 384}, {**_ALL_MOE, "n_group": 1, "topk_group": 1}
    ),
    "mixtral-8x7b-list": RealBlock("list", {"hidden_size": 4096, "intermediate_size": 14336, "experts": 8, "top_k": 2}),
    "deepseek-v3-list": RealBlock("list", {"hidden_size": 7168, "intermediate_size": 2048, "experts": 256, "top_k": 8}),
}


class Expert(nn.Module):
    """SwiGLU on three `nn.Linear`."""

    def __init__(self, model: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(*size, bias=False) for size in ((model, inner), (inner, model), (model, inner))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, D) to (n, D)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class ListMixture(nn.Module):
    """A router and a list of experts, run one after the other on their tokens."""

    def __init__(self, hidden_size: int, intermediate_size: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden_size, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden_size, intermediate_size) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        rows = x.reshape(-1, x.shape[-1])
        weights, ids = self.gate(rows).float().softmax(-1).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view_as(x)


class ListModel(nn.Module):
    """Tokens to hidden states through one `ListMixture`."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, sizes["hidden_size"])
        self.mlp = ListMixture(**sizes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, S) to (B, S, D)."""
        x = self.embedding(input_ids)
        return x + self.mlp(x)  # type: ignore[no-any-return]


_VOCABULARY = 1024


def make(name: str, device: str, shrink: int = 1, layers: int = 1) -> nn.Module:
    """A model of one such layer in bf16, weights random, in eval mode.

    Args:
        name: key of `REAL_BLOCKS`.
        device: where it is made.
        shrink: divides the widths and the number of experts, to try a script where there is no room.
        layers: how many of them; lists have one.
    """
    block = REAL_BLOCKS[name]
    sizes = {key: _shrunk(key, value, shrink) for key, value in block.sizes.items()}
    torch.manual_seed(0)
    with torch.device(device):
        if block.kind == "list":
            return ListModel(**sizes).to(torch.bfloat16).eval()
        from transformers import AutoConfig, AutoModelForCausalLM

        width = sizes["hidden_size"] // 4
        few = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": width, "qk_rope_head_dim": width}
        heads = few if shrink > 1 else {}
        fixed = {"num_hidden_layers": layers, "vocab_size": _VOCABULARY, "eos_token_id": None, "pad_token_id": 0}
        config = AutoConfig.for_model(block.kind, **{**fixed, **sizes, **block.extra, **heads})
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _shrunk(key: str, value: int, shrink: int) -> int:
    if "experts_per_tok" in key or key == "top_k":
        return value
    return max(value // shrink // 64 * 64, 64) if "size" in key else max(value // shrink, min(value, 32))


def tokens_of(device: str, tokens: int) -> Tensor:
    """Random token ids (1, tokens)."""
    return torch.randint(1, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)


def block_of(model: nn.Module) -> nn.Module:
    """The layer's mixture: the module with the router and the experts."""
    return model.mlp if isinstance(model, ListModel) else model.model.layers[0].mlp
