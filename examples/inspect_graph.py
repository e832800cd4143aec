"""Look at what was found, what it became, and why a block was left alone.

python examples/inspect_graph.py
"""

from __future__ import annotations

import torch
from torch import nn

import hexa_fx


class Block(nn.Module):
    """Four experts with stacked weights; ``mean`` centres the experts' outputs over tokens, which only looks like MoE."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean, self.router = mean, nn.Linear(8, 4, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 12, 8) / 3), nn.Parameter(torch.randn(4, 8, 12) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in range(4):
            token, slot = torch.where(chosen == number)
            y = torch.relu(x[token] @ self.w1[number].T) @ self.w2[number].T
            if self.mean:
                y = y - y.mean(0)
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(mean=False), Block(mean=True))
    x = torch.randn(10, 8)

    print("# What would be done, without doing it")
    print(hexa_fx.explain(model, x))

    optimized = hexa_fx.optimize(model, x)
    graphs = optimized.graphs["0"]
    print("\n# The first block, rewritten: one operator instead of the loop")
    print(graphs.rewritten.code)
    print("# That operator's forward and backward, in the expert-specific operators")
    print(graphs.lowered.forward.code)
    print(graphs.lowered.backward.code)

    (refused,) = optimized.report.refused
    print(f"# The second block runs its own code: {refused.reason}\n# at {refused.location}")
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
    print(f"# The first block's {optimized.report.blocks[0].calls}")


if __name__ == "__main__":
    main()
