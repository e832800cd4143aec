"""Small models for tests of what people look at."""

import torch
from torch import nn

INPUT = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1))


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class MixingExpert(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Block(nn.Module):
    """A loop over experts in nn.Linear lists."""

    def __init__(self, width: int = 8, experts: int = 4, expert: type[nn.Module] = Expert) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(expert(width, 12) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.softmax(self.router(tokens), -1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out.view(x.shape)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks or (Block(), Block()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(*blocks: nn.Module) -> Model:
    """In a state that does not depend on other tests."""
    torch.manual_seed(0)
    return Model(*blocks)


def factory() -> tuple[nn.Module, torch.Tensor]:
    """For the command line."""
    return make(), INPUT


def refused() -> tuple[nn.Module, torch.Tensor]:
    """Nothing in it can be rewritten."""
    torch.manual_seed(0)
    return Model(Block(expert=MixingExpert)), INPUT


def failing() -> tuple[nn.Module, torch.Tensor]:
    """Its inputs do not fit."""
    return make(), torch.randn(2, 7, 9)


def not_a_pair() -> nn.Module:
    """A factory that forgets the inputs."""
    return make()
