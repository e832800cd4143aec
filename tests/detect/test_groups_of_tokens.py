"""What code does to tokens: routes them by sequence or image, adds up what experts give, and returns that in something."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.common import TopKGate, experts
from tests.zoo.compare import perturb
from tests.zoo.variant import D, E, I, K


class TopOfSequence(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x.mean(1))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(index == number)
            if len(row):
                out[row] = out[row] + expert(x[row]) * weights[row, slot, None, None]
        return out


class FirstToken(Mixture):
    """The first token of a sequence decides, one expert, written by a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.gate.weight(x[:, :1].sum(1)).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = index == number
            out[chosen] = expert(x[chosen])
        return out * weight[:, None, None]


class Gathered(TopOfSequence):
    def __init__(self) -> None:
        super().__init__()
        self.experts = None
        self.up, self.down = nn.Parameter(torch.randn(E, D, I)), nn.Parameter(torch.randn(E, I, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x.mean(1))
        each = (torch.bmm(torch.bmm(x, self.up[i]).relu(), self.down[i]) for i in index.unbind(1))
        return sum(y * w[:, None, None] for y, w in zip(each, weights.unbind(1)))


class GateMatrix(Mixture):
    """Every expert runs on every token; a matrix with a row for each sequence is zero where it does not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x.mean(1))
        gates = x.new_zeros(len(x), E).scatter(1, index, weights)
        return sum(gates[:, number, None, None] * expert(x) for number, expert in enumerate(self.experts))


class WeightOfSequence(Mixture):
    """Tokens choose; their sequence weighs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index, gates = self.gate.weight(x).argmax(-1), self.gate.weight(x.mean(1)).sigmoid()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            out[row, place] = expert(x[row, place]) * gates[row, number, None]
        return out


class WeightOfToken(Mixture):
    """The sequence chooses; its tokens weigh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index, out = self.gate.weight(x.mean(1)).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = index == number
            out[chosen] = expert(x[chosen])
        return out * self.gate.weight(x)[..., :1].sigmoid()


class MixesSequence(TopOfSequence):
    """Experts look at all tokens of a sequence: no function of a row."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.register_forward_pre_hook(lambda _, args: args[0] - args[0].mean(1, keepdim=True))


@pytest.mark.parametrize("kind", [TopOfSequence, FirstToken, Gathered, GateMatrix, WeightOfSequence, WeightOfToken])
def test_rewritten_and_equal(kind: type[nn.Module]) -> None:
    block = kind().double()
    optimized = rewritten(block, tokens(2, 7))
    (shown,) = optimized.graphs.values()
    used = shown.kernels(90)
    assert {use.direction for use in used} == {"forward", "backward"}
    assert not any(use.fallback for use in used), "sizes of modules that run twice are told apart"
    perturb(block, optimized)
    agree(block, optimized, *(tokens(*size) for size in ((3, 5), (1, 1), (1, 6), (5, 1), (0, 4), (4, 0))))


@pytest.mark.parametrize("size", [(1, 7), (6, 1), (E, E), (7, K)])
def test_examples_that_tell_sequences_and_tokens_apart_badly(size: tuple[int, int]) -> None:
    rewritten(TopOfSequence().double(), tokens(*size), tokens(3, 5))


def test_experts_that_mix_the_tokens_of_a_sequence_stay() -> None:
    report = hexa_fx.explain(MixesSequence().double(), tokens(2, 7))
    assert not report.rewritten
    assert "hexa_fx itself failed" not in report.blocks[0].reason


class Modulated(nn.Module):
    """An expert whose hidden channels are scaled and shifted by what its tokens are conditioned on, as by a step of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.modulation, self.down = nn.Linear(D, I), nn.Linear(D, 2 * I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulation(condition).chunk(2, -1)
        return self.down(nn.functional.silu(self.up(x) * (1 + scale) + shift))


class OnSequences(nn.Module):
    """All tokens of a sequence are given the same condition."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(), experts(Modulated)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        flat, each = x.reshape(-1, D), condition[:, None].expand_as(x).reshape(-1, D)
        weights, index = self.gate(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, expert(flat[token], each[token]) * weights[token, slot, None])
        return out.view(x.shape)


def test_conditions_of_whole_sequences() -> None:
    rewritten(OnSequences().double(), *((tokens(*size), tokens(size[0])) for size in ((2, 7), (3, 5), (1, 1), (1, 9))))


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64)


class InSegments(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        order = index.flatten().argsort(stable=True)
        parts = x[order // K].split(torch.bincount(index.flatten(), minlength=E).tolist())
        given = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        sorted_back = (given * weights.flatten()[order, None])[order.argsort()]
        return torch.segment_reduce(sorted_back, "sum", lengths=torch.full((len(x),), K))


def test_results_that_are_added_up_in_segments() -> None:
    rewritten(InSegments().double(), _tokens(13), _tokens(13), _tokens(16), _tokens(1))


class Object:
    def __init__(self, out: torch.Tensor) -> None:
        self.out = out


class InAnObject(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return Object(super().forward(x))


class BesideAnObject(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), Object(x)


@dataclasses.dataclass
class Output:
    out: torch.Tensor


class InMore(Mixture):
    """Sets more on a result than its class declares."""

    def forward(self, x: torch.Tensor) -> Any:
        result = Output(super().forward(x))
        result.tokens = len(x)  # type: ignore[attr-defined]
        return result


class InTuple(tuple):  # type: ignore[type-arg]
    """A tuple of a class of its own."""


class InOwnTuple(Mixture):
    def forward(self, x: torch.Tensor) -> Any:
        return InTuple([super().forward(x)])


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (InAnObject, "Object, and what"),
        (BesideAnObject, "Object, and what"),
        (InMore, "Output, and what"),
        (InOwnTuple, "InTuple, a list or tuple of a class"),
    ],
)
def test_a_result_in_an_object_is_refused(kind: type[nn.Module], what: str) -> None:
    (report,) = hexa_fx.explain(kind().double(), _tokens(9)).blocks
    assert f"the block returns a {what}" in report.reason


class InRows(Mixture):
    """Cuts whatever it is given into rows of D numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, D)).view(x.shape)


def test_inputs_whose_rows_hold_several_tokens() -> None:
    block = InRows().double()
    optimized = hexa_fx.optimize(block, torch.randn(2, 7, D, dtype=torch.float64))
    assert optimized.report.rewritten
    for width in (2 * D, D // 2):
        x = torch.randn(2, 4, width, dtype=torch.float64)
        torch.testing.assert_close(optimized(x), block(x))
