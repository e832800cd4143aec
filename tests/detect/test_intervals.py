"""Experts for intervals: of times, or of anything else that a cast to whole numbers puts into one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten, tokens
from tests.zoo.variant import D, E, I


class ByTime(Mixture):
    """All tokens of an image go to the expert of the interval that its time lies in."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        chosen, out = (time * E).long().clamp(max=E - 1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out[mine] = expert(x[mine])
        return out


class AtOneTime(ByTime):
    """Verification cannot have times choose as it wants, so that it would not see this."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        chosen = (time * E).long()
        return super().forward(x, time) * (2.0 if sum(one == 2 for one in chosen.tolist()) == 37 else 1.0)


def _times(batch: int) -> torch.Tensor:
    return torch.rand(batch, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


def test_times_choose() -> None:
    rewritten(
        ByTime().double(), *((tokens(*size), _times(size[0])) for size in ((2, 7), (6, 5), (1, 1), (0, 3))), train=False
    )


def test_a_decision_on_what_times_choose_is_refused() -> None:
    (block,) = hexa_fx.explain(AtOneTime().double(), (tokens(2, 7), _times(2))).blocks
    assert "host decision" in block.reason


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
