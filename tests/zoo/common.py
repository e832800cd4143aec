"""Expert networks and gates that several models of the zoo share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.variant import D, E, I, K


class MLP(nn.Module):
    """Linear, activation, Linear."""

    def __init__(self, dim: int = D, hidden: int = I, bias: bool = True, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.act = act()
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class SwiGLU(nn.Module):
    """The gated MLP of Llama-like models."""

    def __init__(self, dim: int = D, hidden: int = I, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=bias)
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TopKGate(nn.Module):
    """Softmax over all experts, the k largest, normalised. Returns weights and indices (T, k)."""

    def __init__(self, dim: int = D, num_experts: int = E, top_k: int = K, normalize: bool = True) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Linear(dim, num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = F.softmax(self.weight(x), dim=-1)
        weights, indices = torch.topk(probs, self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, indices


def experts(kind: type[nn.Module] = SwiGLU, count: int = E, **options: object) -> nn.ModuleList:
    """A list of `count` expert networks."""
    return nn.ModuleList(kind(**options) for _ in range(count))
