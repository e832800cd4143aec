"""What blocks keep on plain objects during a call and leave there: dispatchers, dataclasses, slots, dicts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.isolation.contents import contents
from hexa_fx.isolation.outcome import same_fact
from tests.detect import dispatchers
from tests.detect.dispatchers import Block, D, Dispatcher
from tests.zoo.compare import operators_run

_HELD = "Dispatcher InSlots Inner Tidy WithProperty".split()
KINDS: dict[str, type[Block]] = {name: type(name, (Block,), {"held": getattr(dispatchers, name)}) for name in _HELD}
KINDS |= {kind.__name__: kind for kind in (dispatchers.Listed, dispatchers.OfTheClass, dispatchers.Bound)}


def tokens(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, D, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


def optimized(kind: type[nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    block = kind().double()
    return block, hexa_fx.optimize(block, tokens(3, 7))


def left(holder: Any) -> dict[str, Any]:
    """Everything that lies in an object and in those inside it."""
    found: dict[str, Any] = {}
    for name, value in contents(holder):
        if isinstance(value, torch.Tensor):
            found[str(name)] = value.tolist()
        elif isinstance(value, (int, list, type(None))):
            found[str(name)] = value if not isinstance(value, list) or value[:1] != [holder] else None
        else:
            found |= {f"{name}.{inner}": kept for inner, kept in left(value).items()}
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_object_holds_what_the_original_would_have_left_there(name: str) -> None:
    block, opt = optimized(KINDS[name])
    assert opt.report.blocks[0].status == "rewritten"
    for training, *sizes in ((False, 3, 7), (True, 2, 5), (False, 1, 1), (True, 9), (True, 0)):
        x, found = tokens(*sizes), []
        for each in (block.train(training), opt.train(training)):
            found.append((each(x), left(each.get())))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1].keys() == found[1][1].keys()
        assert all(same_fact(one, found[1][1][key]) for key, one in found[0][1].items())
    assert operators_run(opt, (tokens(3, 7),))


class Scaled(Dispatcher):
    factor: Any = 2.0

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.counts is not None:
            weights = weights * self.factor
        self.name = "scaled"
        return super().dispatch(x, weights, ids)


def test_what_is_read_before_it_is_set_is_a_condition() -> None:
    block, opt = optimized(type("Scales", (Block,), {"held": Scaled}))
    assert opt.report.blocks[0].status == "rewritten"
    changes = ({}, {}, {"factor": 3.0}, {"counts": None}, {"name": "other"}, {})
    for change in changes:
        found = []
        for each in (block, opt):
            vars(each.dispatcher).update(change)
            found.append((each(tokens(2, 5)), left(each.dispatcher)))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1].keys() == found[1][1].keys()
        assert all(same_fact(one, found[1][1][key]) for key, one in found[0][1].items())


class TwoDispatchers(Block):
    """Has two dispatchers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Dispatcher()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.run(self.dispatcher, x)
        self.other.probs = self.dispatcher.probs.sum()
        return out


def test_an_object_that_is_exchanged() -> None:
    block, opt = optimized(TwoDispatchers)
    assert opt.report.blocks[0].status == "rewritten"
    found = []
    for each in (block, opt):
        each.other = Dispatcher()
        found.append((each(tokens(2, 5)), *(left(getattr(each, key)) for key in ("dispatcher", "other"))))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert all(map(same_fact, *([list(kept.values()) for kept in one[1:]] for one in found)))


class Throughout(Dispatcher):
    def dispatch(self, *given: torch.Tensor) -> torch.Tensor:
        rows = super().dispatch(*given)
        vars(self)["last"] = self.probs
        return rows


class Average(Dispatcher):
    average: Any = None

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        self.average = self.probs if self.average is None else self.average.mean() + self.probs
        return super().combine(out)


class KeptAnew(Block):
    def get(self) -> Any:
        self.dispatcher = Dispatcher()
        return self.dispatcher


class Fullest(Dispatcher):
    """What it leaves hangs on the routing, by way of Python."""

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        self.full = bool((self.order.bincount() > 9).any())
        self.mode = "full" if max(self.counts) > 9 else "fits"
        return super().combine(out)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Throughout, "the code changes self.dispatcher in place"),
        (Average, "(self.dispatcher.average), which the rewritten block would not update"),
        (KeptAnew, "(self.dispatcher), which the rewritten block would not update; tensors, their sizes"),
        (Fullest, ""),
    ],
)
def test_refused_with_a_sentence(kind: type[Any], words: str) -> None:
    block, opt = optimized(kind if issubclass(kind, Block) else type("Refused", (Block,), {"held": kind}))
    assert opt.report.blocks[0].status == "refused"
    assert words in opt.report.blocks[0].reason
    torch.testing.assert_close(opt(tokens(2, 5)), block(tokens(2, 5)))


class Manager:
    """Is told where and as what a result was computed."""

    said: Any = None


MANAGER = Manager()
SAID: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda out: out.dtype,
    "device": lambda out: out.device,
    "tuple": lambda out: (1, 2),
    "text": lambda out: "of the block",
}


class Managed(Block):
    """Tells a manager, its own or a global one."""

    def __init__(self, own: bool, what: str) -> None:
        super().__init__()
        self.manager, self.what = Manager() if own else None, what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, manager = super().forward(x), self.manager or MANAGER
        manager.said = SAID[self.what](out)
        return out


@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("own", [True, False])
def test_what_is_no_number_is_set_too(own: bool, what: str) -> None:
    """On a global object it was lost in silence."""
    block = Managed(own, what)
    opt = hexa_fx.optimize(block, torch.randn(3, 7, D))
    for value in (None, None, "else"):
        found = []
        for each in (block, opt):
            manager = each.manager or MANAGER
            manager.said = value
            each(torch.randn(2, 5, D))
            found.append(manager.said)
        assert found[0] == found[1] is not value
    assert "own code" not in str(opt.report)
