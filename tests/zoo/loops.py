"""Blocks that loop over experts on the host and pick each one's tokens by a mask or by indices."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, SwiGLU, experts
from tests.zoo.variant import D, E, I, K, flat_tokens, variant, weight


class WherePlusAssign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = experts(SwiGLU)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.view(-1, inputs.shape[-1])
        weights, selected = torch.topk(self.gate(flat), K)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(inputs.dtype)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(flat[batch_idx])
        return results.view_as(inputs)


class OneHotIndexAdd(nn.Module):
    """transformers 4 Mixtral: one-hot mask, experts first, `index_add_`, router logits returned too."""

    def __init__(self, hit_only: bool = False) -> None:
        super().__init__()
        self.hit_only = hit_only
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = experts(SwiGLU)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, K, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = F.one_hot(selected_experts, num_classes=E).permute(2, 1, 0)
        if self.hit_only:
            hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        else:
            hit = range(E)
        for expert_idx in hit:
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch_size, sequence_length, hidden_dim), router_logits


class BooleanMaskTop1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = experts(MLP, bias=False, act=nn.ReLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(self.router(x), dim=-1)
        top_prob, top_expert = probs.max(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = top_expert == e
            if mask.any():
                out[mask] = expert(x[mask])
        return out * top_prob.unsqueeze(-1)


class AnyMaskThroughView(nn.Module):
    """makeMoE style: dense gate matrix with zeros, `(idx == e).any(-1)`, the output written through a flat view."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, I), nn.ReLU(), nn.Linear(I, D), nn.Dropout(0.0)) for _ in range(E)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        top_k_logits, indices = logits.topk(K, dim=-1)
        sparse_logits = torch.full_like(logits, float("-inf")).scatter(-1, indices, top_k_logits)
        gating_output = F.softmax(sparse_logits, dim=-1)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_gating = gating_output.view(-1, gating_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_output = expert(flat_x[flat_mask])
                scores = flat_gating[flat_mask, i].unsqueeze(1)
                final_output[expert_mask] += (expert_output * scores).squeeze(1)
        return final_output


class WriteThroughFlatView(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        flat_out, flat = out.view(-1, D), x.view(-1, D)
        weights, indices = self.gate(flat)
        dense = torch.zeros(flat.shape[0], E, dtype=x.dtype).scatter(1, indices, weights)
        for e in range(E):
            picked = (indices == e).any(-1).nonzero().flatten()
            flat_out[picked] += self.experts[e](flat[picked]) * dense[picked, e].unsqueeze(-1)
        return out


class ScatterAdd(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e in range(E):
            where = torch.nonzero(indices == e)
            token, slot = where[:, 0], where[:, 1]
            y = self.experts[e](flat[token]) * weights[token, slot][:, None]
            out.scatter_add_(0, token[:, None].expand(-1, D), y)
        return out


class StackedGateUp(Mixture):
    """Stacked weights (E, 2I, D) and (E, D, I) as transformers 5 keeps them, gate and up in one."""

    def __init__(self) -> None:
        super().__init__(None)
        self.gate_up_proj, self.down_proj = weight(E, 2 * I, D), weight(E, D, I)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        final = torch.zeros_like(flat)
        mask = F.one_hot(indices, num_classes=E).permute(2, 1, 0)
        for expert_idx in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert_idx = expert_idx[0]
            position, token = torch.where(mask[expert_idx])
            gate, up = F.linear(flat[token], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current = F.linear(F.silu(gate) * up, self.down_proj[expert_idx])
            final.index_add_(0, token, current * weights[token, position, None])
        return final


class StackedInOut(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.w1, self.w2, self.b1, self.b2 = weight(E, D, I), weight(E, I, D), weight(E, I), weight(E, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            h = F.gelu(flat[token] @ self.w1[e] + self.b1[e], approximate="tanh")
            out[token] += (h @ self.w2[e] + self.b2[e]) * weights[token, slot, None]
        return out


def relu_squared_expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(F.linear(x, up)).square(), down)


class FunctionExperts(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.up = nn.ParameterList(weight(I, D) for _ in range(E))
        self.down = nn.ParameterList(weight(D, I) for _ in range(E))

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(indices == e)
            out[token] += relu_squared_expert(flat[token], up, down) * weights[token, slot, None]
        return out


class PackedSideBySide(Mixture):
    """Dbrx: all experts in one (E * I, D) weight, chunked before the loop."""

    def __init__(self) -> None:
        super().__init__(None)
        self.w1, self.v1, self.w2 = weight(E * I, D), weight(E * I, D), weight(E * I, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        w1, v1, w2 = (w.chunk(E, dim=0) for w in (self.w1, self.v1, self.w2))
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            if token.shape[0] == 0:
                continue
            h = F.silu(flat[token] @ w1[e].t()) * (flat[token] @ v1[e].t())
            out.index_add_(0, token, (h @ w2[e]) * weights[token, slot, None])
        return out


class PermutedMaskNumel(Mixture):
    """DeepSeek-V3 of transformers 4.57: float mask, `numel() > 0`, accumulated in the weights' dtype."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.view(-1, D)
        topk_weights, topk_indices = self.gate(flat)
        final = torch.zeros_like(flat, dtype=topk_weights.dtype)
        expert_mask = F.one_hot(topk_indices, num_classes=len(self.experts)).permute(2, 0, 1)
        for expert_idx in range(len(self.experts)):
            token_indices, weight_indices = torch.where(expert_mask[expert_idx])
            if token_indices.numel() > 0:
                expert_weights = topk_weights[token_indices, weight_indices]
                expert_output = self.experts[expert_idx](flat[token_indices])
                final.index_add_(0, token_indices, expert_output * expert_weights.unsqueeze(-1))
        return final.type(hidden_states.dtype).view(*hidden_states.shape)


class DictOfLists(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        assignment: dict[int, list[tuple[int, int]]] = {}
        for token, row in enumerate(indices.tolist()):
            for slot, e in enumerate(row):
                assignment.setdefault(e, []).append((token, slot))
        out = torch.zeros_like(x)
        for e, places in assignment.items():
            token, slot = torch.tensor([t for t, _ in places]), torch.tensor([s for _, s in places])
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class PerSlotGather(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        outputs = torch.zeros(flat.shape[0], K, D, dtype=flat.dtype)
        for e, expert in enumerate(self.experts):
            mask = indices == e
            outputs[mask] = expert(flat[mask.nonzero()[:, 0]])
        return (outputs * weights.unsqueeze(-1)).sum(dim=1)


VARIANTS = (
    variant("loop_where_plus_assign", WherePlusAssign, "torch.where and += on rows (mistral reference style)"),
    variant("loop_onehot_index_add", OneHotIndexAdd, "one-hot mask and index_add_, returns router logits"),
    variant("loop_onehot_hit_only", OneHotIndexAdd, "the same over hit experts only", hit_only=True),
    variant("loop_boolean_mask_top1", BooleanMaskTop1, "top-1, boolean masks, weight after the loop"),
    variant("loop_any_mask_dense_gate", AnyMaskThroughView, "(idx == e).any(-1) with a dense gate matrix"),
    variant("loop_write_through_view", WriteThroughFlatView, "output written through a view of its buffer"),
    variant("loop_scatter_add", ScatterAdd, "scatter_add with an expanded index, biased gated experts", bias=True),
    variant("loop_stacked_gate_up", StackedGateUp, "stacked (E, 2I, D) weights"),
    variant("loop_stacked_in_out_bias", StackedInOut, "stacked (E, D, I) weights with biases"),
    variant("loop_function_experts", FunctionExperts, "experts are a function on parameter lists, relu squared"),
    variant("loop_packed_side_by_side", PackedSideBySide, "all experts in one 2-D weight, chunked"),
    variant("loop_permuted_mask_numel", PermutedMaskNumel, "numel() > 0, accumulation in the weights' dtype"),
    variant("loop_per_slot_buffer", PerSlotGather, "(T, k, D) buffer filled by mask, summed over slots"),
    variant(
        "loop_python_lists",
        DictOfLists,
        "routing as Python lists: .tolist() and new tensors of them",
        "either",
        flat_tokens,
        make_expert=MLP,
        act=nn.SiLU,
    ),
)
