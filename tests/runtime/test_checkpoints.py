"""Blocks that are checkpointed from outside save as much for backward in both runs, also where they run their own code."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hexa_fx
from tests.detect.mixture import D, Mixture


class Branches(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        probs, _, out, _ = self.mix(flat)
        return (out * probs.mean() if flat.shape[0] > 5 else out).view_as(x)


@pytest.mark.parametrize("tokens", [9, 4, 1, 0])
def test_the_second_run_saves_as_much_as_the_first(tokens: int) -> None:
    block, x = Branches().double(), torch.randn(9, 1, D, dtype=torch.float64)
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False)).train()
    found = []
    for each in (block, opt, opt):
        given = x[:tokens].clone().requires_grad_()
        out = checkpoint(each, given, use_reentrant=False)
        grads = torch.autograd.grad(out.sum(), [given, *each.parameters()], allow_unused=True, materialize_grads=True)
        found.append([out, *grads])
    for one, other, again in zip(*found):
        torch.testing.assert_close(other, one)
        torch.testing.assert_close(again, one)


class Counts(Mixture):
    """Adds up, in every third call, and in none before it: the second run is another call by then."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.sum = 0, torch.zeros(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        self.steps += 1
        if self.steps % 3 == 0:
            self.sum = self.sum + x.detach().sum(0)
        return out


def test_a_second_run_of_another_kind_is_analysed() -> None:
    block = Counts().train()
    opt = hexa_fx.optimize(block, config=hexa_fx.HexaConfig(own_code_when_small=False))
    for _ in range(3):
        x, found = torch.randn(9, D), []
        for each in (block, opt):
            given = x.clone().requires_grad_()
            out = checkpoint(each, given, use_reentrant=False)
            found.append([out, *torch.autograd.grad(out.sum(), [given])])
        for one, other in zip(*found):
            torch.testing.assert_close(other, one)
        assert (opt.steps, opt.report.rewritten[0].calls.own) == (block.steps, {})
        torch.testing.assert_close(opt.sum, block.sum)
