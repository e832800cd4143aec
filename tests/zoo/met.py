"""Blocks as people brought them: one expert a token, choices one by one, shared experts in the list, routers that keep things,
several routings over one list of experts, adapters on rows, switches that are off."""

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, experts
from tests.zoo.variant import D, E, I, K, Variant, hidden_states, variant, weight


class Looped(Mixture):
    """A plain gate, and outputs that are added up out of place."""

    def __init__(self) -> None:
        super().__init__(MLP)
        self.gate = nn.Linear(D, E)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(flat).softmax(-1).topk(K, -1)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = self.start(flat)
        for e in range(len(self.experts)):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, self.expert(e, flat[token]) * weights[token, slot, None])
        return out


class OneNormalised(Looped):
    """k = 1, sigmoid scores over their own sum: one, but for tiny scores and in backward."""

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.gate(flat).sigmoid().topk(1, -1)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


class OneByOne(Looped):
    """The largest score, twice; the first is set to zero in between."""

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(flat)
        scores, first = logits.softmax(-1), logits.argmax(-1, keepdim=True)
        second = scores.scatter(-1, first, 0.0).argmax(-1, keepdim=True)
        ids = torch.cat([first, second], -1)
        return logits.sigmoid().gather(-1, ids), ids


class SharedInList(Looped):
    """The last expert of the list works on every token, and the gate knows nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E - 1)

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return self.experts[E - 1](flat)


class SharedAhead(Looped):
    """The first two experts of the list work on every token, and the gate's ids begin behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E - 2)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = self.experts[0](flat) + self.experts[1](flat)
        for number, expert in enumerate(self.experts[2:]):
            token, slot = torch.where(ids == number)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return out


class ScaledBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = weight(E, D, I), weight(E, I, D)
        self.up_bias, self.down_bias = weight(E, I), weight(E, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, ids = self.gate(flat).softmax(-1).topk(K, -1)
        order, counts = ids.view(-1).argsort(stable=True), torch.bincount(ids.view(-1), minlength=E)
        rows = (flat[order // K].float() * weights.view(-1)[order][:, None].float()).to(x.dtype)
        rows = self.products(rows, self.up, counts) + self.up_bias.repeat_interleave(counts, 0)
        rows = self.products(F.silu(rows), self.down, counts) + self.down_bias.repeat_interleave(counts, 0)
        return torch.zeros_like(flat).index_add(0, order // K, rows).view(x.shape)

    def products(self, rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ weights[e] for e, part in enumerate(rows.split(counts.tolist()))])


class NoisyRouter(nn.Module):
    """Draws noise in train mode, keeps its logits and a loss, and gives weights with zeros, but no ids."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        self.logits = F.dropout(logits, 0.1, self.training)
        self.loss = logits.logsumexp(-1).square().mean()
        weights, ids = self.logits.softmax(-1).topk(K, -1)
        return torch.zeros_like(logits).scatter(-1, ids, weights)


class KeptLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = NoisyRouter()
        self.experts = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense, out = self.router(x), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = dense[..., number] > 0
            out[mine] += dense[..., number][mine].unsqueeze(-1) * expert(x[mine])
        return out


class CountedMarks(nn.Module):
    """Counts of marks in a tensor like the scores; every part of the sorted rows in a buffer is the output of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = self.gate(flat).softmax(-1)
        weights, ids = scores.topk(K, -1)
        counts = torch.zeros_like(scores).scatter(1, ids, 1).long().sum(0).tolist()
        order = ids.view(-1).argsort(stable=True)
        rows = Products.apply(F.gelu(Products.apply(flat[order // K], self.up, counts)), self.down, counts)
        rows = rows * weights.view(-1)[order][:, None]
        return torch.zeros_like(flat).index_add(0, order // K, rows).view(x.shape)


class Products(torch.autograd.Function):
    """(rows, in) x (E, in, out) -> (rows, out), each expert's rows into its part of one buffer."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts, out = counts, rows.new_empty(len(rows), weights.shape[-1])
        for expert, (part, into) in enumerate(zip(rows.split(counts), out.split(counts))):
            torch.mm(part, weights[expert], out=into)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights = ctx.saved_tensors
        parts = list(zip(rows.split(ctx.counts), gradient.split(ctx.counts)))
        of_rows = torch.cat([g @ weights[e].T for e, (_, g) in enumerate(parts)])
        return of_rows, torch.stack([r.T @ g for r, g in parts]), None


class Conditioned(Looped):
    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = x + condition
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight, mine = weights.mul(ids == number).sum(-1), (ids == number).any(-1)
            out[mine] += weight[mine].unsqueeze(-1) * expert(x[mine])
        return out


def with_condition(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tokens (batch, seq, D) and a condition (batch, 1, D)."""
    return hidden_states(batch, seq, dtype, seed)[0] + hidden_states(batch, 1, dtype, seed + 1)[0], {}


class Losing(nn.Module):
    """Leaves a loss on itself in train mode, and a plain zero in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def forward(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(flat)
        self.loss = logits.logsumexp(-1).square().mean() if self.training else 0
        return logits.softmax(-1).topk(K, -1)


class LossReadOff(Looped):
    """Returns what the router leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Losing()

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(flat)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return super().forward(x), self.gate.loss


class SliceEach(nn.Module):
    """(E, tokens, D) of the tokens that chose each expert, zeros elsewhere; every expert writes into its slice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = self.gate(flat).softmax(-1)
        scores = torch.zeros_like(scores).scatter(1, scores.topk(K, -1).indices, 1) * scores
        rows = torch.einsum("td,te->etd", flat, scores.bool())
        for number, expert in enumerate(self.experts):
            mine = scores[:, number].bool()
            rows[number, mine] = scores[mine, number].unsqueeze(-1) * expert(rows[number, mine])
        return rows.sum(0).view(x.shape)


class NoisyCapacity(Looped):
    """Noise in train mode, and a least capacity by an ``if`` after it."""

    def __init__(self, by_tensor: bool = False, factor: float = 1.0, noise: float = 0.1) -> None:
        super().__init__()
        self.by_tensor, self.factor, self.noise, self.least = by_tensor, factor, noise, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        logits = self.gate(flat)
        if self.training:
            logits = logits + self.noise * torch.randn_like(logits) * F.softplus(logits.detach())
        weights, ids = logits.softmax(-1).topk(K, -1)
        capacity = math.ceil(self.factor * K * logits.shape[0] / E)
        if self.by_tensor:
            capacity = torch.ceil(torch.tensor(K * len(flat) / E)).long()
        if capacity < self.least:
            capacity = self.least
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            token, slot = token[: int(capacity)], slot[: int(capacity)]
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


class RoundedCapacity(Looped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        logits = self.gate(flat)
        if self.training:
            logits = logits + torch.randn_like(logits) / E
        weights, ids = logits.softmax(-1).topk(K, -1)
        capacity = max(4, int(1.25 * K * len(flat) / E))
        capacity += capacity % 4
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            if len(token) > capacity:
                token, slot = token[:capacity], slot[:capacity]
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


class Switched(Looped):
    profile = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        started = time.perf_counter() if self.profile else None
        out = super().forward(x)
        if started is not None:
            print(time.perf_counter() - started)
        return out, self.gate(x).logsumexp(-1).square().mean() if torch.is_grad_enabled() and x.requires_grad else None


class Adapted(Looped):
    """An adapter of as many features as there are experts, on what all experts are given or give, or one for each."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.adapters = where, experts(MLP, E if where == "each" else 1, hidden=E)

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        adapter = self.adapters[e % len(self.adapters)]
        if self.where == "given":
            return self.experts[e](rows + adapter(rows))
        found = self.experts[e](rows)
        return found + adapter(found if self.where == "given by" else rows)


class SharedFirst(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(D, E, bias=False), nn.ModuleList(nn.Linear(E, D) for _ in range(E))

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.sin()

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        return self.experts[e](self.first(rows))


class Several(Looped):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gates, self.norm = how, nn.ModuleList(nn.Linear(D, E) for _ in range(2)), nn.LayerNorm(D)
        self.towers = nn.ModuleList(MLP() for _ in range(2))

    def mixed(self, flat: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.mix(flat, *scores.softmax(-1).topk(K, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        flat = x.reshape(-1, D)
        if self.how == "tasks":
            return [tower(self.mixed(flat, gate(flat))) for tower, gate in zip(self.towers, self.gates)]
        if self.how == "sum":
            return sum(self.mixed(flat, gate(flat)) for gate in self.gates).view(x.shape)
        if self.how == "modalities":
            parts = zip((x[:, :1].reshape(-1, D), x[:, 1:].reshape(-1, D)), self.gates)
            return torch.cat([self.mixed(part, gate(part)).view(len(x), -1, D) for part, gate in parts], 1)
        for _ in range(2):  # in turn
            flat = flat + self.mixed(self.norm(flat), self.gate(self.norm(flat)))
        return flat.view(x.shape)


class StackedGates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.up, self.down = weight(2, D, E), weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, found = x.reshape(-1, D), []
        for gate in self.gates:
            weights, ids = (flat @ gate).softmax(-1).topk(K, -1)
            out = torch.zeros_like(flat)
            for number in range(E):
                token, slot = torch.where(ids == number)
                rows = F.relu(flat[token] @ self.up[number]) @ self.down[number]
                out.index_add_(0, token, rows * weights[token, slot, None])
            found.append(out)
        return torch.stack(found)


class OfATask(nn.Module):
    """The gate of one task among several in a tensor, and a loss that asks how many experts there are, as in
    github.com/YangSun22/TC-MoA; outputs are added up as exponentials (``log``), as in
    github.com/YeonwooSung/Pytorch_mixture-of-experts."""

    def __init__(self, log: bool) -> None:
        super().__init__()
        self.log, self.gates, self.experts = log, weight(3, D, E), experts(MLP)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, D)
        scores = flat @ self.gates[1]
        weights, ids = scores.softmax(-1).topk(K, -1)
        used = torch.zeros_like(scores).scatter(-1, ids, weights).sum(0)
        loss = used.new_zeros(()) if used.shape[0] == 1 else used.var() / used.mean() ** 2
        order, counts = ids.flatten().argsort(stable=True), torch.bincount(ids.flatten(), minlength=E).tolist()
        parts = flat[order // K].split(counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts)], 0)
        rows = (rows.exp() if self.log else rows) * weights.flatten()[order, None]
        out = torch.zeros_like(flat).index_add(0, order // K, rows)
        return (out.log() if self.log else out).view(x.shape), loss


class MadeOneByOne(Looped):
    """The last expert is still an attribute of the block, too, as in github.com/JiazuoYu/MoE-Adapters4CL."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList()
        for _ in range(E):
            self.adapter = MLP()
            self.experts.append(self.adapter)


VARIANTS: tuple[Variant, ...] = (
    variant("router_one_normalised", OneNormalised, "one expert's weight over its own sum"),
    variant("router_one_by_one", OneByOne, "choices one after the other, which may be the same expert"),
    variant("router_keeps_drawn_logits", KeptLogits, "a router that draws and keeps its logits, without giving ids"),
    variant("around_shared_in_list", SharedInList, "the shared expert is a member of the list"),
    variant("around_shared_ahead", SharedAhead, "shared experts come first in the list"),
    variant(
        "weight_before_in_float32",
        ScaledBefore,
        "tokens scaled in float32, biases by repeat_interleave",
        dtypes=(torch.float32,),
    ),
    variant("loop_slice_each", SliceEach, "every expert reads and writes a slice of one tensor of its own"),
    variant("router_loss_read_off", LossReadOff, "a loss that the router leaves on itself, a plain zero in eval mode"),
    variant(
        "sorted_counted_marks", CountedMarks, "counts of marks in zeros_like(scores), products with out= in a Function"
    ),
    variant(
        "around_conditioned", Conditioned, "a condition (batch, 1, D) is added to the tokens", inputs=with_condition
    ),
    variant("capacity_least_by_if", NoisyCapacity, "a least capacity by an if, behind a router's noise"),
    variant("capacity_least_of_tensors", NoisyCapacity, "the same of tensors that are made of sizes", by_tensor=True),
    variant("capacity_rounded_up", RoundedCapacity, "a capacity rounded up, behind noise, cut where there are more"),
    variant("around_switched_off", Switched, "a clock behind a switch that is off, a result if gradients are wanted"),
    variant("body_adapter_beside", Adapted, "one adapter added to every expert's output", where="beside"),
    variant("body_adapter_given", Adapted, "one adapter added to what experts are given", where="given"),
    variant("body_adapter_given_by", Adapted, "one adapter on what experts give", where="given by"),
    variant("body_adapter_each", Adapted, "an adapter for each expert, in a list of its own", where="each"),
    variant("body_shared_first", SharedFirst, "the first projection is shared by all, as LoRA with one A"),
    variant("loop_gates_of_tasks", Several, "a gate and a tower for each task over one list of experts", how="tasks"),
    variant("loop_gates_summed", Several, "two gates over one list of experts, summed", how="sum"),
    variant("loop_gates_of_modalities", Several, "parts of a sequence with gates of their own", how="modalities"),
    variant("loop_in_turn", Several, "the same experts twice, on what they gave; norms called twice", how="turn"),
    variant("loop_stacked_gates", StackedGates, "a gate for each task in one tensor"),
    variant("sorted_gate_of_task", OfATask, "the gate of a task among several in one tensor", log=False),
    variant("sorted_log_space", OfATask, "outputs are added up as exponentials", log=True),
    variant("loop_made_one_by_one", MadeOneByOne, "the last expert is an attribute of the block, too"),
)
