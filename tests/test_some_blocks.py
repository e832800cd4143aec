"""A model of which only some blocks are rewritten runs and trains like its original."""

import copy

import torch
from torch import nn

import hexa_fx
from tests.zoo.common import Mixture
from tests.zoo.loops import OneHotIndexAdd
from tests.zoo.refusals import MaxCombine
from tests.zoo.variant import D


class Mixed(nn.Module):
    """A mixture, one that is refused, a mixture of another kind, and a dense layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.second = OneHotIndexAdd(), MaxCombine(), Mixture()
        self.norm, self.dense = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(self.norm(x))
        x = x + (first[0] if isinstance(first, tuple) else first)
        x = x + self.dense(self.odd(self.norm(x)))
        return x + self.second(self.norm(x))


def test_some_rewritten_some_refused_trains_alike() -> None:
    original = Mixed().double()
    optimized = copy.deepcopy(original)
    x = torch.randn(2, 7, D, dtype=torch.float64)
    hexa_fx.optimize_(optimized, x)
    report = optimized.report
    assert sorted(b.path for b in report.rewritten) == ["first", "second"]
    assert [b.path for b in report.refused] == ["odd"]
    assert report.refused[0].location is not None
    losses = []
    for model in (original, optimized):
        model.train()
        steps = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for seed in range(4):
            batch = torch.randn(3, 5 + seed, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            steps.zero_grad()
            loss = (model(batch) - batch.flip(-1)).square().mean()
            loss.backward()
            steps.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[4:], losses[:4], rtol=1e-10, atol=0)
    assert losses[3] < losses[0]
    for (name, a), b in zip(original.named_parameters(), optimized.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10, msg=name)
    assert list(original.state_dict()) == list(optimized.state_dict())
