"""What a block holds under several names: as long as that is so, and in the blocks where it is."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from tests.zoo.common import looped
from tests.zoo.compare import compare, operators_run

D, E, K, I = 6, 4, 2, 8  # noqa: E741
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


def tokens(number: int) -> torch.Tensor:
    return torch.randn(number, D, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


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
