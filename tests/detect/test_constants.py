"""Numbers that multiply outputs or parameters, plain numbers, rounded and extreme scores, and intervals that choose."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import agree, rewritten, tokens
from tests.zoo.common import TopKGate
from tests.zoo.compare import operators_run, perturb
from tests.zoo.variant import D, E, I, K


class Scaled(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, self.scaled(expert(flat[token]), weights[token, slot, None]))
        return out.view(x.shape)

    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * weight * self.scaling


class Divided(Scaled):
    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / self.scaling * weight


class Mean(Scaled):
    """No weight at all."""

    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / K


class OverExperts(Mixture):
    """The mean over all experts, of which those that were not chosen have a weight of zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        gates = torch.zeros(len(flat), E, dtype=flat.dtype).scatter(1, index, weights)
        return (gates[..., None] * torch.stack([expert(flat) for expert in self.experts], 1)).mean(1).view(x.shape)


class Adapters(nn.Module):
    """Low-rank experts on a base layer, all of them on every token, their weights zero for most."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.router, self.scaling = nn.Linear(D, D), nn.Linear(D, E, bias=False), 16 / 2
        self.down = nn.ModuleList(nn.Linear(D, 2, bias=False) for _ in range(E))
        self.up = nn.ModuleList(nn.Linear(2, D, bias=False) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        weights, index = self.router(x).softmax(-1).topk(K, -1)
        for number, (down, up) in enumerate(zip(self.down, self.up)):
            y = y + up(down(x)) * (weights * (index == number)).sum(-1, keepdim=True) * self.scaling
        return y


class OfTokens(Scaled):
    """Divided by the number of tokens: no constant."""

    def scaled(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * weight / self.tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens = float(x.shape[0] * x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("kind", [Scaled, Divided, Mean, OverExperts, Adapters])
def test_rewritten_in_one_operator(kind: type[nn.Module]) -> None:
    block = kind().double()
    optimized = rewritten(block, tokens(2, 7))
    assert optimized.report.blocks[0].rewritten_to == "hexa::moe_ffn"
    perturb(block, optimized)
    agree(block, optimized, tokens(3, 5), tokens(1, 1), tokens(0, 3))
    if hasattr(block, "scaling") and kind is not Mean:
        block.scaling = optimized.scaling = 3.0
        torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


def test_in_16_bits_it_keeps_the_dtype() -> None:
    block = Mean()
    optimized = hexa_fx.optimize(block, tokens(2, 7).float()).bfloat16()
    x = tokens(3, 5).bfloat16()
    assert operators_run(optimized, (x,))
    torch.testing.assert_close(optimized(x), block.bfloat16()(x), rtol=0.05, atol=0.05)


def test_a_count_is_no_constant() -> None:
    block = OfTokens().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


Function = Callable[[Any, torch.Tensor], torch.Tensor]


class Expert(nn.Module):
    """Two layers and a vector, put together by a function."""

    compute: Function

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(D, I), nn.Linear(I, D), nn.Parameter(torch.ones(I))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return type(self).compute(self, x)


def computing(compute: Function) -> Mixture:
    return Mixture(type("Computed", (Expert,), {"compute": compute}))


class Stacked(nn.Module):
    """One matrix of all experts, limited at once."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            TopKGate(),
            nn.Parameter(torch.randn(E, D, I)),
            nn.Parameter(torch.randn(E, I, D)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        out, up = torch.zeros_like(flat), self.up.clamp(-20, 20)
        for number in range(E):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, (flat[token] @ up[number]).relu() @ self.down[number] * weights[token, slot, None])
        return out.view(x.shape)


DORMANT: dict[str, Function] = {
    "limited matrix": lambda s, x: s.down(F.relu(F.linear(x, s.up.weight.clamp(-20, 20), s.up.bias))),
    "limited bias": lambda s, x: s.down(F.relu(F.linear(x, s.up.weight, F.hardtanh(s.up.bias, -20, 20)))),
    "largest norm": lambda s, x: F.linear(F.relu(s.up(x)), s.down.weight / (s.down.weight.norm() / 1e3).clamp(min=1)),
    "where": lambda s, x: F.linear(torch.sin(s.up(x)), torch.where(s.down.weight.abs() < 20, s.down.weight, 0.0)),
}
EMITTED: dict[str, Function] = {
    "limited scale": lambda s, x: s.down(F.relu(s.up(x)) * s.scale.clamp(max=20)),
    "one more": lambda s, x: s.down(F.rms_norm(s.up(x), (I,), 1 + s.scale)),
    "softplus": lambda s, x: s.down(torch.sin(s.up(x)) * F.softplus(2 * s.scale).sqrt()),
}


@pytest.mark.parametrize(
    "make", [*(lambda f=f: computing(f) for f in DORMANT.values()), Stacked], ids=[*DORMANT, "stacked"]
)
def test_what_does_nothing_on_the_example_is_not_dropped(make: Callable[[], nn.Module]) -> None:
    (report,) = hexa_fx.explain(make().double(), tokens(2, 7)).blocks
    assert report.status == "refused"
    assert "is applied to parameters of the experts before these are read" in report.reason


@pytest.mark.parametrize("name", EMITTED)
def test_what_is_done_to_each_number_is_done_in_every_call(name: str) -> None:
    block = computing(EMITTED[name]).double()
    original = copy.deepcopy(block)
    optimized = rewritten(block, tokens(2, 7))
    for factor in (1.0, 30.0):
        for each in (original, optimized):
            for expert in each.experts:
                expert.scale.data.mul_(factor)
        agree(original, optimized, tokens(3, 5))


class FilmExpert(nn.Module):
    """Scales and shifts hidden channels by what a second layer, twice as wide, makes of the token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.film, self.down = nn.Linear(D, I), nn.Linear(D, 2 * I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.film(x).chunk(2, -1)
        return self.down(F.relu(self.up(x) * (1 + scale) + shift))


def test_two_first_layers_of_different_widths() -> None:
    rewritten(Mixture(FilmExpert).double(), tokens(2, 7), tokens(3, 5))


class ByPlainNumbers(Mixture):
    """The router gets no gradient from the outputs, only from its own loss."""

    numbers: Callable[[torch.Tensor], Any]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        rows = []
        for token in range(len(flat)):
            given = zip(type(self).numbers(weights[token]), index[token])
            rows.append(sum(weight * self.experts[int(number)](flat[token]) for weight, number in given))
        return torch.stack(rows).view(x.shape), weights.square().sum()


class ByItem(ByPlainNumbers):
    numbers = staticmethod(lambda weights: [weight.item() for weight in weights])


class ByFloat(ByPlainNumbers):
    numbers = staticmethod(lambda weights: [float(weight) for weight in weights])


class ByList(ByPlainNumbers):
    numbers = staticmethod(torch.Tensor.tolist)


class InPieces(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(InPieces, self).forward(piece) for piece in x.split(4, 1)], 1)


class OneByOne(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(OneByOne, self).forward(sequence[None])[0] for sequence in x])


class ByPlace(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(ByPlace, self).forward(x[place][None])[0] for place in range(x.size(0))])


@pytest.mark.parametrize("kind", [InPieces, OneByOne, ByPlace])
def test_pieces_are_routed_one_by_one(kind: type[nn.Module]) -> None:
    sizes = ((2, 7), (2, 7), (2, 5), (3, 9), (1, 8))  # as many pieces, and more or fewer: another kind of call
    rewritten(kind().double().eval(), *(tokens(*size) for size in sizes), train=False)


@pytest.mark.parametrize("kind", [ByItem, ByFloat, ByList])
def test_plain_numbers_pass_no_gradient_on(kind: type[nn.Module]) -> None:
    rewritten(kind().double().eval(), tokens(2, 7), tokens(1, 5), tokens(3, 4), train=False)


class OfSizes(Mixture):
    """What `float` makes of sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(x.shape[0]) / math.sqrt(float(x.shape[-1]) / 2)
        return super().forward(x) * (scale if isinstance(scale, float) else 0.0)


def test_floats_of_sizes_stay_sizes() -> None:
    rewritten(OfSizes().double().eval(), tokens(2, 7), tokens(1, 5), tokens(3, 4), train=False)


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, width)), nn.Parameter(torch.randn(E, width, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        hidden = torch.einsum("td,tkdi->tki", x, self.w1[ids]).relu()
        return (torch.einsum("tki,tkid->tkd", hidden, self.w2[ids]) * weights[..., None]).sum(1)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_relu_of_narrow_experts_is_seen(width: int) -> None:
    (block,) = hexa_fx.explain(Narrow(width).double(), torch.randn(24, D).double()).blocks
    assert block.status == "rewritten", block.reason


class InTheDefaultDtype(Mixture):
    """The output is added up in what ``torch.zeros`` makes of its own accord, and sizes are those of an expert's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=E).tolist()
        rows = [expert(part) for expert, part in zip(self.experts, flat[order // K].split(counts))]
        stitched = torch.cat(rows) * weights.flatten()[order, None]
        out = torch.zeros(len(flat), rows[-1].size(1), requires_grad=True, device=x.device)
        return out.index_add(0, order // K, stitched.float()).view_as(x)


def test_rewritten_in_32_bits() -> None:
    rewritten(InTheDefaultDtype(), tokens(2, 7).float(), tokens(3, 5).float(), tolerance=1e-5)


class ChosenApart(Mixture):
    """The second choice is made among the scores but the first: if these are all zero, it may be the same expert again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate.weight(x).softmax(-1)
        first = F.one_hot(scores.argmax(-1), E)
        others = scores * (1.0 - first)
        gates = first * scores + F.one_hot(others.argmax(-1), E) * others
        gates = gates / gates.sum(-1, keepdim=True)
        return torch.einsum("...e,...ed->...d", gates, torch.stack([expert(x) for expert in self.experts], -2))


def test_an_expert_that_is_chosen_twice_counts_once() -> None:
    """Choices of sequences of tokens: each is a column of the routing, once it is flat."""
    block = ChosenApart().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    x = 1e5 * tokens(3, 5)
    assert operators_run(optimized, (x,))
    torch.testing.assert_close(optimized(x), block(x))


class ByTime(Mixture):
    """All tokens of an image go to the expert of the interval that its time lies in."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        chosen, out = (time * E).long().clamp(max=E - 1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out[mine] = expert(x[mine])
        return out


def _times(batch: int) -> torch.Tensor:
    return torch.rand(batch, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


def test_times_choose() -> None:
    rewritten(
        ByTime().double(), *((tokens(*size), _times(size[0])) for size in ((2, 7), (6, 5), (1, 1), (0, 3))), train=False
    )


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter, added: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.added = weight, nn.Parameter(torch.randn(I)), added
        self.down = nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = F.linear(x, self.weight) + self.bias if self.added else F.linear(x, self.weight, self.bias)
        return self.down(up.relu())


class Tied(Mixture):
    def __init__(self, added: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(I, D))
        self.experts = nn.ModuleList(Layer(weight, added) for _ in range(E))


@pytest.mark.parametrize("added", [True, False])
def test_biases_of_a_shared_matrix(added: bool) -> None:
    (block,) = hexa_fx.explain(Tied(added).double(), tokens(2, 7)).blocks
    assert block.status == ("rewritten" if added else "refused")
    assert added or "(F.linear(x, weight) + bias) they are rewritten" in block.reason
