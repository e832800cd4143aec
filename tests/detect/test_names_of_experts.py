"""Experts under all kinds of names, as long as they are alike; one that is built otherwise than the others is named."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.passes.detect.explain import odd_expert
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten, tokens
from tests.zoo.common import MLP, looped
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
        return looped(flat, *self.gate(flat), self.each()).view(x.shape)

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


SAME = "; only experts that compute the same are rewritten"


class Expert(nn.Module):
    def __init__(self, act: nn.Module, scale: float = 1.0, number: int = 0) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, I), act, nn.Linear(I, D)
        self.scale, self.number = scale, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)) * self.scale)


class Routed(Mixture):
    """The last expert is hardly ever chosen, and those without tokens do not run."""

    def __init__(self, odd: Expert, idle: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([*(Expert(nn.GELU(), number=n) for n in range(E - 1)), odd])
        # keeps the router from choosing it, and a test from making the router do so
        self.register_buffer("bias", torch.tensor([0.0] * (E - 1) + [-3.0 * idle]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = (0.1 * self.gate.weight(flat) + self.bias).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number in index.unique().tolist():
            token, slot = torch.where(index == number)
            out.index_add_(0, token, self.experts[number](flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (Expert(nn.ReLU()), "experts.4.act is ReLU, where other experts have GELU"),
        (Expert(nn.GELU("tanh")), "experts.4.act.approximate is 'tanh', where other experts have 'none'"),
        (Expert(nn.GELU(), 1.5), "experts.4.scale is 1.5, where other experts have 1.0"),
    ],
    ids=["class", "setting", "number"],
)
def test_it_is_named(odd: Expert, said: str, idle: bool) -> None:
    report = hexa_fx.explain(Routed(odd, idle).double(), tokens(2, 7))
    assert report.blocks[0].reason.startswith(said + SAME), report.blocks[0].reason


def test_what_only_one_has_or_has_not() -> None:
    block = Mixture()
    block.experts[1].forward = torch.relu
    assert odd_expert(block).startswith("experts.1.forward is")
    assert "where other experts have nothing" in odd_expert(block)
    for number in (0, 2, 3, 4):
        block.experts[number].scale = 2.0
    del block.experts[1].forward
    assert odd_expert(block).startswith("there is no experts.1.scale, but 2.0 in other experts")


class EachItsOwn(Routed):
    """Activations alternate."""

    def __init__(self) -> None:
        super().__init__(Expert(nn.GELU()), idle=False)
        for number, expert in enumerate(self.experts):
            expert.act = (nn.GELU, nn.ReLU, nn.SiLU)[number % 3]()


def test_activations_of_several_kinds() -> None:
    (block,) = hexa_fx.explain(EachItsOwn().double(), tokens(2, 7)).blocks
    assert block.reason.startswith("experts.1.act is ReLU, where experts.0 has GELU" + SAME), block.reason
