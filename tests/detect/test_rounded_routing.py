"""Routers whose numbers say something else on rounded or extreme scores, and outputs in a dtype that the code does not name."""

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture
from tests.zoo.agree import rewritten, tokens
from tests.zoo.compare import operators_run
from tests.zoo.variant import D, E, K


class ChosenApart(Mixture):
    """The second choice is made among the scores but the first: if these are all zero, it may be the same expert again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate.weight(x).softmax(-1)
        first = nn.functional.one_hot(scores.argmax(-1), E)
        others = scores * (1.0 - first)
        second = nn.functional.one_hot(others.argmax(-1), E)
        gates = first * scores + second * others
        gates = gates / gates.sum(-1, keepdim=True)
        return torch.einsum("...e,...ed->...d", gates, torch.stack([expert(x) for expert in self.experts], -2))


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


class AlmostOne(Mixture):
    """The weight of a token's only expert is normalised: one in 32 bits, but for rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate.weight(x).softmax(-1)
        weight, index = scores.topk(1)
        gates = torch.zeros_like(scores).scatter(-1, index, weight / (weight.sum(-1, keepdim=True) + 1e-8))
        return (torch.stack([expert(x) for expert in self.experts], -2) * gates.unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize("kind", [InTheDefaultDtype, AlmostOne], ids=lambda kind: kind.__name__)
def test_rewritten_in_32_bits(kind: type[nn.Module]) -> None:
    rewritten(kind(), tokens(2, 7).float(), tokens(3, 5).float(), tolerance=1e-5)


def test_an_expert_that_is_chosen_twice_counts_once() -> None:
    block = ChosenApart().double()
    optimized = hexa_fx.optimize(block, tokens(2, 7))
    x = 1e5 * tokens(3, 5)
    assert operators_run(optimized, (x,))
    torch.testing.assert_close(optimized(x), block(x))
