"""Routing that a block is given: ids among which one names no expert, and zeros and ones, at most one a slot."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hexa_fx
from tests.zoo.common import looped
from tests.zoo.compare import compare, operators_run

D, E, K, T = 8, 4, 2, 10
Form = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def compared(m: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return looped(x, weights, ids, (partial(m.expert, number) for number in range(E)))


def one_hot(m: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, marks in enumerate(F.one_hot(ids, E + 1).permute(2, 1, 0)[:E]):
        slot, token = torch.where(marks)
        out.index_add_(0, token, m.expert(number, x[token]) * weights[token, slot, None])
    return out


def looked_up(m: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    h = F.silu(torch.einsum("td,tkid->tki", x, m.up[ids]))
    return torch.einsum("tki,tkdi,tk->td", h, m.down[ids], weights)


def by_number(m: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    numbers = ids.tolist()
    rows = [sum(m.expert(numbers[t][s], x[t]) * weights[t, s] for s in range(K)) for t in range(len(x))]
    return torch.stack(rows)


def sorted_by_expert(m: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    parts = x[order // K].split(torch.bincount(ids.flatten(), minlength=E).tolist())
    given = torch.cat([m.expert(number, part) for number, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, order // K, given * weights.flatten()[order, None])


class Given(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Parameter(torch.randn(E, 12, D)), nn.Parameter(torch.randn(E, D, 12))

    def expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        return F.silu(rows @ self.up[number].T) @ self.down[number].T

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.form(self, x, ids, weights)


@pytest.mark.parametrize(
    ("form", "runs"),
    [
        (compared, {-1, E}),
        (one_hot, {E}),
        (looked_up, set()),
        (by_number, set()),
        (sorted_by_expert, set()),
    ],
)
def test_an_id_of_no_expert(form: Form, runs: set[int]) -> None:
    """``runs``: with which ids the operators still run, as the code leaves them out too."""
    block, x, weights = Given(form).double(), torch.randn(T, D).double(), torch.rand(T, K).double()
    ids = torch.rand(T, E).topk(K).indices
    optimized = hexa_fx.optimize(block, (x, ids, weights))
    assert operators_run(optimized, (x, ids, weights)), str(optimized.report)
    for none in (-1, E):
        given = ids.index_fill(0, torch.tensor(3), none)
        try:
            expected = block(x, given, weights)
        except Exception as error:
            with pytest.raises(type(error)):
                optimized(x, given, weights)
            continue
        torch.testing.assert_close(optimized(x, given, weights), expected)
        assert bool(operators_run(optimized, (x, given, weights))) == (none in runs)


def test_negative_ids_in_a_trace() -> None:
    block, x, weights = Given(looked_up), torch.randn(T, D), torch.rand(T, K)
    ids = torch.rand(T, E).topk(K).indices
    optimized = hexa_fx.optimize(block, (x, ids, weights))
    compiled = torch.compile(optimized, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids - E, weights), block(x, ids, weights))


class Marked(Given):
    """Experts that are given a mark at the chosen one, as `SwitchTransformersExperts`."""

    def forward(self, x: torch.Tensor, marks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in torch.greater(marks.sum((0, 1)), 0).nonzero():
            slot, token = torch.where(marks.permute(2, 1, 0)[number].squeeze(0))
            rows = self.expert(int(number[0]), x[token]) * weights[token, slot, None]
            out.index_add_(0, token, rows)
        return out


def test_a_token_without_a_mark_is_no_expert_s() -> None:
    block, x, weights = Marked(one_hot).double(), torch.randn(T, D).double(), torch.rand(T, 1).double()
    marks = F.one_hot(torch.randint(E, (T, 1)), E)
    optimized = hexa_fx.optimize(block, (x, marks, weights), hexa_fx.HexaConfig(own_code_when_small=False))
    for given in (marks, marks * (torch.arange(T) % 3 > 0)[:, None, None]):
        torch.testing.assert_close(optimized(x, given, weights), block(x, given, weights))
        assert operators_run(optimized, (x, given, weights)), str(optimized.report)


class MarkedBySlot(nn.Module):
    """Experts that are given a mask (T, E) or (T, k, E) and weights (T,) or (T, k)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))

    def forward(self, x: torch.Tensor, marks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        marks, weights = marks.view(x.shape[0], -1, E), weights.view(x.shape[0], -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(marks[..., number] == 1)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def given(tokens: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token in four is dropped."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :k]
    marks = nn.functional.one_hot(ids, E)
    marks[::4, 0] = 0
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64)
    return (x, marks[:, 0], weights[:, 0]) if k == 1 else (x, marks.to(dtype), weights)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
@pytest.mark.parametrize("k", [1, 2])
def test_marks_are_read_as_ids(k, dtype):
    model = MarkedBySlot().double()
    opt = hexa_fx.optimize(model, given(9, k, dtype, 0))
    (block,) = opt.report.blocks
    assert block.status == "rewritten", block.reason
    for tokens, seed in ((9, 1), (5, 2), (1, 3)):
        found = compare(model, opt, given(tokens, k, dtype, seed))
        assert found.within(1e-10), found
    x, marks, weights = given(7, k, dtype, 4)
    assert compare(model, opt, (x, torch.zeros_like(marks), weights)).within(1e-10)
