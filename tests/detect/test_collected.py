"""What blocks leave behind, against the original in float64: losses in lists and dicts, plain values, what a first call sets up."""

import copy
import logging
import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import hexa_fx
from hexa_fx.capture.copies import deepcopied
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import compare, operators_run

LOSSES: list[Any] = []
START = {"scale": 2.0, "aux": None}


class Manager:
    def __init__(self) -> None:
        self.losses: list[Any] = []


class Block(Mixture):
    """Leaves a loss everywhere in train mode, and one on the output in a list in both modes."""

    def __init__(self, layer: int = 0, manager: Manager | None = None) -> None:
        super().__init__()
        self.layer, self.manager = layer, manager or Manager()
        self.losses: list[Any] = []
        self.latest: deque[Any] = deque(maxlen=2)
        self.stats: dict[Any, Any] = dict(START)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, weights, out, _ = self.mix(x)
        if self.training:
            self.losses.append(probs.sum(0).square().sum())
            self.losses += [(probs.logsumexp(-1).sum(), None)]
            self.stats[self.layer] = self.stats["aux"] = out.square().sum()
            self.manager.losses.extend([weights.square().sum(), weights.exp().sum()])
            LOSSES.append(probs.exp().sum())
        self.latest.append(out.detach().sum())
        return out


def tokens(count: int = 9) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


@pytest.fixture(autouse=True)
def no_losses() -> Iterator[None]:
    LOSSES.clear()
    yield
    LOSSES.clear()


@pytest.fixture(scope="module")
def made() -> tuple[Block, Block]:
    torch.manual_seed(0)
    block = Block().double()
    block(tokens()).sum().backward()  # left over from an earlier step, whose graph is gone
    LOSSES.clear()
    optimized = hexa_fx.optimize(block, tokens())
    assert not optimized.report.refused, str(optimized.report)
    return block, optimized


@pytest.fixture
def pair(made: tuple[Block, Block]) -> list[Block]:
    pair = [deepcopied(block, {}) for block in made]
    for block in pair:
        block.losses, block.manager.losses, block.stats = [], [], dict(START)
        block.latest.clear()
    return pair


def left(block: Block) -> list[Any]:
    """What lies in the lists and dicts, in order; a number for None."""
    named = [(str(key), value) for key, value in block.stats.items()]
    found = [
        block.losses,
        block.manager.losses,
        list(block.latest),
        LOSSES[:],
        [name for name, _ in named],
        dict(named),
    ]
    return tree_map(lambda value: 1.5 if value is None else len(value) if isinstance(value, str) else value, found)


def step(block: Block, x: torch.Tensor) -> list[Any]:
    """Everything that a step leaves, and all gradients, those through the lists included."""
    LOSSES.clear()
    out = block.train()(x)
    found = [out, *left(block)]
    loss = sum(w * t.sum() for w, t in enumerate(tree_leaves(found), 1) if _has_gradient(t))
    return [found, torch.autograd.grad(loss, list(block.parameters()))]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def test_optimize_leaves_nothing_behind(made: tuple[Block, Block]) -> None:
    block, optimized = made
    assert not LOSSES
    for either in (block, optimized):
        assert [len(either.losses), len(either.latest), len(either.manager.losses)] == [2, 1, 2]
        assert list(either.stats) == ["scale", "aux", 0]
    assert optimized.losses is not block.losses
    assert operators_run(optimized.train(), (tokens(7),))


@pytest.mark.parametrize("between", ["kept", "cleared", "replaced"])
def test_steps(pair: list[Block], between: str) -> None:
    for count in (7, 0, 1, 12):
        if between == "kept":
            pair[0](tokens(3)), pair[1](tokens(3))
            for block in pair:  # the first calls' graphs
                block.losses[:] = tree_map(_detached, block.losses)
        held = [block.losses for block in pair]
        ours, theirs = step(pair[1], tokens(count)), step(pair[0], tokens(count))
        torch.testing.assert_close(ours, theirs)
        assert all(block.losses is before for block, before in zip(pair, held))
        for block in pair:
            block.manager.losses = []
            block.stats = dict.fromkeys(block.stats)
            if between == "cleared":
                block.losses.clear()
            if between == "replaced":
                block.losses = []
    assert _runs(pair[1])


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _runs(block: Block) -> bool:
    ran = bool(operators_run(block, (tokens(5),)))  # on a copy
    block(tokens(5))
    return ran


@pytest.mark.parametrize("change", ["gone", "a tuple"])
def test_another_container_runs_the_blocks_own_code(pair: list[Block], change: str, caplog: Any) -> None:
    optimized = pair[1].train()
    if change == "gone":
        del optimized.manager.losses
    else:
        optimized.manager.losses = (1,)
    with caplog.at_level(logging.WARNING), pytest.raises(AttributeError, match=r"losses|extend"):
        optimized(tokens())
    assert "runs its original forward: self.manager.losses" in caplog.text
    assert len(optimized.losses) == 2, "added by the original alone"


def test_copies_pickles_and_undo(pair: list[Block]) -> None:
    optimized = pair[1].train()
    others = [copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized)), hexa_fx.undo_(copy.deepcopy(optimized))]
    assert [_runs(other) for other in others] == [True, True, False]
    expected = step(pair[0], tokens(4))
    for other in others:
        other.losses, other.manager.losses, other.stats = [], [], dict(START)
        other.latest.clear()
        torch.testing.assert_close(step(other, tokens(4)), expected)
    assert optimized.losses == []
    hexa_fx.undo_(optimized)
    torch.testing.assert_close(step(optimized, tokens(4)), expected)


def test_compiled_as_one_graph(pair: list[Block]) -> None:
    compiled = torch.compile(pair[1].train(), backend="eager", fullgraph=True)
    for count in (7, 8):
        pair[0](tokens(count)), compiled(tokens(count))
    torch.testing.assert_close(left(pair[1]), left(pair[0]))
    assert len(LOSSES) == 4
    torch.testing.assert_close(LOSSES[1::2], LOSSES[::2])


class Careless(Block):
    """Leaves one loss an expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]

    def inside(self, probs: torch.Tensor, number: int, last: torch.Tensor) -> None:
        self.losses.append(probs[:, number].mean())


class SkipsEmptyExperts(Careless):
    skip = True


class KeepsExpertOutput(Careless):
    def inside(self, probs: torch.Tensor, number: int, last: torch.Tensor) -> None:
        self.losses.append(last.sum())


class AddsToTheLast(Careless):
    def inside(self, probs: torch.Tensor, number: int, last: torch.Tensor) -> None:
        loss = probs[:, number].mean()
        self.stats["aux"] = loss if self.stats["aux"] is None else self.stats["aux"] + loss


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (SkipsEmptyExperts, "self.losses holds: not what the original has"),
        (KeepsExpertOutput, "expert outputs do not come together"),
        (AddsToTheLast, "the code reads self.stats"),
    ],
)
def test_refused(make: type[Careless], words: str) -> None:
    optimized = hexa_fx.optimize(make().double(), tokens())
    (report,) = optimized.report.blocks
    assert report.status == "refused"
    assert words in report.reason
    assert optimized.losses == []


class OfItsClass(Mixture):
    """Adds to lists of its class and of its Python module in train mode."""

    losses: ClassVar[list[Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        if self.training:
            self.losses.append(probs.square().sum())
            OfItsClass.losses.append(probs.exp().sum())
            LOSSES.append(out.square().sum())
        return out


def test_eval_asks_nothing_of_lists_that_training_adds_to() -> None:
    block, x = OfItsClass().double(), tokens()
    optimized = hexa_fx.optimize_(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    for step in range(1, 4):
        optimized.train()(x)
        optimized.eval()(x)
        assert (len(OfItsClass.losses), len(LOSSES)) == (2 * step, step)
    assert optimized.report.blocks[0].calls == (6, 0, {}, 2)


class Drawing(nn.Module):
    """A router that draws and gives gates: its call is opened, since what ids are computed from is drawn inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.losses: list[torch.Tensor] = []

    def keep(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = (self.gate(x) + 0.1 * torch.rand_like(x[:, :E])).softmax(-1)
        self.keep(probs.mean(0).square().sum())
        weights, ids = probs.topk(K)
        return torch.zeros_like(probs).scatter(1, ids, weights)


class Forgetful(Drawing):
    def keep(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)
        if len(self.losses) > 3:
            self.losses.pop(0)


class Gated(Mixture):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, out = self.router(x), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token = (gates[:, number] > 0).nonzero().flatten()
            out[token] += expert(x[token]) * gates[token, number, None]
        return out


def test_what_an_opened_router_adds() -> None:
    torch.manual_seed(0)
    block = Gated(Drawing()).double()
    optimized = hexa_fx.optimize(block, tokens(), hexa_fx.HexaConfig(own_code_when_small=False))
    for either in (block, optimized):
        torch.manual_seed(1)
        either(tokens(5))
    torch.testing.assert_close(optimized.router.losses, block.router.losses)
    assert operators_run(optimized, (tokens(5),))


def test_an_opened_router_that_takes_away_is_refused() -> None:
    optimized = hexa_fx.optimize(Gated(Forgetful()).double(), tokens())
    assert "the code reads router.losses" in optimized.report.blocks[0].reason


class Aggregator:
    """Keeps losses by their names, each kind in a list."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[Any]] = {"load": []}


AGGREGATORS = {"of a layer": [Aggregator()]}


class Routed(nn.Module):
    """A router that adds to a global list, and to one in a dict of an object in a list in a global dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, E)

    def forward(self, x: torch.Tensor) -> Any:
        probs = self.linear(x).softmax(-1)
        LOSSES.append(probs.square().sum())
        AGGREGATORS["of a layer"][0].kinds["load"].append(probs.sum(0).square().sum())
        return probs.topk(K)


class DroppingOut(nn.Module):
    """Slot by slot, where dropout is random by the order in which experts run: refused in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Routed()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.Linear(8, D), nn.Dropout()) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weights, ids), out = self.router(x), torch.zeros_like(x)
        for slot in range(K):
            for number, expert in enumerate(self.experts):
                chosen = ids[:, slot] == number
                out[chosen] += expert(x[chosen]) * weights[chosen, slot, None]
        return out


def test_a_report_that_is_first_made_in_a_call_adds_nothing() -> None:
    """What a block keeps for backward is measured by running it: the router's loss was counted three times in that call."""
    optimized = hexa_fx.optimize(DroppingOut().double(), tokens()).eval()
    assert not optimized.report.rewritten
    LOSSES.clear()
    (kept := AGGREGATORS["of a layer"][0].kinds["load"]).clear()
    optimized(tokens(5))
    assert optimized.report.rewritten
    assert len(LOSSES) == len(kept) == 1


def test_the_first_call_adds_once_to_lists_inside_of_what_a_global_holds() -> None:
    """What the analysis in it had added there stayed: the loss was counted thirty times, and the graphs of some were gone."""
    optimized = hexa_fx.optimize(DroppingOut().double().eval())
    (kept := AGGREGATORS["of a layer"][0].kinds["load"]).clear()
    optimized(tokens(5))
    assert optimized.report.rewritten
    (loss,) = kept
    loss.backward()


class Mode(Mixture):
    """A loss in train mode, and no loss as a number else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        self.aux_loss: Any = probs.pow(2).sum() if self.training else 0
        self.facts = {"trains": self.training, "scale": 0.5}
        return out


class StartsAtZero(Mode):
    def __init__(self) -> None:
        super().__init__()
        self.aux_loss = 0


class Saturates(Mixture):
    """Counts its first two calls."""

    steps = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = min(self.steps + 1, 5)
        return self.mix(x)[2] * self.steps


class FromFirstTokens(Mixture):
    """What it keeps is of the first tokens that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.mix(x - self.mean)[2]


class Grows(Mixture):
    """Keeps a table of as many rows as it needed so far."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table") or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype)[:, None].cos()
        return self.mix(x * self.table[: len(x)])[2]


class Average(Mixture):
    """Keeps an average as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(D, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.mean.dtype) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.mix(x.double())[2]


class TwoNames(Average):
    """Keeps the same tensor by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.other = [self.mean]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x + self.mean)[2]


class Keeps(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        self.told = f"{probs.max().item():.1f}"
        return out


def _x(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def _optimized(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = kind().double()
    return block, hexa_fx.optimize(block, _x(9))


@pytest.mark.parametrize("kind", [Mode, StartsAtZero])
def test_plain_values_are_set_in_every_call(kind: type[Mode]) -> None:
    block, opt = _optimized(kind)
    assert hasattr(opt, "aux_loss") is (kind is StartsAtZero)
    for train in (False, True, False):
        assert operators_run(opt.train(train), (_x(7),))
        for each in (block, opt):
            each.train(train)(_x(7))
        torch.testing.assert_close(opt.aux_loss, block.aux_loss)
        assert opt.facts == block.facts == {"trains": train, "scale": 0.5}


def test_a_number_that_first_calls_bring_to_its_end() -> None:
    block, opt = _optimized(Saturates)
    for tokens in (5, 7, 9, 7):
        torch.testing.assert_close(opt(_x(tokens)), block(_x(tokens)))
        assert opt.steps == block.steps
    assert operators_run(opt, (_x(7),))
    opt.steps = block.steps = 1
    torch.testing.assert_close(opt(_x(5)), block(_x(5)))
    assert opt.steps == block.steps == 2


@pytest.mark.parametrize("kind", [FromFirstTokens, Grows, Average])
def test_tensors_that_modules_hold_as_attributes_are_read_in_every_call(kind: type[nn.Module]) -> None:
    block, opt = _optimized(kind)
    name = "table" if kind is Grows else "mean"
    assert getattr(opt, name, None) is None or kind is Average
    for tokens in (5, 9, 7):
        torch.testing.assert_close(opt(_x(tokens)), block(_x(tokens)))
    for changed in (lambda held: held + 1, torch.Tensor.float):
        for each in (block, opt):
            setattr(each, name, changed(getattr(each, name)))
        assert operators_run(copy.deepcopy(opt), (_x(7),)) or getattr(opt, name).dtype == torch.float32
        found = compare(block, opt, (_x(7),), train=True)
        in_32_bits = (
            getattr(opt, name).dtype == torch.float32
        )  # gradients of tokens come together before a cast or behind it
        assert found.within(1e-6 if in_32_bits else 1e-10), found
        torch.testing.assert_close(getattr(opt, name), getattr(block, name))
    for tokens in (12, 7):
        torch.testing.assert_close(opt(_x(tokens)), block(_x(tokens)))


def test_a_tensor_that_lies_elsewhere_too_is_refused() -> None:
    (report,) = hexa_fx.explain(TwoNames().double(), _x(9)).blocks
    assert "neither a parameter nor a buffer" in report.reason


def test_texts_of_numbers_that_are_kept_are_refused_at_their_line() -> None:
    (report,) = hexa_fx.explain(Keeps().double(), _x(9)).blocks
    assert "takes a host decision (if, while, item()) on the data" in report.reason
    assert "test_collected.py" in str(report.location)
