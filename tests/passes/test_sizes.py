"""Conditions on sizes of what a block computes: asked at every call, in whatever layout its tokens come, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.passes.inputs.fresh_inputs import ExampleSizes
from tests.detect.mixture import D, E, Mixture
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
