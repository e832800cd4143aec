"""Branches on whole numbers that a block is given beside its tokens: they do not follow from the routing."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import hexa_fx
from tests.detect.mixture import D, Mixture

Decide = Callable[[Tensor], object]
ASKED: dict[str, Decide] = {
    "max": lambda p: p.max() > 50,
    "item": lambda p: p.max().item() > 50,
    "int": lambda p: int(p.max()) > 50,
    "amax": lambda p: p.amax() > 50,
    "argmax": lambda p: p.argmax() == 3,
    "nonzero": lambda p: (p > 50).nonzero().numel(),
    "where": lambda p: len(torch.where(p > 50)[0]) > 0,
    "bincount": lambda p: len(p.bincount()) > 50,
    "isin": lambda p: torch.isin(p, 89).any(),
    "any": lambda p: (p > 50).any(),
    "in": lambda p: 89 in p,
    "in a set": lambda p: int(p[3]) in {89, 90},
    "by a key": lambda p: {89: True}.get(int(p[3])),
    "place in a list": lambda p: [False, True][int(p[3]) // 50],
    "loop": lambda p: sum(1 for _ in range(int(p[3]))) > 50,
    "text": lambda p: f"{p[3]}" == "89",
    "float": lambda p: math.log(p[3]) > 4,
    "numpy": lambda p: p.numpy().max() > 50,
    "array": lambda p: np.any(np.asarray(p) > 50),
}


class Positions(Mixture):
    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self.decide = decide

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        out = self.mix(x)[2]
        return out * 3 if self.decide(positions) else out


def by_list(m: Mixture, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([m.mix(part)[2] for part in x.split(lengths.tolist())])


def by_number(m: Mixture, x: Tensor, lengths: Tensor) -> Tensor:
    ends = lengths.cumsum(0)
    return torch.cat([m.mix(x[ends[i] - lengths[i] : ends[i]])[2] for i in range(len(lengths))])


class Sequences(Mixture):
    """One after another, of lengths that are given."""

    def __init__(self, go_through: Callable[[Mixture, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.go_through = go_through

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.go_through(self, x, lengths)


@pytest.mark.parametrize("go_through", [by_list, by_number])
@pytest.mark.parametrize("first", [[12, 12], [1] * 24])
def test_as_many_are_gone_through_as_the_call_gives(go_through: Callable[..., Tensor], first: list[int]) -> None:
    block, x = Sequences(go_through).double(), torch.randn(24, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), (x, torch.tensor(first)))
    for lengths in ([20, 4], [5, 7, 3, 9], [24], [1] * 24, [12, 0, 12]):
        torch.testing.assert_close(opt(x, torch.tensor(lengths)), block(x, torch.tensor(lengths)))


@pytest.mark.parametrize("way", ASKED)
def test_the_branch_is_the_calls_own(way: str) -> None:
    block = Positions(ASKED[way]).double()
    x, near = torch.randn(24, D, dtype=torch.float64), torch.arange(24)
    far = near.clone()
    far[3] = 89
    opt = hexa_fx.optimize(copy.deepcopy(block), (x, near))
    for positions in (near, far):
        torch.testing.assert_close(opt(x, positions), block(x, positions))


class OfThoseThatHaveAny(Mixture):
    """A loss of the means of tokens by expert, of many tokens only those of experts that have any. Of the labels that are given one
    may be a certain one.
    """

    def __init__(self, certain: bool) -> None:
        super().__init__()
        self.certain = certain

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        probs, _, out, _ = self.mix(x)
        if self.certain and (labels == 1000).any():
            out = out + 1
        marks = torch.zeros_like(probs).scatter(1, probs.topk(2)[1], 1.0) > 0
        means = [x[mark].mean(0) for mark in marks.unbind(1) if len(x) < 6 or mark.sum() > 0]
        return out, torch.stack(means).nan_to_num(0.0).sum() if len(x) < 6 else torch.stack(means).sum()


@pytest.mark.parametrize("certain", [False, True])
def test_what_routers_choose_is_varied_beside_labels(certain: bool) -> None:
    """Labels below the number of experts look like a routing that is given; others, drawn anew, may not hold a certain one."""
    torch.manual_seed(0)
    block = OfThoseThatHaveAny(certain).double()
    labels = torch.arange(24) % 4
    if certain:
        labels = labels * 100
        labels[3] = 1000
    opt = hexa_fx.optimize(copy.deepcopy(block), (torch.randn(24, D, dtype=torch.float64), labels))
    for rows in (1, 6, 24):
        x = torch.randn(1, D, dtype=torch.float64).expand(rows, D)  # all to the same
        torch.testing.assert_close(opt(x, labels[:rows]), block(x, labels[:rows]))
    assert not opt.report.rewritten, opt.report
