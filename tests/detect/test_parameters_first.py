"""What code does to experts' parameters before it uses them, whether that has an effect on the example or not."""

import copy
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
from tests.zoo.variant import D, E, I

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
