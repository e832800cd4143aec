"""Code that counts choices in plain numbers, and does something else where there are exactly so many."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import hexa_fx
from hexa_fx.passes.inputs.routing_override import ForcedRouting, raised
from tests.runtime.handmade import D, ListMoE


class Counting(ListMoE):
    def counted(self, index: torch.Tensor) -> object:
        return sum(int(chosen) == 1 for chosen in index.flatten().tolist())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        index, _ = self.router(hidden)
        return super().forward(hidden) * (2.0 if self.counted(index) == 97 else 1.0)


class InNumpy(Counting):
    def counted(self, index: torch.Tensor) -> object:
        return (index.numpy() == 1).sum()


class OneByOne(Counting):
    def counted(self, index: torch.Tensor) -> object:
        return len([row for row in range(index.shape[0]) if index[row, 0].item() == 1])


class Listed(Counting):
    def counted(self, index: torch.Tensor) -> object:
        rows = defaultdict(list)
        for row, chosen in enumerate(index[:, 0].tolist()):
            rows[int(chosen)].append(row)
        return len(rows[1])


class FirstAt(Counting):
    """The place of an expert's first choice."""

    def counted(self, index: torch.Tensor) -> object:
        chosen = index.flatten().tolist()
        return 97 * (1 in chosen and chosen.index(1) == 37)


class FirstToken(Counting):
    def counted(self, index: torch.Tensor) -> object:
        chosen = index[:, 0].tolist()
        return 97 * (1 in chosen and chosen.index(1) == 37)


class OnItself(Counting):
    """The number is an attribute, in a comparison of plain numbers."""

    at = 61

    def counted(self, index: torch.Tensor) -> object:
        return 97 * (index.flatten().tolist().count(1) == self.at)


@pytest.mark.parametrize("kind", [Counting, InNumpy, OneByOne, Listed, FirstAt, FirstToken, OnItself])
def test_a_decision_on_a_plain_count_is_refused(kind: type[Counting]) -> None:
    torch.manual_seed(0)
    (block,) = hexa_fx.explain(kind(), torch.randn(12, D)).blocks
    assert block.status == "refused"
    assert "how many tokens an expert gets" in block.reason
    assert "test_exact_counts.py" in block.reason


class Equal(Counting):
    def counted(self, index: torch.Tensor) -> object:
        return 97 * torch.equal((index == 1).sum(), torch.tensor(97))


def test_a_count_that_torch_compares_is_refused() -> None:
    (block,) = hexa_fx.explain(Equal(), torch.randn(12, D)).blocks
    assert "exact number of tokens" in block.reason


def test_counts_that_do_not_decide_are_none() -> None:
    class Logged(Counting):
        def counted(self, index: torch.Tensor) -> object:
            super().counted(index)
            return 0

    (block,) = hexa_fx.explain(Logged(), torch.randn(12, D)).blocks
    assert block.status == "rewritten", block.reason


def test_first_choices_come_first() -> None:
    logits = torch.randn(5, 4)
    wanted = torch.tensor([[2, 0, 1], [0, 1, 2], [3, 2, 1], [1, 3, 0], [2, 3, 0]])
    routing = ForcedRouting("these", lambda rows, candidates, k: wanted, in_order=True)
    assert raised(logits, routing, 3).topk(3).indices.equal(wanted)


class ByTable(Counting):
    """Choices that nothing in the block can be made to change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(50) % len(self.experts))

    def forward(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        index, out = self.table[words], torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            out[index == number] = expert(hidden[index == number])
        return out * (2.0 if self.counted(index) == 97 else 1.0)


class ByTableHit(ByTable):
    def counted(self, index: torch.Tensor) -> object:
        return len([self.experts[number] for number in index.unique().tolist()])


@pytest.mark.parametrize(("kind", "status"), [(ByTable, "refused"), (ByTableHit, "rewritten")])
def test_where_no_other_choices_can_be_tried(kind: type[ByTable], status: str) -> None:
    (block,) = hexa_fx.explain(kind(), (torch.randn(12, D), torch.randint(50, (12,)))).blocks
    assert block.status == status
    assert status == "rewritten" or "no other choices can be tried" in block.reason


class OfSamples(Counting):
    """The choices of samples, which one sequence of many tokens has one of."""

    def forward(self, hidden: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
        numbers = tasks.tolist()
        out = torch.stack([self.experts[number](sample) for number, sample in zip(numbers, hidden)])
        return out * (2.0 if numbers.count(1) == 97 else 1.0)


class OneByOneSamples(OfSamples):
    def forward(self, hidden: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
        out, many = [], 0
        for task, sample in zip(tasks, hidden):
            number = int(task)
            many += number == 1
            out.append(self.experts[number](sample))
        return torch.stack(out) * (2.0 if many == 97 else 1.0)


@pytest.mark.parametrize("kind", [OfSamples, OneByOneSamples])
def test_a_decision_on_how_many_samples_an_expert_gets_is_refused(kind: type[OfSamples]) -> None:
    example = torch.randn(3, 5, D), torch.tensor([0, 1, 1])
    (block,) = hexa_fx.explain(kind(), example).blocks
    assert block.status == "refused"
    assert "how many tokens an expert gets" in block.reason
