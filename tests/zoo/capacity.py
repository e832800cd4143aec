"""Blocks with a capacity per expert: one-hot dispatch, padded buffers, dropped tokens, second-choice policies."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, SwiGLU, experts
from tests.zoo.variant import D, E, I, K, variant, weight


def capacity_of(tokens: int, factor: float, top_k: int = 1, minimum: int = 2) -> int:
    return max(minimum, math.ceil(top_k * factor * tokens / E))


class GShardTop1(nn.Module):
    """DeepSpeed-style top-1: combine (S, E, C), dispatch by einsum, experts on chunks, tokens over capacity dropped."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.wg = nn.Linear(D, E, bias=False)
        self.experts = experts(MLP, act=nn.ReLU)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reshaped = x.reshape(-1, D)
        gates = F.softmax(self.wg(reshaped), dim=1)
        capacity = capacity_of(reshaped.shape[0], self.factor)
        indices1 = torch.argmax(gates, dim=1)
        mask1 = F.one_hot(indices1, num_classes=E)
        me, ce = gates.mean(dim=0), mask1.to(gates.dtype).mean(dim=0)
        l_aux = torch.sum(me * ce) * E
        locations1 = torch.cumsum(mask1, dim=0) - 1
        mask1 = mask1 * torch.lt(locations1, capacity)
        locations1_s = torch.sum(locations1 * mask1, dim=1)
        gates = gates * mask1.to(gates.dtype)
        locations1_sc = F.one_hot(locations1_s, num_classes=capacity).to(gates.dtype)
        combine_weights = torch.einsum("se,sc->sec", gates, locations1_sc)
        dispatch_mask = combine_weights.bool().to(x.dtype)
        dispatched = torch.einsum("sec,sm->ecm", dispatch_mask, reshaped)
        chunks = dispatched.chunk(E, dim=0)
        outputs = torch.cat([expert(chunk) for chunk, expert in zip(chunks, self.experts, strict=True)], dim=0)
        combined = torch.einsum("sec,ecm->sm", combine_weights, outputs)
        return combined.reshape(x.shape), l_aux


class GShardTop2(nn.Module):
    """fairscale-style top-2 with capacity 2S/E; the second choice queues behind the first choices."""

    def __init__(self, factor: float = 0.75, stacked: bool = False, noisy_second: bool = False) -> None:
        super().__init__()
        self.factor, self.stacked, self.noisy_second = factor, stacked, noisy_second
        self.wg = nn.Linear(D, E, bias=False)
        if stacked:
            self.wi, self.wo = weight(E, D, I), weight(E, I, D)
        else:
            self.experts = experts(SwiGLU)

    def gating(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = F.softmax(logits, dim=1)
        capacity = capacity_of(gates.shape[0], self.factor, top_k=2)
        mask1 = F.one_hot(gates.argmax(dim=1), num_classes=E)
        second = logits
        if self.noisy_second and self.training:
            uniform = torch.rand_like(logits).clamp_min(1e-6)
            second = logits - torch.log(-torch.log(uniform))
        second = second.masked_fill(mask1.bool(), float("-inf"))
        mask2 = F.one_hot(second.argmax(dim=1), num_classes=E)
        locations1 = torch.cumsum(mask1, dim=0) - 1
        locations2 = torch.cumsum(mask2, dim=0) - 1 + mask1.sum(dim=0, keepdim=True)
        mask1 = mask1 * torch.lt(locations1, capacity)
        mask2 = mask2 * torch.lt(locations2, capacity)
        position1, position2 = (locations1 * mask1).sum(dim=1), (locations2 * mask2).sum(dim=1)
        gates1 = torch.einsum("se,se->s", gates, mask1.to(gates.dtype))
        gates2 = torch.einsum("se,se->s", gates, mask2.to(gates.dtype))
        denominator = torch.clamp(gates1 + gates2, min=torch.finfo(gates.dtype).eps)
        gates1, gates2 = gates1 / denominator, gates2 / denominator
        first = torch.einsum("s,se,sc->sec", gates1, mask1.to(gates), F.one_hot(position1, capacity).to(gates))
        other = torch.einsum("s,se,sc->sec", gates2, mask2.to(gates), F.one_hot(position2, capacity).to(gates))
        combine = first + other
        return combine, combine.bool()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        combine, dispatch = self.gating(self.wg(flat))
        dispatched = torch.einsum("sec,sm->ecm", dispatch.to(flat.dtype), flat)
        if self.stacked:
            hidden = F.gelu(torch.einsum("ecm,emh->ech", dispatched, self.wi))
            outputs = torch.einsum("ech,ehm->ecm", hidden, self.wo)
        else:
            outputs = torch.stack([expert(dispatched[e]) for e, expert in enumerate(self.experts)])
        return torch.einsum("sec,ecm->sm", combine, outputs).reshape(x.shape)


class PaddedBmm(Mixture):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(None)
        self.factor = factor
        self.w1, self.b1 = weight(E, D, I), weight(E, 1, I)
        self.w2, self.b2 = weight(E, I, D), weight(E, 1, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ids = indices.reshape(-1)
        capacity = capacity_of(flat.shape[0], self.factor, top_k=K)
        one_hot = F.one_hot(ids, E)
        position = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1)
        keep = position < capacity
        row = torch.where(keep, ids * capacity + position, torch.full_like(ids, E * capacity))
        buffer = flat.new_zeros(E * capacity + 1, D).index_copy(0, row, flat.repeat_interleave(K, 0))
        padded = buffer[:-1].view(E, capacity, D)
        hidden = F.gelu(torch.baddbmm(self.b1, padded, self.w1))
        out = torch.baddbmm(self.b2, hidden, self.w2).view(-1, D)
        out = torch.cat([out, out.new_zeros(1, D)])[row] * (weights.reshape(-1) * keep).unsqueeze(-1)
        return out.view(-1, K, D).sum(1)


class TutelStyle(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.wg = nn.Linear(D, E, bias=False)
        self.fc1_w, self.fc2_w = weight(E, I, D), weight(E, I, D)
        self.fc1_bias, self.fc2_bias = weight(E, 1, I), weight(E, 1, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = F.softmax(self.wg(flat), dim=1)
        topk_indices = torch.topk(scores, K, dim=1).indices
        indices = [column.view(-1) for column in topk_indices.chunk(K, dim=1)]
        masks = [F.one_hot(index, E) for index in indices]
        gates = [(scores * mask).sum(dim=1) for mask in masks]
        denominator = torch.clamp(sum(gates), min=torch.finfo(scores.dtype).eps)
        gates = [g / denominator for g in gates]
        capacity = capacity_of(flat.shape[0], self.factor, top_k=K)
        taken, locations = 0, []
        for mask in masks:
            location = torch.cumsum(mask, dim=0) - 1 + taken
            locations.append((location * mask).sum(dim=1))
            taken = taken + mask.sum(dim=0, keepdim=True)
        dispatched = flat.new_zeros(E * capacity, D)
        for index, location in zip(indices, locations, strict=True):
            kept = (location < capacity).nonzero().flatten()
            dispatched = dispatched.index_add(0, index[kept] * capacity + location[kept], flat[kept])
        dispatched = dispatched.view(E, capacity, D)
        hidden = F.relu(torch.matmul(dispatched, self.fc1_w.permute(0, 2, 1)) + self.fc1_bias)
        out = (torch.matmul(hidden, self.fc2_w) + self.fc2_bias).view(E * capacity, D)
        y = torch.zeros_like(flat)
        for index, location, gate in zip(indices, locations, gates, strict=True):
            valid = location < capacity
            rows = out[(index * capacity + location).clamp(max=E * capacity - 1)]
            y = y + rows * (gate * valid).unsqueeze(-1)
        return y.view(x.shape)


class SwitchDropJitter(nn.Module):
    """Switch Transformer: top-1, jitter on the router's input in train mode, tokens over capacity pass unchanged."""

    def __init__(self, factor: float = 1.0, jitter: float = 0.1) -> None:
        super().__init__()
        self.factor, self.jitter = factor, jitter
        self.switch = nn.Linear(D, E)
        self.experts = experts(MLP, act=nn.ReLU)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        shape = x.shape
        x = x.reshape(-1, D)
        noisy = x
        if self.training and self.jitter > 0:
            noisy = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        route_prob = torch.softmax(self.switch(noisy), dim=-1)
        route_prob_max, routes = torch.max(route_prob, dim=-1)
        indexes_list = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(E)]
        final_output = x.new_zeros(x.shape)
        capacity = int(self.factor * len(x) / E) + 1
        counts = x.new_tensor([len(indexes_list[i]) for i in range(E)])
        dropped = []
        for i in range(E):
            if len(indexes_list[i]) <= capacity:
                continue
            dropped.append(indexes_list[i][capacity:])
            indexes_list[i] = indexes_list[i][:capacity]
        for i in range(E):
            final_output[indexes_list[i], :] = self.experts[i](x[indexes_list[i], :])
        if dropped:
            rows = torch.cat(dropped)
            final_output[rows, :] = x[rows, :]
        final_output = final_output * route_prob_max.view(-1, 1)
        return final_output.view(shape), counts, len(dropped)


class SwitchDropToZero(nn.Module):
    def __init__(self, capacity: int = 2) -> None:
        super().__init__()
        self.capacity = capacity
        self.classifier = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleDict({f"expert_{i}": MLP(bias=False, act=nn.ReLU) for i in range(E)})

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(self.classifier(hidden_states), dim=-1)
        mask = F.one_hot(probs.argmax(dim=-1), num_classes=E)
        mask = mask * (torch.cumsum(mask, dim=-2) <= self.capacity)
        next_states = torch.zeros_like(hidden_states)
        for idx, expert in enumerate(self.experts.values()):
            token_indices = mask[:, :, idx].bool()
            next_states[token_indices] = expert(hidden_states[token_indices])
        return probs.max(dim=-1).values.unsqueeze(-1) * next_states


class PrioritisedTop2(Mixture):
    def __init__(self, factor: float = 0.8) -> None:
        super().__init__(None)
        self.factor = factor
        self.experts = experts(MLP)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        capacity = capacity_of(flat.shape[0], self.factor, top_k=K)
        importance = weights.max(dim=-1).values.argsort(descending=True)
        one_hot = F.one_hot(indices[importance], E).flatten(0, 1)
        rank = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1).view(-1, K)
        position = torch.empty_like(rank)
        position[importance] = rank
        weights = weights * (position < capacity)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where((indices == e) & (position < capacity))
            out[token] += expert(flat[token]) * weights[token, slot, None]
        return out


class ExpertChoice(nn.Module):
    def __init__(self, tokens_per_expert: int = 2) -> None:
        super().__init__()
        self.factor, self.gate = tokens_per_expert, nn.Linear(D, E, bias=False)
        self.w1, self.w2 = weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = F.softmax(self.gate(flat), dim=-1)
        picked_scores, picked = torch.topk(scores.t(), min(self.factor, flat.shape[0]), dim=-1)
        out = torch.bmm(F.gelu(torch.bmm(flat[picked], self.w1)), self.w2) * picked_scores.unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, picked.flatten(), out.flatten(0, 1)).view(x.shape)


VARIANTS = (
    variant("capacity_gshard_top1", GShardTop1, "one-hot dispatch einsum, chunks, tokens dropped, balance loss"),
    variant("capacity_gshard_top1_roomy", GShardTop1, "the same with room for every token", factor=float(E)),
    variant("capacity_gshard_top2", GShardTop2, "top-2, second choices queue behind, tokens dropped"),
    variant("capacity_gshard_top2_stacked", GShardTop2, "the same with stacked weights", stacked=True),
    variant("capacity_gshard_random_second", GShardTop2, "second choice draws Gumbel noise", noisy_second=True),
    variant("capacity_padded_bmm", PaddedBmm, "padded (E, C, D) buffer by position, baddbmm"),
    variant("capacity_tutel", TutelStyle, "encode and decode with indices, locations and gates per choice"),
    variant(
        "capacity_switch_jitter_passthrough",
        SwitchDropJitter,
        "dropped tokens pass unchanged through host-built lists, jitter, counts as output",
        "either",
    ),
    variant("capacity_switch_drop", SwitchDropToZero, "capacity per sequence by cumsum, dropped tokens are zero"),
    variant("capacity_prioritised", PrioritisedTop2, "confident tokens queue first"),
    variant("capacity_expert_choice", ExpertChoice, "experts choose tokens, stacked weights", "either"),
)
