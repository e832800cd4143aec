"""Submodules that run inside the experts and around them, and what a block holds under several names."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.common import looped
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
        out = self.chosen(x, self.router(x))
        return out + self.down(self.act(self.up(x))) if self.beside else out

    def chosen(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weights, ids = scores.softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(ids == number)
            hidden = self.act(self.ups[number](x[token]))
            out.index_add_(0, token, self.downs[number](hidden) * weights[token, slot, None])
        return out


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
        return self.chosen(x, getattr(self.balanced, "last", scores)), loss


@pytest.mark.parametrize("kind", [Balanced, BalancedCopy])
def test_a_call_whose_writes_are_read_elsewhere_is_opened(kind: type[Balanced]) -> None:
    torch.manual_seed(0)
    block = WithLoss(kind()).double()
    opt = optimized(block)
    assert operators_run(opt, (tokens(7),))
    found = compare(block, opt, (tokens(7),), train=True)
    assert found.within(1e-10), found


CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


class Block(nn.Module):
    """Chooses by one router and weighs by another."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.choice = nn.Parameter(torch.randn(D, E)), nn.Linear(D, E)
        self.bias, self.also = nn.Parameter(torch.randn(E)), nn.Parameter(torch.randn(E))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, I), nn.PReLU(), nn.Linear(I, D)) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (self.choice(x) + self.bias).topk(K, -1).indices
        weights = (x @ self.scores + self.also).softmax(-1).gather(-1, ids)
        return looped(x, weights, ids, self.experts)


def with_one_layer() -> nn.Module:
    block = Block()
    for expert in block.experts:
        expert[2] = block.experts[0][2]
    return block


def with_one_activation() -> nn.Module:
    block = Block()
    for expert in block.experts:
        expert[1] = block.experts[0][1]
    return block


def with_one_bias() -> nn.Module:
    block = Block()
    block.also = block.bias
    return block


def with_one_bias_inside() -> nn.Module:
    """Which the graph knows by its name in a layer that it calls, and the code by another."""
    block = Block()
    block.choice.bias = block.bias
    return block


@pytest.mark.parametrize("first", [with_one_layer, with_one_activation, with_one_bias])
def test_blocks_that_share_otherwise_are_analysed_apart(first: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(first(), Block(), first()).double()
    optimized = hexa_fx.optimize(copy.deepcopy(model), tokens(9), CONFIG)
    assert [block.same_as for block in optimized.report.rewritten] == [None, None, "0"]
    found = compare(model, optimized, (tokens(7),), train=True)
    assert found.within(1e-10), found


@pytest.mark.parametrize(
    ("make", "part"), [(with_one_layer, (2, 2)), (with_one_activation, (2, 1)), (with_one_bias, None)]
)
def test_what_gets_a_part_of_its_own_later(make: Callable[[], nn.Module], part: tuple[int, int] | None) -> None:
    block = make().double()
    optimized = hexa_fx.optimize(copy.deepcopy(block), tokens(9), CONFIG)
    assert operators_run(optimized, (tokens(7),))
    own = nn.Parameter(torch.randn(E, dtype=torch.float64))
    for model in (block, optimized):
        if part is None:
            model.also = copy.deepcopy(own)
        else:
            model.experts[part[0]][part[1]] = copy.deepcopy(model.experts[part[0]][part[1]])
            model.experts[part[0]][part[1]].weight.data += 1
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(optimized, backend="eager")(tokens(7)), block(tokens(7)))
    found = compare(block, optimized, (tokens(7),), train=True)
    assert found.within(1e-10), found


@pytest.mark.parametrize("edited", ["choice.bias", "bias"])
@pytest.mark.parametrize("gone", [False, True])
def test_what_a_layer_and_the_code_around_it_hold(edited: str, gone: bool) -> None:
    block = with_one_bias_inside().double()
    optimized = hexa_fx.optimize(copy.deepcopy(block), tokens(9), CONFIG)
    assert operators_run(optimized, (tokens(7),))
    own = torch.randn(E, dtype=torch.float64)
    for model in (block, optimized):
        path, _, name = edited.rpartition(".")
        setattr(model.get_submodule(path), name, nn.Parameter(own.clone()))
        if gone:
            model.choice.bias = None
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(optimized, backend="eager")(tokens(7)), block(tokens(7)))
    found = compare(block, optimized, (tokens(7),), train=True)
    assert found.within(1e-10), found


def test_parameters_that_are_assigned_one_by_one() -> None:
    """As torch does with ``assign``, though they were one: what an optimizer then does to each is no longer the same."""
    optimized = hexa_fx.optimize(with_one_bias().double(), tokens(9), CONFIG)
    block = with_one_bias().double()
    state = {name: tensor.clone() for name, tensor in optimized.state_dict().items()}
    for model in (block, optimized):
        model.load_state_dict(copy.deepcopy(state), assign=True)
        model.also.data += 1
    found = compare(block, optimized, (tokens(7),), train=True)
    assert found.within(1e-10), found
