"""Conditions on sizes and limits on tokens: asked at every call, tried, or refused; a wait that never ends is ended."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.isolation import trial_modes
from hexa_fx.passes.inputs.fresh_inputs import ExampleSizes
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import compare, operators_run

Tensor = torch.Tensor
Ask = Callable[[Tensor, Tensor], Any]


class Sentences(Mixture):
    """(batch, sequence, D); halves what the experts give where ``ask`` says so of that and of the input."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, D)

    def back(self, out: Tensor, x: Tensor) -> Tensor:
        return out.view(x.shape[0], -1, D)

    def forward(self, x: Tensor) -> Tensor:
        result = self.back(self.mix(self.rows(x))[2], x)
        return 0.5 * result if self.ask(result, x) else result


class Images(Sentences):
    """(batch, D, height, width)."""

    def rows(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2).reshape(-1, D)

    def back(self, out: Tensor, x: Tensor) -> Tensor:
        return super().back(out, x).transpose(1, 2).view_as(x)


class Films(Sentences):
    """(batch, D, time, height, width)."""

    def rows(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 4, 1).reshape(-1, D)

    def back(self, out: Tensor, x: Tensor) -> Tensor:
        return out.view(x.shape[0], *x.shape[2:], D).permute(0, 4, 1, 2, 3)


SHAPES = {
    Sentences: ((2, 7, D), (1, 7, D), (1, 1, D), (3, 1, D)),
    Images: ((2, D, 7, 3), (1, D, 7, 3), (1, D, 1, 1), (2, D, 3, 7)),
    Films: ((2, D, 3, 5, 2), (1, D, 3, 5, 2), (2, D, 1, 1, 1)),
}
ASKS: dict[str, Ask] = {
    "equal": lambda out, x: out.shape[0] == 1,
    "all": lambda out, x: 1 in out.size(),
    "below": lambda out, x: len(out) < 2,
    "elements": lambda out, x: out.numel() < 20 * D,
    "index": lambda out, x: [1, 1, 0, 0][out.shape[0]],
    "text": lambda out, x: f"{out.shape[0]}" == "1",
    "of its own": lambda out, x: out.reshape(-1, 2 * D if out.numel() % (2 * D) == 0 else D).shape[0] < 4,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_a_condition_on_a_size_of_the_result_is_asked_at_every_call(kind: type[Sentences], ask: Ask) -> None:
    model, shapes = kind(ask).double(), SHAPES[kind]
    opt = hexa_fx.optimize(copy.deepcopy(model), torch.randn(shapes[0], dtype=torch.float64))
    assert opt.report.blocks[0].status == "rewritten", opt.report.blocks[0].reason
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64)
        assert compare(model, opt, (x,), {}).within(1e-9), shape
    assert operators_run(opt, (torch.randn(shapes[0], dtype=torch.float64),))


class Fixed(Images):
    """Takes images of one size only, and counts them in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.back(self.mix(self.rows(x.flatten(2).unflatten(2, (7, 3))))[2], x)
        return result if len([*range(len(result))]) > 1 else 0.5 * result


def test_images_are_tried_in_other_numbers_where_their_size_is_fixed() -> None:
    block, x = Fixed(ASKS["equal"]), torch.randn(2, D, 7, 3)
    (report,) = hexa_fx.explain(block, x).blocks
    assert report.status == "refused"
    assert "batch 1 alone: output 0" in report.reason


class InSevens(Sentences):
    """Cuts windows of seven tokens, within which it adds up; no size of a tensor tells them from sentences of seven."""

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 7, D)
        weights, ids = self.router(windows).softmax(-1).topk(K)
        gates = torch.zeros(*windows.shape[:-1], E, dtype=x.dtype).scatter(-1, ids, weights)
        dense = torch.stack([expert(windows) for expert in self.experts], -1)
        return torch.einsum("wtde,wte->wtd", dense, gates).cumsum(1).reshape(x.shape)


def test_windows_as_long_as_the_example_are_no_sentences() -> None:
    block, x = InSevens(ASKS["equal"]).double(), torch.randn(2, 7, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert compare(block, opt, (torch.randn(1, 14, D, dtype=torch.float64),)).within(1e-10), opt.report


@pytest.mark.parametrize(
    ("shapes", "size", "expected"),
    [
        (((2, D, 7, 3),), (1, 40), ((1, D, 40, 1),)),
        (((2, 7, 3, D),), (1, 40), ((1, 40, 1, D),)),
        (((2, 7, 3, D), (2, 7, 3), (2, 21, 2)), (3, 5), ((3, 5, 1, D), (3, 5, 1), (3, 5, 2))),
        (((2, D, 7, 3), (2, 1, 7, 3)), (1, None), ((1, D, 7, 3), (1, 1, 7, 3))),
        (((2, D, D, 3),), (1, 40), ((1, D, D, 3),)),
        (((2, D, 2, 7, 3),), (0, 4), ((0, D, 4, 1, 1),)),
        (((2, 7, D), (2, 7)), (None, 3), ((2, 3, D), (2, 3))),
    ],
)
def test_shapes_at_other_sizes(shapes: tuple, size: tuple, expected: tuple) -> None:
    leaves = [torch.zeros(shape) for shape in shapes]
    sizes = ExampleSizes.of(leaves, {D})
    assert tuple(sizes.resized(leaf, size) for leaf in leaves) == expected


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x))) * self.scale


class ChosenAtRandom(nn.Module):
    """Draws as many ids as what experts give has rows."""

    def __init__(self, rows_of: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.experts, self.rows_of = nn.ModuleList(Expert() for _ in range(E)), rows_of

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts])
        chosen = torch.randint(0, E, (self.rows_of(outputs),))
        for number in range(E):
            outputs[number] *= chosen.eq(number).unsqueeze(-1)
        return outputs.sum(0)


@pytest.mark.parametrize(
    ("rows_of", "runs"),
    [(lambda y: y.size(1), False), (lambda y: nn.functional.pad(y, (1, 0)).size(1), True)],
    ids=["traced", "not traced"],
)
def test_a_size_of_what_experts_give(rows_of: Callable[[Tensor], int], runs: bool) -> None:
    """Is one of an input, so that experts need not run for it. Where they do, what they read is watched."""
    torch.manual_seed(0)
    block = ChosenAtRandom(rows_of).double()
    original, x = copy.deepcopy(block), torch.randn(9, D, dtype=torch.float64)
    config = hexa_fx.HexaConfig.from_environment(own_code_when_small=False)
    hexa_fx.optimize_(block, (x,), config)
    for scale in (1.0, 0.5):
        results = []
        for model in (block, original):
            for expert in model.experts:
                expert.scale = scale
            torch.manual_seed(1)
            results.append(model(x))
        torch.testing.assert_close(*results)
    (calls,) = [each.calls for each in block.report.blocks]
    assert calls.rewritten == 2
    (program,) = {each.program.source for each in block.forward.specialisations[:1]}
    assert ("self.experts" in program) == runs


class Cut(Mixture):
    """Experts have room for some tokens."""

    room = 20000

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return weights, ids

    def kept(self, token: torch.Tensor) -> Any:
        return token[: self.room]

    def result(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            token, slot = self.kept(token), self.kept(slot)
            out.index_add_(0, token, self.result(expert(x[token]), len(token)) * weights[token, slot, None])
        return out


def cutting(**members: Any) -> type[Cut]:
    return type("Cutting", (Cut,), members)


def whole(self: nn.Module, token: torch.Tensor) -> torch.Tensor:
    return token


def set_to_zero(self: Cut, y: torch.Tensor, rows: int) -> torch.Tensor:
    y[self.room :] = 0
    return y


class AboveABuffer(Cut):
    room = 300

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(300))

    def kept(self, token: torch.Tensor) -> Any:
        return token if len(token) <= self.most else token[:0]


class Bound(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clamp(-16384, 16384.0)


class Bounded(Cut):
    """What bounds numbers is no limit on tokens."""

    kept = whole

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), Bound(), nn.Linear(8, D)) for _ in range(E))


class ByPlace(Cut):
    """No router can be made to choose otherwise."""

    room = 600

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(len(x))[:, None] % E
        return torch.ones_like(ids, dtype=x.dtype), ids


class ByThreshold(ByPlace):
    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.bucketize(self.router(x)[:, :1].detach(), torch.tensor([-0.3, 0.0, 0.3]))
        return torch.ones_like(ids, dtype=x.dtype), ids


NOT_TRIED = {
    "cut": Cut,
    "left": cutting(
        kept=lambda self, token: token[: min(len(token), self.room)] if len(token) < 2 * self.room else token[:0]
    ),
    "first part": cutting(kept=lambda self, token: token.split(self.room)[0]),
    "scaled": cutting(kept=whole, result=lambda self, y, rows: y * (2e4 / max(rows, 2e4))),
    "by place": ByPlace,
    "by threshold": ByThreshold,
}


@pytest.mark.parametrize("block", NOT_TRIED.values(), ids=NOT_TRIED)
def test_limits_that_are_not_tried_are_refused(block: type[Cut]) -> None:
    (report,) = hexa_fx.explain(block().eval(), torch.randn(21, D)).blocks
    assert report.status == "refused"
    assert "the code cuts lists of tokens, or compares how many there are" in report.reason
    assert report.location is not None


TRIED = {
    "last ones": cutting(room=300, kept=lambda self, token: token[-self.room :]),
    "between places": cutting(room=300, kept=lambda self, token: token.tensor_split([self.room])[0]),
    "too many": cutting(
        room=300, kept=lambda self, token: token[left:] if (left := len(token) - self.room) > 0 else token
    ),
    "above a buffer": AboveABuffer,
    "above a float": cutting(room=300, kept=lambda self, token: token if len(token) <= 300.5 else token[:0]),
    "set to zero": cutting(room=300, kept=whole, result=set_to_zero),
}


@pytest.mark.parametrize("block", TRIED.values(), ids=TRIED)
def test_more_tokens_are_tried_than_they_say(block: type[Cut]) -> None:
    """They are so large that verification has no other reason to try as many."""
    model = block()
    wide = nn.ModuleList(nn.Sequential(nn.Linear(D, 2048), nn.GELU(), nn.Linear(2048, D)) for _ in range(E))
    model.experts = wide
    optimized = hexa_fx.optimize(copy.deepcopy(model), torch.randn(21, D))
    tokens = torch.randn(1, D).expand(2 * model.room + 5, D).contiguous()
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens), model(tokens))


def test_bounds_of_features_are_no_limits() -> None:
    optimized = hexa_fx.optimize(Bounded(), torch.randn(21, D))
    with torch.no_grad():
        assert operators_run(optimized, (torch.randn(17000, D),))


def test_limits_that_were_tried_are_none() -> None:
    model = Cut()
    model.room = 100
    optimized = hexa_fx.optimize(model, torch.randn(21, D))
    assert operators_run(optimized, (torch.randn(500, D),))


class Sinkhorn(nn.Linear):
    """Balances costs until they change no more, which takes forever where they are far apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        cost, columns, before, change = scores.detach().exp(), torch.ones(E, dtype=x.dtype), 0.0, 1.0
        while change > 1e-4:
            rows = 1 / len(cost) / ((columns * cost).sum(1) + 1e-8)
            columns = 1 / E / ((rows[:, None] * cost).sum(0) + 1e-8)
            change, before = (before - columns).abs().mean(), columns
        return scores + 0 * columns.sum()


class Balanced(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.router = Sinkhorn(D, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class Waits(Mixture):
    """Does not end on what is made up for inputs beside the tokens either, in its own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().max()
        while scale > 20:
            scale = scale + 0
        return self.mix(x)[2]


@pytest.mark.parametrize("block", [Balanced, Waits])
def test_optimize_ends(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_modes, "MOST_CALLS", 5000)
    torch.manual_seed(0)
    model, x = block().double(), torch.randn(24, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(model), x)
    (report,) = opt.report.blocks
    if report.status == "rewritten":
        assert operators_run(opt, (x,))
    else:
        assert "host decision" in report.reason
    assert compare(model, opt, (x,)).within(1e-10)


def test_a_run_that_does_not_end_says_so() -> None:
    def waits() -> None:
        number = torch.zeros(())
        while number < 1:
            number = number * 1

    with trial_modes.Bounded(), pytest.raises(trial_modes.Endless, match="had not ended after 200000 calls of torch"):
        waits()
