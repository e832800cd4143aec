"""Decisions on sizes and counts are asked at every call, refused, or seen by verification; never frozen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.detect import sizes_elsewhere
from tests.zoo.compare import operators_run

D, E, K = 8, 4, 2
FACTORS = [1.0, 2.0]


class Block(nn.Module):
    """A plain loop over experts; subclasses scale the weights if a size says so."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)) for _ in range(E))

    def factor(self, x, w, i):
        return 1.0

    def run(self, e, rows):
        return self.experts[e](rows)

    def forward(self, x):
        w, i = self.gate(x).softmax(-1).topk(K)
        w = w * self.factor(x, w, i)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(i == e)
            out.index_add_(0, token, self.run(e, x[token]) * w[token, slot, None])
        return out


ASKED = {
    "equal": lambda self, x, w, i: 2.0 if x.shape[0] == 400 else 1.0,
    "unequal": lambda self, x, w, i: 1.0 if w.size(0) != 400 else 2.0,
    "remainder": lambda self, x, w, i: 2.0 if i.shape[0] % 2 else 1.0,
    "table of sizes": lambda self, x, w, i: FACTORS[x.shape[0] % 2],
    "in sizes": lambda self, x, w, i: 2.0 if len(i) in (300, 400, 301) else 1.0,
    "elements": lambda self, x, w, i: 2.0 if i.numel() == 800 else 1.0,
    "text": lambda self, x, w, i: 2.0 if f"{x.shape[0]}".endswith("00") else 1.0,
    "product of sizes": lambda self, x, w, i: 2.0 if torch.tensor(x.shape).prod() == 3200 else 1.0,
    "sum of places": lambda self, x, w, i: 2.0 if torch.arange(len(w)).sum() == 79800 else 1.0,
    "rows of a list": lambda self, x, w, i: 2.0 if len(list(x)) == 400 else 1.0,  # counted, and not read
    "rows one by one": lambda self, x, w, i: 2.0 if sum(1 for _ in w) == 301 else 1.0,
    "pieces": lambda self, x, w, i: 2.0 if len(x.split(50)) > 6 and len(w.tolist()) != 301 else 1.0,
    "class": lambda self, x, w, i: 2.0 if isinstance(x.shape, torch.Size) and divmod(len(x), 100) == (4, 0) else 1.0,
    "stride": lambda self, x, w, i: 2.0 if x.stride(0) * len(x) == 3200 else 1.0,
    "above": lambda self, x, w, i: 2.0 if i.shape[0] > 300 and w.shape[0] < 1000 else 1.0,
}
NOT_SEEN = {
    "seven": {"run": lambda self, e, rows: self.experts[e](rows) * (2 if rows.shape[0] == 77 else 1)},
    "even": {"run": lambda self, e, rows: self.experts[e](rows) * (2 if len(rows) % 64 == 63 else 1)},
    "count of a mask": {"factor": lambda self, x, w, i: 2.0 if (i == 1).sum() == 123 else 1.0},
    "as many as tokens": {"factor": lambda self, x, w, i: 2.0 if (i == 1).sum() == x.shape[0] else 1.0},
}
IN_MEMORY = {
    "lies in memory": lambda self, x, w, i: 2.0 if x.t().contiguous().stride(0) == 400 else 1.0,
    "the memory behind tensors": lambda self, x, w, i: 2.0 if x.untyped_storage().nbytes() == 3200 * 8 else 1.0,
}


def made(**members):
    return type("Sized", (Block,), members)().double().eval()


def x(rows):
    return torch.randn(rows, D, dtype=torch.float64)


@pytest.mark.parametrize("said", IN_MEMORY)
def test_what_lies_where_in_memory_is_refused(said):
    (block,) = hexa_fx.explain(made(factor=IN_MEMORY[said]), x(24)).blocks
    assert block.status == "refused"
    assert said in block.reason


@pytest.mark.parametrize("way", ASKED)
def test_the_condition_is_asked_at_every_call(way):
    model = made(factor=ASKED[way])
    optimized = hexa_fx.optimize(copy.deepcopy(model), x(24))
    assert operators_run(optimized, (x(24),))
    for rows in (24, 26, 301, 400, 5, 1):
        given = x(rows)
        torch.testing.assert_close(optimized(given), model(given))


@pytest.mark.parametrize("way", NOT_SEEN)
def test_an_exact_count_of_rows_is_refused(way):
    (block,) = hexa_fx.explain(made(**NOT_SEEN[way]), x(24)).blocks
    assert block.status == "refused"
    assert "exact number of tokens" in block.reason
    assert block.location is not None


CERTAIN_COUNTS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "in floats": lambda block, x, ids: (ids == 1).float().sum() == 97,
    "in a histogram": lambda block, x, ids: torch.histc(ids.double(), E, 0, E - 1)[0].item() == 97,
    "scattered": lambda block, x, ids: torch.zeros(E).scatter_add(0, ids.flatten(), torch.ones(ids.numel()))[0] == 97,
    "of one-hot numbers": lambda block, x, ids: F.one_hot(ids, E).double().sum((0, 1))[1].item() == 97,
    "of unique": lambda block, x, ids: ids.unique(return_counts=True)[1][0].item() == 97,
    "in a queue": lambda block, x, ids: (ids == 1).cumsum(0).max().item() == 97,
}
LONG: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "instance": lambda block, x, ids: sizes_elsewhere.is_long(x),
    "length": lambda block, x, ids: sizes_elsewhere.is_long_by_length(x),
}


class Asking(Block):
    def __init__(self, asked: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.asked = asked

    def factor(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> float:
        return 2.0 if self.asked(self, x, i) else 1.0


class CastingToInt(Block):
    def factor(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        kinds = type("Kinds", (), {"whole": type(E)})
        return (i > 0).to(int) + torch.ones(x.shape[0], 1, dtype=kinds.whole)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64)


@pytest.mark.parametrize("asked", LONG.values(), ids=LONG)
def test_sizes_are_asked_of_types_and_elsewhere(asked: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Asking(asked).double().eval()
    optimized = hexa_fx.optimize(model, tokens(24))
    assert optimized.report.rewritten, optimized.report
    given = tokens(5001)
    torch.testing.assert_close(optimized(given), model(given))
    assert "len" not in vars(sizes_elsewhere)  # what stood for it is gone


@pytest.mark.parametrize("asked", [*CERTAIN_COUNTS.values()])
def test_certain_counts_are_refused(asked: Callable[..., Any]) -> None:
    (block,) = hexa_fx.explain(Asking(asked).double().eval(), tokens(24)).blocks
    assert block.status == "refused"
    assert "exact number of tokens" in block.reason, block.reason
    assert block.location is not None


def test_types_stand_for_dtypes() -> None:
    model = CastingToInt().double().eval()
    optimized = hexa_fx.optimize(model, tokens(24))
    assert optimized.report.rewritten, optimized.report
    given = tokens(31)
    torch.testing.assert_close(optimized(given), model(given))
