"""Your own MoE code, as you would write it for the paper: a loop over a list of experts. It is rewritten as it stands.

python examples/handwritten_moe.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.router(tokens).softmax(-1), self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out[token] += weights[token, slot, None] * expert(tokens[token])
        return out.reshape(x.shape)


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoE(width, 48, experts=16, top_k=4) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x


def main() -> None:
    torch.manual_seed(0)
    model, x, target = Model(), torch.randn(8, 20, 32), torch.randn(8, 20, 32)
    reference = copy.deepcopy(model)

    hexa_fx.optimize_(model, x[:2])  # any example will do; other batch sizes need nothing more

    for name, candidate in (("original", reference), ("optimized", model)):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.mse_loss(candidate(x), target)
            loss.backward()
            optimizer.step()
        print(f"{name}: loss after 10 steps {loss.item():.6f}")
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)
    print("same weights after training")
    print(model.report)  # what was rewritten, and what the ten steps ran


if __name__ == "__main__":
    main()
