"""Blocks as tutorials, papers' appendices and research code write them, where that differs from the rest of the zoo."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tests.zoo.common import MLP, Mixture, TopKGate, experts
from tests.zoo.variant import D, E, I, K, hidden_states, variant, weight

WORDS = 50


class NamedExperts(nn.Module):
    SUBJECTS = ("code", "math", "chat", "law")

    def __init__(self) -> None:
        super().__init__()
        self.gate = TopKGate(num_experts=len(self.SUBJECTS))
        self.experts = nn.ModuleDict({name: MLP() for name in self.SUBJECTS})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        for slot in range(K):
            for number, name in enumerate(self.SUBJECTS):
                mine = indices[..., slot].eq(number)
                if not mine.any():
                    continue
                rows = y[mine] + weights[..., slot][mine].unsqueeze(-1) * self.experts[name](x[mine])
                y = y.masked_scatter(mine.unsqueeze(-1), rows)
        return y


class Padded(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.up, self.down = weight(E, D, I), weight(E, I, D)
        self.bias = nn.Parameter(torch.zeros(E, 1, I))

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        order = indices.flatten().argsort(stable=True)
        counts = indices.flatten().bincount(minlength=E).tolist()
        padded = pad_sequence(list(flat[order // K].split(counts)), batch_first=True)
        y = torch.baddbmm(self.bias, padded, self.up).relu().bmm(self.down)
        y = torch.cat([y[e, :count] for e, count in enumerate(counts)])
        back = torch.empty_like(y)
        back[order] = y
        return (back.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


class LoraMixture(nn.Module):
    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base, self.gate = nn.Linear(D, D), TopKGate()
        self.a, self.b = weight(E, rank, D), weight(E, D, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, indices, weights)
        low = torch.einsum("btd,erd->bter", x, self.a)
        return self.base(x) + 2.0 * torch.einsum("bteo,bte->bto", torch.einsum("bter,eor->bteo", low, self.b), gates)


class OneHotGates(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        gates = torch.einsum("btk,btke->bte", weights, F.one_hot(indices, E).to(x.dtype))
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mine = gates[..., e] > 0
            if mine.any():
                out[mine] += expert(x[mine]) * gates[mine][:, e : e + 1]
        return out


class HashTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(D), experts(MLP)
        self.register_buffer("table", torch.arange(WORDS) * 7 % E)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        expert_of, h, out = self.table[words], self.norm(x), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out[expert_of == e] = expert(h[expert_of == e])
        return x + out


class Signs(nn.Module):
    """The signs of two projections say which of four experts: nothing but comparisons and sums makes the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(MLP, 4)
        self.register_buffer("planes", torch.randn(D, 2, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bits, out = (x @ self.planes > 0).long(), torch.zeros_like(x)
        leaf = 2 * bits[..., 0] + bits[..., 1]
        for e, expert in enumerate(self.experts):
            if (leaf == e).sum() > 0:
                out[leaf == e] = expert(x[leaf == e])
        return out


def words_and_states(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states (batch, seq, D) and the tokens' words (batch, seq)."""
    (x,), kwargs = hidden_states(batch, seq, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    return (x, torch.randint(0, WORDS, (batch, seq), generator=generator)), kwargs


class LoadLoss(Mixture):
    """Noisy top-k with importance and load losses by a normal distribution (Shazeer et al.)."""

    def __init__(self) -> None:
        super().__init__(MLP)
        self.noise = nn.Linear(D, E, bias=False)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("std", torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, D)
        clean = logits = self.gate.weight(flat)
        spread = F.softplus(self.noise(flat)) + 1e-2
        if self.training:
            logits = clean + torch.randn_like(clean) * spread
        top, order = logits.topk(K + 1, dim=1)
        weights, indices = top[:, :K].softmax(1), order[:, :K]
        gates = torch.zeros_like(logits).scatter(1, indices, weights)
        load = (gates > 0).sum(0)
        if self.training:
            normal = torch.distributions.Normal(self.mean, self.std)
            inside, outside = ((clean - top[:, [k]]) / spread for k in (K, K - 1))
            load = torch.where(logits > top[:, [K]], normal.cdf(inside), normal.cdf(outside)).sum(0)
        loss = sum(v.float().var() / (v.float().mean() ** 2 + 1e-10) for v in (gates.sum(0), load))
        return self.mix(flat, weights, indices).view(x.shape), loss


class WarmUp(Mixture):
    """Softer logits while a counter that the trainer sets is small."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate.weight(flat)
        if self.step < 100:
            logits = logits / 2
        weights, indices = logits.softmax(-1).topk(K)
        return weights, indices


class CountedWarmUp(WarmUp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return super().forward(x)


class Pixels(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2).reshape(-1, D)
        y = self.mix(tokens, *self.gate(tokens))
        return x + y.view(x.shape[0], -1, D).transpose(1, 2).view_as(x)


def images(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(batch, D, seq, 3)."""
    (x,), kwargs = hidden_states(batch, 3 * seq, dtype, seed)
    return (x.transpose(1, 2).reshape(batch, D, seq, 3),), kwargs


class PixelConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(D, E, 1)
        self.experts = experts(lambda: nn.Sequential(nn.Conv2d(D, I, 1), nn.ReLU(), nn.Conv2d(I, D, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = self.gate(x).softmax(1).topk(K, 1)
        gates = torch.zeros(x.shape[0], E, *x.shape[2:], dtype=x.dtype).scatter(1, indices, values)
        return sum(gates[:, [e]] * expert(x) for e, expert in enumerate(self.experts))


class TiedTransposed(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.w = weight(E, D, I)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, F.gelu(flat[token] @ self.w[e]) @ self.w[e].t() * weights[token, slot, None])
        return out


class TwoLevels(nn.Module):
    def __init__(self, groups: int = 2, members: int = 3) -> None:
        super().__init__()
        self.outer = nn.Linear(D, groups)
        self.inner = nn.ModuleList(nn.Linear(D, members) for _ in range(groups))
        self.experts = nn.ModuleList(experts(MLP, members) for _ in range(groups))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        p, group = self.outer(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for g, gate in enumerate(self.inner):
            rows = (group == g).nonzero().flatten()
            q, chosen = gate(flat[rows]).softmax(-1).max(-1)
            for e, expert in enumerate(self.experts[g]):
                mine = chosen == e
                out[rows[mine]] = expert(flat[rows[mine]]) * (q[mine] * p[rows[mine]]).unsqueeze(-1)
        return out.view_as(x)


class MostProbableFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        p, chosen = self.gate(flat).softmax(-1).max(-1)
        out, capacity = flat.clone(), max(1, len(flat) // E)
        for e, expert in enumerate(self.experts):
            token = (chosen == e).nonzero().squeeze(1)
            if token.numel() > capacity:
                token = token[p[token].topk(capacity).indices]
            out[token] = expert(flat[token]) * p[token].unsqueeze(1)
        return out.view_as(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, E), weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        p, chosen = self.gate(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        parts = torch.nested.as_nested_tensor(list(flat[order].split(chosen.bincount(minlength=E).tolist())))
        y = [(part @ self.up[e]).relu() @ self.down[e] for e, part in enumerate(parts.unbind())]
        return (torch.cat(y)[order.argsort()] * p.unsqueeze(-1)).view_as(x)


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = TopKGate(), weight(E, I, D), weight(E, D, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        y = torch.func.vmap(lambda up, down: F.linear(F.relu(F.linear(x, up)), down), out_dims=-2)(self.up, self.down)
        chosen = y.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, D))
        return (chosen * weights.unsqueeze(-1)).sum(-2)


class OneOddOfMany(Mixture):
    def __init__(self, count: int = 48) -> None:
        super().__init__()
        self.gate = TopKGate(num_experts=count)
        self.experts = experts(MLP, count)
        self.experts[count // 2 + 1].act = nn.SiLU()


VARIANTS = (
    variant("loop_named_experts", NamedExperts, "experts under names in a ModuleDict, masked_scatter"),
    variant(
        "loop_one_hot_gates",
        OneHotGates,
        "weights times one-hot choices, skipped where none is above 0",
        make_expert=MLP,
    ),
    variant("sorted_pad_sequence", Padded, "pad_sequence and baddbmm, bias starts at zero"),
    variant("dense_lora_mixture", LoraMixture, "low-rank experts on one base layer"),
    variant("router_hash_table", HashTable, "the expert of every word in a buffer", inputs=words_and_states),
    variant("router_signs", Signs, "ids made of comparisons"),
    variant("router_load_loss", LoadLoss, "noisy top-k, load loss by torch.distributions"),
    variant("router_warm_up", WarmUp, "condition on a buffer: asked again in every call"),
    variant("shape_pixels", Pixels, "images, every pixel a token", inputs=images),
    variant("tied_transposed", TiedTransposed, "second matrix is the first, transposed"),
    variant("refuse_counted_warm_up", CountedWarmUp, "condition on a buffer after it was written", "refused"),
    variant("refuse_pixel_convolutions", PixelConvolutions, "1x1 convolutions on images", "either", images),
    variant("refuse_two_levels", TwoLevels, "a group, then an expert of it", "either"),
    variant("refuse_most_probable_first", MostProbableFirst, "a full expert keeps the most probable tokens", "refused"),
    variant("refuse_nested", Nested, "nested tensors", "either"),
    variant("refuse_vmap", Vmapped, "torch.func.vmap over the experts", "either"),
    variant("refuse_one_odd_of_many", OneOddOfMany, "one of 48 experts has another activation", "refused"),
)
