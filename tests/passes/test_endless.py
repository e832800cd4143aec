"""A router that waits for numbers which forced routings never reach is ended there, and rewritten as the other cases show."""

import copy

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.isolation import trial_modes
from tests.detect.mixture import D, E, Mixture
from tests.zoo.compare import compare, operators_run


class Sinkhorn(nn.Linear):
    """Balances costs until they change no more, which takes forever where they are far apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        cost, columns, before, change = scores.detach().exp(), torch.ones(E, dtype=x.dtype), 0.0, 1.0
        while change > 1e-4:
            rows = 1 / len(cost) / ((columns * cost).sum(1) + 1e-8)
            columns = 1 / E / ((rows[:, None] * cost).sum(0) + 1e-8)
            change, before = (before - columns).abs().mean(), columns
        return scores + 0 * columns.sum()


class Balanced(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.router = Sinkhorn(D, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class Waits(Mixture):
    """Does not end on what is made up for inputs beside the tokens either, in its own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().max()
        while scale > 20:
            scale = scale + 0
        return self.mix(x)[2]


@pytest.mark.parametrize("block", [Balanced, Waits])
def test_optimize_ends(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_modes, "MOST_CALLS", 5000)
    torch.manual_seed(0)
    model, x = block().double(), torch.randn(24, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(model), x)
    (report,) = opt.report.blocks
    if report.status == "rewritten":
        assert operators_run(opt, (x,))
    else:
        assert "host decision" in report.reason
    assert compare(model, opt, (x,)).within(1e-10)


def test_a_run_that_does_not_end_says_so() -> None:
    def waits() -> None:
        number = torch.zeros(())
        while number < 1:
            number = number * 1

    with trial_modes.Bounded(), pytest.raises(trial_modes.Endless, match="had not ended after 200000 calls of torch"):
        waits()
