"""Results that code leaves in lists, dicts and objects: a rewritten block must not lose them, nor analysis leave its own there."""

from __future__ import annotations

import copy
import dataclasses
import random
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.isolation.contents import contents
from hexa_fx.passes.canonicalize import canonicalize_block
from hexa_fx.passes.detect import MoEMatch, detect_block
from hexa_fx.passes.rewrite import rewrite_block
from hexa_fx.passes.verify import verify_block
from tests.zoo.common import MLP, TopKGate, experts, looped
from tests.zoo.compare import compare, operators_run
from tests.zoo.variant import D

LOSSES: list[torch.Tensor] = []


class Collector:
    latest: torch.Tensor | None = None
    of_all: ClassVar[list[torch.Tensor]] = []


@dataclasses.dataclass(slots=True)
class Slotted:
    latest: torch.Tensor | None = None
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Hidden(nn.Module):
    """Not registered with the block, which holds it in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []


class Listed(list[torch.Tensor]):
    pass


class Mixture(nn.Module):
    """A loop over experts that hands a loss to ``leave``."""

    def __init__(self, leave: Callable[[Mixture, torch.Tensor], Any], kept: Any = None) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(), experts(MLP)
        self.leave, self.kept = leave, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, D)
        weights, index = self.gate(x)
        self.leave(self, weights.square().mean())
        return looped(x, weights, index, self.experts)


def _tokens(count: int = 9) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


CHANGES: dict[str, tuple[Callable[[Mixture, torch.Tensor], Any], Callable[[], Any]]] = {
    "set": (lambda m, loss: m.kept.add(loss), set),
    "list of a class of its own": (lambda m, loss: m.kept.append(loss), Listed),
    "list that torch reads": (
        lambda m, loss: (m.kept.append(loss), torch.stack(m.kept)),
        list,
    ),
    "list in a list": (lambda m, loss: m.kept[0].append(loss), lambda: [[]]),
    "list of a hidden module": (
        lambda m, loss: m.kept[0].losses.append(loss),
        lambda: [Hidden()],
    ),
    "attribute of a hidden module": (
        lambda m, loss: setattr(m.kept[0], "loss", loss),
        lambda: [Hidden()],
    ),
    "attribute of an object, by its dict": (lambda m, loss: vars(m.kept).update(latest=loss), Collector),
    "list in a slot": (lambda m, loss: m.kept.losses.append(loss), Slotted),
    "ordered dict": (lambda m, loss: m.kept.update(loss=loss), OrderedDict),
    "namespace": (lambda m, loss: setattr(m.kept, "loss", loss), types.SimpleNamespace),
    "list of a class": (lambda m, loss: Collector.of_all.append(loss), lambda: None),
    "class": (lambda m, loss: setattr(Collector, "latest", loss), lambda: None),
}
REFUSED = {
    "set",
    "list of a class of its own",
    "list that torch reads",
    "attribute of an object, by its dict",
    "ordered dict",
    "namespace",
    "class",
}
"""The others are left."""


def _left(holder: Any) -> Any:
    """What lies in something and in what is inside it."""
    if isinstance(holder, torch.Tensor):
        return round(float(holder), 9)
    if isinstance(holder, (str, int, float, type(None))) or (
        callable(holder) and not isinstance(holder, (nn.Module, type))
    ):
        return None
    public = ((str(key), value) for key, value in contents(holder) if not str(key).startswith("_"))
    return [len(contents(holder)), *(_left(value) for key, value in public if key != "training")]


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_block_changes_in_place_is_left_as_it_leaves_it_or_refused(name: str) -> None:
    leave, kept = CHANGES[name]
    model = Mixture(leave, kept()).double()
    optimized = hexa_fx.optimize(copy.deepcopy(model), _tokens())
    assert (optimized.report.blocks[0].status == "refused") is (name in REFUSED), optimized.report
    Collector.latest, found = None, []
    for each in (model, optimized):
        Collector.of_all.clear()
        for count in (5, 3):
            each(_tokens(count))
        found.append((_left(each.kept), _left(Collector)))
    assert found[0] == found[1]
    Collector.of_all.clear()


def test_analysis_takes_its_own_out_again() -> None:
    LOSSES.clear()
    earlier = torch.ones(())
    held = Mixture(lambda m, loss: (m.kept.append(loss), LOSSES.append(loss)), [earlier]).double()
    assert hexa_fx.optimize_(held, _tokens()).report.rewritten
    assert held.kept == [earlier]
    assert not LOSSES
    held(_tokens())
    assert len(held.kept) == 2
    assert len(LOSSES) == 1


class CountingGate(TopKGate):
    """Keeps its losses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = super().forward(x)
        self.losses.append(weights.square().mean())
        return weights, index


def test_a_router_that_stays_a_call_may_keep_a_list() -> None:
    block = Mixture(lambda m, loss: None).double()
    block.gate = CountingGate().double()
    optimized = hexa_fx.optimize(block, _tokens())
    assert optimized.report.rewritten
    assert operators_run(optimized, (_tokens(),))
    before = len(optimized.gate.losses)
    optimized(_tokens(4))
    assert len(optimized.gate.losses) == before + 1
    assert compare(block, optimized, (_tokens(5),)).within(1e-10)


def test_a_dict_that_is_set_anew() -> None:
    def leave(mixture: Mixture, loss: torch.Tensor) -> None:
        mixture.kept = {"loss": loss, "both": [loss, loss.exp()]}

    block = Mixture(leave).double()
    optimized = hexa_fx.optimize(copy.deepcopy(block), _tokens())
    assert optimized.report.rewritten, str(optimized.report)
    for tokens in (_tokens(4), _tokens(6)):
        block(tokens), optimized(tokens)
        torch.testing.assert_close(optimized.kept, block.kept)
    optimized.kept["both"][1].backward()
    assert optimized.gate.weight.weight.grad.any()


def test_a_list_made_of_the_last_one_is_not_set_anew() -> None:
    """On the example it is a list of one; the second call's has two."""
    block = Mixture(lambda m, loss: setattr(m, "kept", [*m.kept, loss]), []).double()
    match = detect_block(canonicalize_block(capture(block, (_tokens(),), {}, "block")))
    assert isinstance(match, MoEMatch)
    result = verify_block(block, rewrite_block(match), (_tokens(),))
    assert "the code reads 'kept', which it sets itself in every call" in result.reason


def count(block: Any, loss: torch.Tensor) -> None:
    """Anew where a hook of an optimizer has put None in the place of the sum of the steps before."""
    calls = torch.ones(3, dtype=torch.long)
    if block.kept is None:
        block.kept = calls
    else:
        block.kept += calls


@pytest.mark.parametrize("is_buffer", [False, True])
def test_counts_that_are_begun_anew(is_buffer: bool) -> None:
    block = Mixture(count, torch.zeros(3, dtype=torch.long)).double()
    if is_buffer:
        block.register_buffer("kept", vars(block).pop("kept"))
    optimized = hexa_fx.optimize(copy.deepcopy(block), _tokens(), hexa_fx.HexaConfig(own_code_when_small=False))
    for call in range(6):
        if call % 3 == 2:
            block.kept = optimized.kept = None
        torch.testing.assert_close(optimized(_tokens(call + 4)), block(_tokens(call + 4)))
        assert torch.equal(optimized.kept, block.kept)
    assert vars(optimized)["forward"].ran >= 4, optimized.report


def test_a_model_that_ran_before_keeps_its_loss() -> None:
    """Tensors that autograd computed do not let themselves be copied."""
    block = Mixture(lambda m, loss: setattr(m, "kept", loss)).double()
    block(_tokens())
    optimized = hexa_fx.optimize(block, _tokens())
    assert optimized.report.rewritten
    optimized(_tokens(4)).sum().backward()
    assert optimized.kept.requires_grad
    assert optimized.kept is not block.kept


class Given(Mixture):
    """The loss goes into a list that the caller gives; the weights' scale may come in a dict."""

    def forward(
        self, x: torch.Tensor, losses: list[torch.Tensor], options: dict[str, Any] | None = None
    ) -> torch.Tensor:
        weights, index = self.gate(x)
        if options is None:
            losses.append(weights.square().mean())
        else:
            weights = weights * options["scale"]
        return looped(x, weights, index, self.experts)


def test_a_list_that_the_caller_gives() -> None:
    report = hexa_fx.explain(Given(None).double(), (_tokens(), []))
    assert not report.rewritten
    assert "the code changes the argument 'losses' in place" in report.blocks[0].reason


def test_a_tensor_that_is_given_inside_a_dict_by_no_name() -> None:
    report = hexa_fx.explain(Given(None).double(), (_tokens(), [], {"scale": torch.tensor(1.5)}))
    assert len(report.rewritten) == 1
    report = hexa_fx.explain(GivenInside(None).double(), ({("no", "name"): _tokens()},))
    assert "given inside an object, or a dict by a key that is no name" in report.blocks[0].reason


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor


class GivenInside(Mixture):
    def forward(self, batch: Any) -> torch.Tensor:
        tokens = batch["no", "name"] if isinstance(batch, dict) else batch.tokens
        return looped(tokens, *self.gate(tokens), self.experts)


@pytest.mark.parametrize("kind", [Batch, lambda tokens: types.SimpleNamespace(tokens=tokens)])
def test_tokens_that_are_given_inside_of_something(kind: Callable[[torch.Tensor], Any]) -> None:
    report = hexa_fx.explain(GivenInside(None).double(), (kind(_tokens()),))
    assert "given inside an object, or a dict by a key that is no name" in report.blocks[0].reason


DRAWS: dict[str, Callable[[Mixture, torch.Tensor], float]] = {
    "random": lambda m, weights: 1.0 + (random.random() < 0.1),
    "rand": lambda m, weights: 1.0 + (numpy.random.rand() < 0.1),
    "a torch.Generator of its own": lambda m, weights: torch.rand((), generator=m.kept, dtype=weights.dtype),
}


class Drawing(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        return looped(x, weights, index, self.experts) * self.leave(self, weights)


@pytest.mark.parametrize("label", DRAWS)
def test_random_numbers_that_are_not_torchs(label: str) -> None:
    generator = torch.Generator()
    block = Drawing(DRAWS[label], generator if label.startswith("a torch") else None).double()
    before = random.getstate()
    report = hexa_fx.explain(block, _tokens())
    assert not report.rewritten
    assert f"draws random numbers from {label}" in report.blocks[0].reason
    assert before == random.getstate()


NOT_DRAWN: list[Callable[[Mixture, torch.Tensor], float]] = [
    lambda m, weights: 1.0 + random.random() if m.training else 1.0,
    lambda m, weights: 1.0 + random.gauss(0, 1) if m.training else 1.0,
    lambda m, weights: 1.0 + numpy.random.rand() if m.training else 1.0,
]


@pytest.mark.parametrize("leave", NOT_DRAWN)
def test_random_numbers_that_a_call_does_not_draw(leave: Callable[[Mixture, torch.Tensor], float]) -> None:
    block = Drawing(leave).double()
    for training in (False, True):
        assert bool(hexa_fx.explain(block.train(training), _tokens()).rewritten) is not training
