"""Decisions on what was given and on tokens: seen as they go, asked in every call, or refused where no example shows them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hexa_fx
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import operators_run


class Flagged(Mixture):
    """``flag`` is a new parameter of one, and is decided on."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * 1.5 if self.flag.item() == 1 else x)[2]


def test_a_decision_on_a_constant_parameter_is_seen_as_it_goes() -> None:
    block, x = Flagged(), torch.randn(12, D)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.blocks[0].status == "rewritten"
    for value in (1.0, 0.0, 1.0):
        block.flag.fill_(value)
        torch.testing.assert_close(opt(x), block(x))


class Counted(Mixture):
    """A size is asked after a buffer was written, of an input that was written to; ``late``: one that the input does not have."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("count", torch.zeros(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x.mul_(2)
        rows = x.view(-1, 1, D) if self.late else x
        return self.mix(x * 1.5 if rows.shape[0] > 1 else x)[2]


def test_another_size_of_what_was_written_to_is_asked_where_it_is() -> None:
    block, x = Counted(late=True), torch.randn(12, D)
    (report,) = hexa_fx.optimize(block, x).report.blocks
    assert report.status == "refused"
    assert "a decision that comes first can be rewritten" in report.reason


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gradients_with_a_decision_on_a_learned_scale(value: float) -> None:
    class Scaled(Flagged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.mix(x)[2]
            return out * self.flag if self.flag.item() != 0 else out

    block, x = Scaled().double(), torch.randn(12, D, dtype=torch.float64)
    block.flag.requires_grad_().data.fill_(value)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.blocks[0].status == "rewritten"
    wanted = [p for p in block.parameters() if value or p is not block.flag]
    one, two = (torch.autograd.grad(m(x).square().sum(), wanted) for m in (block, opt))
    torch.testing.assert_close(one, two)


class AsksForGradients(Mixture):
    """Has a loss for its router only if that is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        return out + out.square().mean() if self.router.weight.requires_grad else out


@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_that_wants_no_gradient_is_seen_as_it_is(frozen: bool) -> None:
    block, x = AsksForGradients(), torch.randn(12, D)
    block.router.requires_grad_(not frozen)
    opt = hexa_fx.optimize(block, x)
    assert opt.report.rewritten, opt.report
    for wanted in (not frozen, frozen):
        for model in (block, opt):
            model.router.requires_grad_(wanted)
        torch.testing.assert_close(opt(x), block(x))
        assert operators_run(opt, (x,)), opt.report


ON_DATA = "the code takes a host decision (if, while, item()) on the data"


def is_rare(x: torch.Tensor) -> torch.Tensor:
    return (x[:1, :3] == 7.25).sum() == 3


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": torch.Tensor.item,
    "item of any": lambda rare: rare.any().item() is True,
    "int": int,
    "float": float,
    "a key": lambda rare: {True: 1}.get(rare.item(), 0),
    "a text": lambda rare: str(rare.item()) == "True",
    "a tensor's text": lambda rare: f"{rare.float()}" == "1.0",
    "a part of its text": lambda rare: str(rare.double())[7] == "1",
    "a float's text": lambda rare: f"{rare.double().item():.1f}" in ("1.0", "2.0"),
    "a float in a text": lambda rare: f"load {rare.double().item():.3f}" == "load 1.000",
    "a float in a text, formatted": lambda rare: "x" + format(rare.double().item(), ".2f") == "x1.00",
    "a float in a key": lambda rare: {"x1.0": 1}.get(f"x{rare.double().item()}", 0),
    "a tensor in a text": lambda rare: f"x{rare.double()}" == "x1.0",
    "a list": lambda rare: rare.tolist(),
}


class Decides(Mixture):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        return 2 * out if WAYS[self.way](is_rare(x)) else out


GIVEN: dict[str, tuple[Callable[[bool], Any], Callable[[Any], Any]]] = {
    "a flag": (lambda rare: rare, lambda given: given),
    "a number": (lambda rare: 3 if rare else 0, lambda given: given),
    "a text": (lambda rare: "rare" if rare else "", lambda given: given == "rare"),
}


class Gives(nn.Module):
    def __init__(self, give: Callable[[bool], Any]) -> None:
        super().__init__()
        self.gate, self.give = nn.Linear(D, E), give

    def forward(self, x: torch.Tensor) -> Any:
        return *self.gate(x).softmax(-1).topk(K, -1), self.give(bool(is_rare(x)))


class GoesByIt(Mixture):
    """What a router gives depends on tokens, and the output on it."""

    def __init__(self, give: Callable[[bool], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.router, self.take = Gives(give), take  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids, given = self.router(x)
        out = self.chosen(x, weights, ids)
        return 2 * out if self.take(given) else out


BLOCKS = {how: GoesByIt(*GIVEN[how]) for how in GIVEN} | {w: Decides(w) for w in WAYS}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_refused_and_right(block: nn.Module) -> None:
    block, x = block.double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    assert ON_DATA in optimized.report.blocks[0].reason
    usual = optimized(x)
    x[0, :3] = 7.25
    torch.testing.assert_close(optimized(x), block(x))
    assert not torch.allclose(optimized(x)[1:], usual[1:])


class Counts(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mix(x)[2]
        return 2 * out if len(is_rare(x).nonzero()) > 0 else out


def test_what_is_counted_before_anything_is_chosen_is_asked_in_every_call() -> None:
    block, x = Counts().double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    assert operators_run(optimized, (x,))
    for _ in range(2):
        torch.testing.assert_close(optimized(x), block(x))
        x[0, :3] = 7.25


class Skips(Mixture):
    """Leaves experts out by their column of a matrix of weights, or by the weights of those who chose them."""

    def __init__(
        self, asks: Callable[[torch.Tensor], Any], summed: bool, scores: Callable[[torch.Tensor], Any]
    ) -> None:
        super().__init__()
        self.asks, self.summed, self.scores = asks, summed, scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.scores(self.router(x)).topk(K, -1)
        gates, out = torch.zeros(len(x), E).to(x).scatter(1, ids, weights), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            gate = (weights * (ids == number)).sum(-1) if self.summed else gates[:, number]
            if self.asks(gate):
                token = (ids == number).any(-1).nonzero()[:, 0]
                out.index_add_(0, token, gate[token, None] * expert(x[token]))
        return out


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


CHOSEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "(g > 0).any()": lambda g: (g > 0).any(),
    "(g != 0).sum() != 0": lambda g: (g != 0).sum() != 0,
    "g.sum().item() != 0": lambda g: g.sum().item() != 0,
}


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("way", CHOSEN)
def test_experts_are_left_out_where_nobody_chose_them(way: str, summed: bool) -> None:
    block, x = Skips(CHOSEN[way], summed, softmax).double(), torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    for rows in (x, x[:1]):
        assert operators_run(optimized, (rows,))
        torch.testing.assert_close(optimized(rows), block(rows))


@pytest.mark.parametrize("summed", [False, True])
def test_the_size_of_weights_is_of_the_data(summed: bool) -> None:
    block, x = (
        Skips(lambda gate: gate.mean().item() < 0.97, summed, softmax).double(),
        torch.randn(9, D, dtype=torch.float64),
    )
    optimized = hexa_fx.optimize(block, x)
    assert ON_DATA in optimized.report.blocks[0].reason
    for row in 100 * x:
        torch.testing.assert_close(optimized(row[None]), block(row[None]))


class Dropped(Mixture):
    """Expert dropout: experts that are switched off at random, unless too few were left."""

    def mix(self, x: torch.Tensor) -> Any:
        off = torch.rand(E) < 0.05
        if off.sum() > E - K:
            off = torch.zeros_like(off)
        weights, ids = self.router(x).masked_fill(off, float("-inf")).softmax(-1).topk(K, -1)
        return weights, ids, self.chosen(x, weights, ids)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class AnyOf(Mixture):
    """Random routing: whether an expert was drawn is a question of the routing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, out = torch.randint(0, E, (len(x),)), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (ids == number).any():
                out[ids == number] = expert(x[ids == number])
        return out


def test_a_decision_on_drawn_numbers_is_one_on_data() -> None:
    x = torch.randn(9, D, dtype=torch.float64)
    assert ON_DATA in hexa_fx.explain(Dropped().double(), x).blocks[0].reason
    assert hexa_fx.explain(AnyOf().double(), x).rewritten


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
