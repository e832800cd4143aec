"""Blocks that differ in how they route and in what else they return; the dispatch is one loop for all."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, SwiGLU, experts
from tests.zoo.variant import D, E, I, K, hidden_states, of_width, variant


class Routed(Mixture):
    """`route(flat)` gives weights and indices (T, k); the rest is the same loop."""

    def __init__(self, num_experts: int = E, top_k: int = K, dim: int = D, hidden: int = I) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.top_k, self.dim = num_experts, top_k, dim
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = experts(SwiGLU, num_experts, dim=dim, hidden=hidden)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = F.softmax(self.router(flat), dim=-1).topk(self.top_k, dim=-1)
        return weights, indices


class GroupLimited(Routed):
    groups, top_groups = 3, 2

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(flat).softmax(dim=-1)
        group_scores = scores.view(flat.shape[0], self.groups, -1).max(dim=-1).values
        group_idx = torch.topk(group_scores, k=self.top_groups, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter_(1, group_idx, 1)
        score_mask = group_mask.unsqueeze(-1).expand(-1, self.groups, self.num_experts // self.groups)
        masked = scores.masked_fill(~score_mask.reshape(flat.shape[0], -1).bool(), 0.0)
        weights, indices = torch.topk(masked, k=self.top_k, dim=-1, sorted=False)
        return weights * 2.5, indices


class BiasCorrected(Routed):
    def __init__(self, start: float = 0.3) -> None:
        super().__init__(num_experts=6)
        self.register_buffer("e_score_correction_bias", start * torch.randn(6))

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(flat).sigmoid()
        biased = scores + self.e_score_correction_bias.unsqueeze(0)
        group_scores = biased.view(-1, 3, 2).topk(2, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=2, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter_(1, group_idx, 1)
        mask = group_mask.unsqueeze(-1).expand(-1, 3, 2).reshape(-1, 6)
        indices = torch.topk(biased.masked_fill(~mask.bool(), float("-inf")), k=self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, indices)
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, indices


class BalancingBias(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("tokens_per_expert", torch.zeros(E, dtype=torch.long))

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(flat).sigmoid()
        indices = (scores + self.bias).topk(self.top_k, dim=-1).indices
        if self.training:
            with torch.no_grad():
                counts = torch.bincount(indices.flatten(), minlength=E)
                self.tokens_per_expert += counts
                self.bias.add_(0.01 * torch.sign(counts.to(self.bias.dtype).mean() - counts))
        return scores.gather(1, indices), indices


class JitterNoise(Routed):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            flat = flat * torch.empty_like(flat).uniform_(0.9, 1.1)
        weights, indices = self.router(flat).softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights, indices


@dataclass
class MoEOutput:
    """What `ZLossRecord` returns, as many code bases do."""

    hidden_states: torch.Tensor
    z_loss: torch.Tensor
    expert_counts: torch.Tensor


class ZLossDict(Routed):
    def forward(self, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, self.dim)
        logits = self.router(flat)
        top, indices = logits.topk(self.top_k, dim=-1)
        out = self.mix(flat, top.softmax(-1), indices).view(x.shape)
        z_loss = torch.logsumexp(logits, dim=-1).pow(2).mean()
        return {"hidden_states": out, "z_loss": z_loss, "counts": torch.bincount(indices.flatten(), minlength=E)}


class ZLossRecord(ZLossDict):
    """The same in a dataclass that torch's pytree does not know."""

    def forward(self, x: torch.Tensor) -> Any:
        record = super().forward(x)
        return MoEOutput(record["hidden_states"], record["z_loss"], record["counts"])


class LossOnSelf(Routed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.dim)
        probs = self.router(flat).softmax(dim=-1)
        weights, indices = probs.topk(self.top_k, dim=-1)
        self.aux_loss = (probs.mean(0) * F.one_hot(indices, E).to(x.dtype).mean((0, 1))).sum()
        return self.mix(flat, weights, indices).view(x.shape)


class Detached(Routed):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = super().route(flat)
        return weights.detach(), indices


class Cosine(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.normalize(flat, dim=-1) @ F.normalize(self.router.weight, dim=-1).t()
        logits = logits * self.temperature.exp().clamp(max=100.0)
        weights, indices = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights, indices


class TopP(Routed):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = super().route(flat)
        return weights.masked_fill(weights < 0.25, 0.0), indices


class SparseMixer(Routed):
    """Two rounds of argmax, the first winner masked out of the second; each weight from its own masked softmax."""

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(flat)
        first = scores.argmax(dim=-1, keepdim=True)
        first_weight = scores.softmax(dim=-1).gather(-1, first)
        rest = scores.scatter(-1, first, float("-inf"))
        second = rest.argmax(dim=-1, keepdim=True)
        second_weight = rest.softmax(dim=-1).gather(-1, second)
        return torch.cat([first_weight, second_weight], dim=-1), torch.cat([first, second], dim=-1)


class PaddingMask(Routed):
    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, self.dim)
        weights, indices = self.route(flat)
        if padding_mask is not None:
            weights = weights * padding_mask.reshape(-1, 1).to(weights.dtype)
        return self.mix(flat, weights, indices).view(x.shape)


class HashRouter(Routed):
    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.dim)
        indices = (input_ids.reshape(-1, 1) * 7 + 3) % E
        return self.mix(flat, torch.ones_like(indices, dtype=x.dtype), indices).view(x.shape)


class GivenRouting(Routed):
    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return self.mix(x, top_k_weights, top_k_index)


class TaskRouter(Routed):
    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        weights, indices = self.route(task.reshape(-1, self.dim))
        return self.mix(x.reshape(-1, self.dim), weights, indices).view(x.shape)


class Float32Router(Routed):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(flat.float(), self.router.weight.float())
        weights, indices = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(flat.dtype), indices


class RandomRouting(Routed):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = self.router(flat).softmax(dim=-1)
        if self.training:
            indices = torch.multinomial(probs.detach(), self.top_k)
        else:
            indices = probs.topk(self.top_k, dim=-1).indices
        return probs.gather(-1, indices), indices


def with_padding(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, _ = hidden_states(batch, seq, dtype, seed)
    return args, {"padding_mask": torch.arange(seq).expand(batch, seq) < max(1, seq - 2)}


def with_ids(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, _ = hidden_states(batch, seq, dtype, seed)
    ids = torch.randint(0, 97, (batch, seq), generator=torch.Generator().manual_seed(seed + batch + seq))
    return (*args, ids), {}


def with_routing(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = hidden_states(batch, seq, dtype, seed)
    scores = torch.randn(batch * seq, E, generator=torch.Generator().manual_seed(seed + batch + seq)).to(dtype)
    weights, indices = scores.softmax(-1).topk(K, dim=-1)
    return (x.flatten(0, 1), indices, weights), {}


def with_task(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = hidden_states(batch, seq, dtype, seed)
    (task,), _ = hidden_states(batch, seq, dtype, seed + 17)
    return (x, task), {}


def ungated_top2(num_experts: int, top_k: int, dim: int = D, hidden: int = I) -> nn.Module:
    block = Routed(num_experts, top_k, dim, hidden)
    block.experts = experts(MLP, num_experts, dim=dim, hidden=hidden)
    return block


VARIANTS = (
    variant("router_softmax", Routed, "softmax then top-k, not normalised"),
    variant("router_group_limited", GroupLimited, "groups first, then experts", num_experts=6),
    variant("router_bias_corrected", BiasCorrected, "a bias buffer chooses, the plain score weighs"),
    variant("router_bias_corrected_from_zero", BiasCorrected, "the bias is zero when optimized, later not", start=0.0),
    variant("router_balancing_bias", BalancingBias, "buffers updated in place in train mode"),
    variant("router_jitter", JitterNoise, "jitter on the router's input in train mode"),
    variant("router_z_loss_dict", ZLossDict, "returns a dict with z-loss and counts"),
    variant("router_z_loss_record", ZLossRecord, "returns a dataclass"),
    variant("router_loss_on_self", LossOnSelf, "leaves the loss on self: a side effect"),
    variant("router_detached", Detached, "no gradient into the router"),
    variant("router_cosine", Cosine, "cosine with temperature"),
    variant("router_threshold", TopP, "small weights zeroed"),
    variant("router_sparse_mixer", SparseMixer, "two maskings (phimoe)"),
    variant("router_padding_mask", PaddingMask, "keyword argument masks padding", inputs=with_padding),
    variant("router_hash", HashRouter, "expert from the token id, no weights", inputs=with_ids),
    variant("router_given", GivenRouting, "routing is an argument", inputs=with_routing),
    variant("router_other_tensor", TaskRouter, "routing from another tensor", inputs=with_task),
    variant("router_float32", Float32Router, "router in float32, weights cast back"),
    variant("router_multinomial", RandomRouting, "experts drawn at random in train mode"),
    variant("shape_k_is_e", Routed, "k = E", num_experts=3, top_k=3),
    variant("shape_one_expert", Routed, "E = 1", "either", num_experts=1, top_k=1),
    variant("shape_two_experts", Routed, "E = 2, k = 1", num_experts=2, top_k=1),
    variant("shape_hidden_is_intermediate", Routed, "D = I", hidden=D),
    variant("shape_intermediate_is_e", Routed, "I = E", num_experts=8, hidden=8),
    variant("shape_all_equal", ungated_top2, "D = I = E", inputs=of_width(6), num_experts=6, top_k=2, dim=6, hidden=6),
    variant("shape_e_is_2i", ungated_top2, "E = D, k = I", inputs=of_width(8), num_experts=8, top_k=4, dim=8, hidden=4),
    variant("shape_many_experts", Routed, "more experts than tokens", num_experts=24, top_k=3),
)
