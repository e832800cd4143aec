"""Expert networks, gates and the loop that several models of the zoo share."""

from collections.abc import Callable, Iterable
from typing import Any

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


def experts(kind: Callable[..., nn.Module] = SwiGLU, count: int = E, **options: object) -> nn.ModuleList:
    """A list of `count` expert networks."""
    return nn.ModuleList(kind(**options) for _ in range(count))


def looped(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Iterable[Callable[..., torch.Tensor]]
) -> torch.Tensor:
    """(T, D) of tokens (T, D), which weights and ids (T, k) route: for tests."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, slot = torch.where(ids == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


class Mixture(nn.Module):
    """A gate, experts, and a loop that takes each expert's tokens by `where`. Blocks of the zoo change one step of it.

    Args:
        make_expert: of the list, or None for a block that keeps its experts otherwise.
        normalize: the gate's weights.
        options: of every expert.
    """

    def __init__(
        self, make_expert: Callable[..., nn.Module] | None = SwiGLU, normalize: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.gate = TopKGate(normalize=normalize)
        if make_expert is not None:
            self.experts = experts(make_expert, **options)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids (T, k) of tokens (T, D)."""
        return self.gate(flat)

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        """What outputs are added onto."""
        return torch.zeros_like(flat)

    def count(self) -> int:
        return len(self.experts)

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        """The output of expert `e`."""
        return self.experts[e](rows)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(T, D) of tokens (T, D), which are routed already."""
        out = self.start(flat)
        for e in range(self.count()):
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, self.expert(e, flat[token]) * weights[token, slot, None])
        return out

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        return self.mix(flat, *self.route(flat)).view(x.shape)


class Looped(Mixture):
    """The same with a plain router: for tests, which have experts of their own, in a list or as `expert` takes them."""

    def __init__(
        self,
        make_expert: Callable[[], nn.Module] | None,
        dim: int,
        num_experts: int = 4,
        top_k: int = 2,
        bias: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.top_k, self.router = num_experts, top_k, nn.Linear(dim, num_experts, bias=bias)
        if make_expert is not None:
            self.experts = nn.ModuleList(make_expert() for _ in range(num_experts))

    def count(self) -> int:
        return self.num_experts

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = self.router(flat).softmax(-1).topk(self.top_k)
        return weights, indices
