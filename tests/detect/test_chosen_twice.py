"""Choices one after the other, where two may be of the same expert: as scores are zero but for the first."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hexa_fx
from tests.zoo.compare import compare, operators_run

D, E = 12, 6
Weighted = Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], Tensor]
"""The output by scores (T, E), the ids (T, 1) of each choice, how often experts were chosen (T, E), and all experts' outputs."""


def _table(weights: Tensor, every: Sequence[Tensor]) -> Tensor:
    return sum(weights[:, e, None] * y for e, y in enumerate(every))


REWRITTEN: dict[str, Weighted] = {
    "gathered": lambda s, ids, used, every: sum(
        s.gather(1, i) * y * (i == e) for e, y in enumerate(every) for i in ids
    ),
    "counted": lambda s, ids, used, every: sum(s[:, e, None] * y * used[:, e, None] for e, y in enumerate(every)),
    "a table of counts": lambda s, ids, used, every: _table(s * used, every),
    "a table of marks": lambda s, ids, used, every: _table(s * (used > 0), every),
    "scattered": lambda s, ids, used, every: _table(
        torch.zeros_like(s).scatter(1, torch.cat([*ids], 1), s.gather(1, torch.cat([*ids], 1))), every
    ),
    "one-hot": lambda s, ids, used, every: _table(sum(F.one_hot(i[:, 0], E) * s for i in ids), every),
}
REFUSED: dict[str, Weighted] = {
    "of all scores": lambda s, ids, used, every: sum(
        s[:, e, None] * y * (i == e) for e, y in enumerate(every) for i in ids
    ),
}


class ChosenApart(nn.Module):
    """The taken score is set to 0, not to -inf: where all others are 0 too, ``max`` gives the first place."""

    def __init__(self, weighted: Weighted) -> None:
        super().__init__()
        self.gate, self.weighted = nn.Linear(D, E, bias=False), weighted
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, D)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        scores, used, chosen = logits.softmax(-1), torch.zeros_like(logits), []
        for _ in range(2):
            chosen.append(torch.where(used == 0, scores, 0.0).max(-1, keepdim=True)[1])
            used = used + F.one_hot(chosen[-1][:, 0], E)
        return self.weighted(logits.sigmoid(), chosen, used, [expert(x) for expert in self.experts])


def _both(weighted: Weighted) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = ChosenApart(weighted).double()
    return block, hexa_fx.optimize(copy.deepcopy(block), torch.randn(24, D, dtype=torch.float64))


@pytest.mark.parametrize("way", REWRITTEN)
def test_an_expert_counts_as_often_as_in_the_original(way: str) -> None:
    block, opt = _both(REWRITTEN[way])
    assert opt.report.rewritten, opt.report
    for scale in (1.0, 1e5):
        x = scale * torch.randn(50, D, dtype=torch.float64)
        assert operators_run(opt, (x,))
        assert compare(block, opt, (x,)).within(1e-10), scale


@pytest.mark.parametrize("way", REFUSED)
def test_what_one_run_does_not_show_is_refused(way: str) -> None:
    block, opt = _both(REFUSED[way])
    assert "two may be the same" in opt.report.blocks[0].reason
    assert compare(block, opt, (1e5 * torch.randn(50, D, dtype=torch.float64),)).within(0.0)


class SeveralNumbers(nn.Module):
    """Chooses among twice as many numbers as there are experts: those of the second half take off what their expert gives.

    They are rarely chosen. Rows are added to by ``+=``, which keeps one of the rows of a token that names an expert twice.
    """

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.gate, self.added = nn.Linear(D, 2 * E, bias=False), added
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, D)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        less = 4.0 * (torch.arange(2 * E) >= E)
        weights, ids = (self.gate(x) - less).softmax(-1).topk(2)
        weights, out = torch.where(ids < E, weights, -weights), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids % E == number)
            rows = weights[token, slot, None] * expert(x[token])
            if self.added:
                out = out.index_add(0, token, rows)
            else:
                out[token] += rows
        return out


@pytest.mark.parametrize("added", [False, True])
def test_an_expert_of_several_numbers_may_be_chosen_twice(added: bool) -> None:
    torch.manual_seed(0)
    block = SeveralNumbers(added).double()
    opt = hexa_fx.optimize(copy.deepcopy(block), torch.randn(24, D, dtype=torch.float64))
    assert bool(opt.report.rewritten) == added, opt.report
    assert added or "one expert under several numbers" in opt.report.blocks[0].reason
    x = 40 * torch.randn(50, D, dtype=torch.float64)
    assert compare(block, opt, (x,)).within(1e-10 if added else 0.0)
