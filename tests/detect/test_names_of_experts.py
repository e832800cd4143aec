"""Experts under all kinds of names: what they are called does not matter, as long as they are alike."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten, tokens
from tests.zoo.common import MLP
from tests.zoo.variant import D, E, I

Experts = Mapping[str, nn.Module]


class Named(Mixture):
    """The zoo's loop over experts that are attributes of the block, each module under a name of its own."""

    def __init__(self, modules: Experts) -> None:
        super().__init__()
        del self.experts
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.each()):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)

    def each(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        yield from (module for name, module in self.named_children() if name != "gate")


class InDict(Named):
    def __init__(self, modules: Experts) -> None:
        super().__init__({"adapters": nn.ModuleDict(modules)})

    def each(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        yield from self.adapters.values()


class InPieces(Named):
    """The layers of all experts are attributes: ``w1_1``, ``w2_1``, ``w1_2``, ..."""

    def __init__(self) -> None:
        layers = {f"w1_{n}": nn.Linear(D, I) for n in range(1, E + 1)}
        super().__init__(layers | {f"w2_{n}": nn.Linear(I, D) for n in range(1, E + 1)})

    def each(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        for n in range(1, E + 1):
            up, down = getattr(self, f"w1_{n}"), getattr(self, f"w2_{n}")
            yield lambda x, up=up, down=down: down(up(x).relu())


def _linear() -> nn.Module:
    return nn.Linear(D, D, bias=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Named({f"branch_{n}_ffn": MLP() for n in range(E)}),
        lambda: Named({f"branch{n + 1}": _linear() for n in range(E)}),
        lambda: InDict({f"default_{n}": MLP() for n in range(E)}),
        lambda: InDict({f"default_{n}": _linear() for n in range(E)}),
        lambda: InDict({f"of{'abcdefgh'[n]}": _linear() for n in range(E)}),
        InPieces,
    ],
    ids=["branch_0_ffn", "branch1", "default_0", "default_0 of one matrix", "one matrix by name", "w1_1"],
)
def test_rewritten_and_equal(make: Callable[[], nn.Module]) -> None:
    optimized = rewritten(make().double(), tokens(2, 7), tokens(3, 5), tokens(1, 1))
    assert optimized.report.blocks[0].num_experts == E


def test_numbered_layers_of_an_ordinary_network_are_no_experts() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = (_linear() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc3(self.fc2(self.fc1(x))).argmax(-1)

    assert not hexa_fx.explain(Classifier().double(), tokens(2, 7)).blocks
