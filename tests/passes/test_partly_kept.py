"""Submodules that run inside the experts and around them: their code counts as the block's, though some calls stay calls."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.compare import compare, operators_run

D, E, K, I = 6, 4, 2, 8  # noqa: E741


class Shared(nn.Module):
    """Experts and a dense layer beside them have one activation."""

    def __init__(self, act: nn.Module, beside: bool = True) -> None:
        super().__init__()
        self.router, self.act, self.beside = nn.Linear(D, E), act, beside
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*size) for _ in range(E)) for size in ((D, I), (I, D)))
        self.up, self.down = nn.Linear(D, I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(ids == number)
            hidden = self.act(self.ups[number](x[token]))
            out.index_add_(0, token, self.downs[number](hidden) * weights[token, slot, None])
        return out + self.down(self.act(self.up(x))) if self.beside else out


class SharedStacks(Shared):
    """Two stacks of weights; how many tokens the busiest expert has is compared with none."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__(act)
        del self.ups, self.downs
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, I)), nn.Parameter(torch.randn(E, I, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        ordered, order = ids.flatten().sort(stable=True)
        counts = nn.functional.one_hot(ordered, E).sum(0)
        if (most := counts.max().item()) == 0:
            return torch.zeros_like(x)
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[ordered]
        rows = x.new_zeros(E, most, D)
        rows[ordered, place] = x[order // K]
        y = (self.act(rows @ self.w1) @ self.w2)[ordered, place] * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // K, y) + self.down(self.act(self.up(x)))


class Rare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.numel() and (x[0, :3] == 7.25).all() else x.relu()


def optimized(block: nn.Module) -> nn.Module:
    return hexa_fx.optimize(copy.deepcopy(block), tokens(9))


def tokens(number: int) -> torch.Tensor:
    return torch.randn(number, D, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("kind", [Shared, SharedStacks])
@pytest.mark.parametrize(
    "change",
    [
        lambda act: setattr(act, "approximate", "tanh"),
        lambda act: setattr(act, "forward", torch.tanh),
        lambda act: act.register_forward_hook(lambda module, given, result: 2 * result),
    ],
    ids=["setting", "forward", "hook"],
)
def test_what_changes_in_a_shared_activation(
    kind: Callable[[nn.Module], nn.Module], change: Callable[[nn.Module], object]
) -> None:
    torch.manual_seed(0)
    block = kind(nn.GELU()).double()
    opt = optimized(block)
    assert operators_run(opt, (tokens(7),))
    for model in (block, opt):
        change(model.act)
    found = compare(block, opt, (tokens(7),), train=True)
    assert found.within(1e-10), found


@pytest.mark.parametrize("beside", [False, True])
def test_what_only_the_code_itself_would_do(beside: bool) -> None:
    report = hexa_fx.explain(Shared(Rare(), beside).double(), tokens(9))
    assert "a host decision (if, while, assert, item()) on what the experts computed" in report.blocks[0].reason


class Balanced(nn.Module):
    """Shifts the scores that it is given, and gives how uneven they are."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(E))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return self.shifted(scores).softmax(-1).square().sum()

    def shifted(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.add_(self.bias)


class BalancedCopy(Balanced):
    """Leaves what it was given, and keeps what it made of it."""

    def shifted(self, scores: torch.Tensor) -> torch.Tensor:
        self.last = scores.clone().add_(self.bias)
        return self.last


class WithLoss(Shared):
    def __init__(self, balanced: nn.Module) -> None:
        super().__init__(nn.GELU())
        self.balanced = balanced

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x)
        loss = self.balanced(scores)
        weights, ids = getattr(self.balanced, "last", scores).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(ids == number)
            hidden = self.act(self.ups[number](x[token]))
            out.index_add_(0, token, self.downs[number](hidden) * weights[token, slot, None])
        return out, loss


@pytest.mark.parametrize("kind", [Balanced, BalancedCopy])
def test_a_call_whose_writes_are_read_elsewhere_is_opened(kind: type[Balanced]) -> None:
    torch.manual_seed(0)
    block = WithLoss(kind()).double()
    opt = optimized(block)
    assert operators_run(opt, (tokens(7),))
    found = compare(block, opt, (tokens(7),), train=True)
    assert found.within(1e-10), found
