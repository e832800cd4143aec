"""Experts that are called for one token at a time."""

import torch
import torch.nn.functional as F

from tests.zoo.common import MLP, Mixture
from tests.zoo.variant import D, E, I, K, flat_tokens, variant, weight


class Added(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for t in range(x.shape[0]):
            for k in range(K):
                out[t] += weights[t, k] * self.experts[index[t, k]](x[t])
        return out


class Listed(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        rows = []
        for t, ids in enumerate(index.tolist()):
            rows.append(sum(weights[t, k] * self.experts[e](x[t : t + 1]) for k, e in enumerate(ids)))
        return torch.cat(rows)


class Sequences(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for b in range(batch):
            for s in range(length):
                for k in range(K):
                    expert = self.experts[index[b, s, k].item()]
                    out[b, s] = out[b, s] + weights[b, s, k] * expert(x[b, s].unsqueeze(0)).squeeze(0)
        return out


class Zipped(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        rows = [
            torch.stack([w * self.experts[int(e)](row) for w, e in zip(ws, es)]).sum(0)
            for row, ws, es in zip(x, weights, index)
        ]
        return torch.stack(rows)


class StackedOutputs(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        outputs = torch.stack([torch.stack([self.experts[e](row) for e in ids]) for row, ids in zip(x, index)])
        return torch.einsum("tk,tkd->td", weights, outputs)


class OfStacks(Mixture):
    """Stacked weights of which every token picks its experts'."""

    def __init__(self) -> None:
        super().__init__(None)
        self.up, self.down = weight(E, I, D), weight(E, D, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for k in range(K):
                e = index[t, k]
                out[t] += weights[t, k] * (F.silu(x[t] @ self.up[e].T) @ self.down[e].T)
        return out


class Fused(OfStacks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        rows = []
        for row, ws, ids in zip(x, weights, index):
            rows.append(torch.einsum("ki,kdi,k->d", F.gelu(self.up[ids] @ row), self.down[ids], ws))
        return torch.stack(rows)


VARIANTS = (
    variant("one_token_added", Added, "out[t] += w * experts[i](x[t])", inputs=flat_tokens, make_expert=MLP),
    variant("one_token_listed", Listed, "ids by tolist, rows of one in a list", inputs=flat_tokens),
    variant("one_token_sequences", Sequences, "over batch, sequence and slots", make_expert=MLP),
    variant("one_token_zipped", Zipped, "over tokens, weights and ids together", inputs=flat_tokens, make_expert=MLP),
    variant(
        "one_token_stacked_outputs", StackedOutputs, "(T, k, D) outputs first", inputs=flat_tokens, make_expert=MLP
    ),
    variant("one_token_fused", Fused, "one einsum for a token's experts", inputs=flat_tokens),
    variant("one_token_of_stacks", OfStacks, "weights[id] of single tokens", inputs=flat_tokens),
)
