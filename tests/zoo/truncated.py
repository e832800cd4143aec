"""Experts with room for a number of tokens, whose lists of tokens are cut: nothing says for every choice whether it was kept."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, experts
from tests.zoo.variant import D, E, K, flat_tokens, variant

Choice = tuple[torch.Tensor, torch.Tensor]
"""Tokens (n,) and the slots (n,) in which they chose an expert."""


class SparseGates(nn.Module):
    """As in makeMoE: a softmax over the k largest logits, minus infinity elsewhere; lists of tokens are cut at the capacity."""

    def __init__(self, factor: float = 0.6) -> None:
        super().__init__()
        self.factor = factor
        self.gate = nn.Linear(D, E)
        self.experts = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        top, indices = logits.topk(K, dim=-1)
        gates = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, indices, top), dim=-1)
        flat_x, flat_gates = x.view(-1, x.size(-1)), gates.view(-1, gates.size(-1))
        capacity = int((x.shape[0] * x.shape[1] * K / E) * self.factor)
        updates = torch.zeros_like(flat_x)
        for i, expert in enumerate(self.experts):
            flat_mask = (indices == i).any(dim=-1).view(-1)
            selected = torch.nonzero(flat_mask).squeeze(-1)
            limited = selected[:capacity] if selected.numel() > capacity else selected
            if limited.numel() > 0:
                output = expert(flat_x[limited])
                updates.index_add_(0, limited, output * flat_gates[limited, i].unsqueeze(1))
        return updates.view(x.shape)


class Cut(Mixture):
    """What differs is how each expert finds its tokens."""

    def __init__(self) -> None:
        super().__init__(MLP)

    def capacity(self, x: torch.Tensor) -> int:
        return max(1, math.ceil(0.7 * K * x.shape[0] / E))

    def chosen(self, index: torch.Tensor, weights: torch.Tensor, capacity: int) -> Iterator[Choice]:
        for number in range(E):
            token, slot = torch.where(index == number)
            yield token[:capacity], slot[:capacity]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        chosen = self.chosen(index, weights, self.capacity(x))
        for expert, (token, slot) in zip(self.experts, chosen, strict=True):
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class CutAtConstant(Cut):
    def capacity(self, x: torch.Tensor) -> int:
        return 4


class FirstChoicesFirst(Cut):
    def chosen(self, index: torch.Tensor, weights: torch.Tensor, capacity: int) -> Iterator[Choice]:
        for marks in F.one_hot(index, E).permute(2, 1, 0):
            slot, token = marks.nonzero(as_tuple=True)
            yield token.narrow(0, 0, min(capacity, token.numel())), slot.narrow(0, 0, min(capacity, token.numel()))


class KeepOfList(Cut):
    def chosen(self, index: torch.Tensor, weights: torch.Tensor, capacity: int) -> Iterator[Choice]:
        for number in range(E):
            token, slot = (index == number).nonzero(as_tuple=True)
            keep = torch.arange(len(token)) < capacity
            yield token[keep], slot[keep]


class KeepOfQueue(Cut):
    def chosen(self, index: torch.Tensor, weights: torch.Tensor, capacity: int) -> Iterator[Choice]:
        for number in range(E):
            here = (index == number).flatten()
            place = here.long().cumsum(0) - 1
            found = torch.nonzero(here & (place <= capacity - 1)).flatten()
            yield found // K, found % K


class BestFirst(Cut):
    def chosen(self, index: torch.Tensor, weights: torch.Tensor, capacity: int) -> Iterator[Choice]:
        for number in range(E):
            token, slot = torch.where(index == number)
            if len(token) > capacity:
                best = weights[token, slot].topk(capacity).indices
                token, slot = token[best], slot[best]
            yield token, slot


class PassesOn(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate.weight(x).softmax(-1).max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            token = (index == number).nonzero(as_tuple=True)[0][: int(0.8 * len(x) / E) + 1]
            out[token] = expert(x[token]) * weights[token].unsqueeze(-1)
        return out


VARIANTS = (
    variant("truncated_sparse_gates", SparseGates, "lists of tokens cut at int(tokens * k / E * factor)"),
    variant("truncated_lists", Cut, "token and slot lists cut at a ceil", inputs=flat_tokens),
    variant("truncated_at_constant", CutAtConstant, "room for four tokens", inputs=flat_tokens),
    variant("truncated_first_choices_first", FirstChoicesFirst, "first choices queue first", inputs=flat_tokens),
    variant("truncated_keep_of_list", KeepOfList, "a boolean for each of the expert's tokens", inputs=flat_tokens),
    variant("truncated_keep_of_queue", KeepOfQueue, "a boolean for every choice, by expert", inputs=flat_tokens),
    variant("refuse_truncated_best_first", BestFirst, "topk decides between equal weights", "refused", flat_tokens),
    variant("truncated_pass_unchanged", PassesOn, "tokens over capacity stay as they are", inputs=flat_tokens),
)
