"""Results that the code keeps on modules and on plain objects: the rewritten block sets them too, or the block is left alone."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.isolation.contents import contents
from hexa_fx.isolation.outcome import same_fact
from tests.detect.mixture import D, E, K, Mixture
from tests.zoo.compare import operators_run


class Block(Mixture):
    """`keep` says what is left on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: torch.Tensor | None = None
        self.seen: object = None

    def keep(self, probs: torch.Tensor, out: torch.Tensor, last: torch.Tensor) -> None:
        if self.training:
            self.aux_loss = (probs.mean(0) ** 2).sum() + 0.1 * out.pow(2).mean()
            self.seen = (probs, [out.abs().sum()], {"from": "mixture", "of": f"{len(out)} tokens", "env": None})
        else:
            self.aux_loss = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, last = self.mix(x)
        self.keep(probs, out, last)
        return out


class KeepsTuples(Block):
    def __init__(self) -> None:
        super().__init__()
        self.named = (1, "mixture")

    def keep(self, probs: torch.Tensor, out: torch.Tensor, last: torch.Tensor) -> None:
        self.seen, self.named = (1, None), (1, "mixture")


def optimized(make: type[Block]) -> tuple[Block, Block]:
    torch.manual_seed(0)
    model = make().double()
    return model, hexa_fx.optimize(model, torch.randn(9, D, dtype=torch.float64))


def test_values_and_their_gradients():
    model, opt = optimized(Block)
    assert "moe_ffn" in opt.graphs[""].rewritten.code
    x = torch.randn(7, D, dtype=torch.float64)
    found = []
    for block in (model.train(), opt.train()):
        out = block(x)
        assert block.aux_loss is not None
        loss = block.aux_loss + out.sum() + block.seen[1][0]
        found.append([block.aux_loss, *torch.autograd.grad(loss, list(block.parameters()))])
        assert isinstance(block.seen, tuple)
        assert isinstance(block.seen[1], list)
        assert block.seen[2] == {"from": "mixture", "of": "7 tokens", "env": None}
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)
    opt.eval()(x)
    assert opt.aux_loss is None
    assert isinstance(opt(x), torch.Tensor)


class Counts(Mixture):
    """Keeps a number that it adds to in every call; ``count``: what it does with it."""

    def __init__(self, count: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.count, self.kept, self.last = count, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        scale = self.count(self, x, probs)
        return out if scale is None else out * scale


def calls(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept += 1


def tokens(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept = m.kept + x.shape[0] if m.training else m.kept


def numbers(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept += probs.max().item()


def tensors(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept = m.kept + probs.max()


def cooling(m: Any, x: torch.Tensor, probs: torch.Tensor) -> float:
    m.kept += 1
    return max(0.9, 1 - 0.02 * m.kept)


def now_and_then(m: Any, x: torch.Tensor, probs: torch.Tensor) -> None:
    m.kept += 1
    if m.kept % 3 == 0:
        m.last = probs.mean().item()


@pytest.mark.parametrize(
    "count", [calls, tokens, numbers, tensors, cooling, now_and_then], ids=lambda count: count.__name__
)
def test_a_number_that_a_block_adds_to(count: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
    block = Counts(count).double()
    optimized = hexa_fx.optimize(copy.deepcopy(block), None)
    for number in (9, 4, 7, 5, 9, 3, 8):
        x = torch.randn(number, D, dtype=torch.float64)
        torch.testing.assert_close(optimized(x), block(x))
        torch.testing.assert_close((optimized.kept, optimized.last), (block.kept, block.last))
        assert type(optimized.kept) is type(block.kept)
    assert not optimized.report.blocks[0].calls.own, str(optimized.report)


class LeftByTraining(Mixture):
    """What a call in train mode leaves is a part of what a call in eval mode gives; ``resets``: which leaves nothing itself."""

    resets = False

    def __init__(self) -> None:
        super().__init__()
        self.load: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        result = out if self.training or self.load is None else out * self.load
        if self.training or self.resets:
            self.load = probs.mean(0).sum().detach() + 1 if self.training else None
        return result


class LeftAndReset(LeftByTraining):
    resets = True


@pytest.mark.parametrize("kind", [LeftByTraining, LeftAndReset])
def test_what_another_mode_left_is_a_condition(kind: type[LeftByTraining]) -> None:
    block, x = kind(), torch.randn(12, D)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    assert opt.report.blocks[0].status == "rewritten"
    for training in (False, True, False, False, True, True, False):
        block.train(training)
        opt.train(training)
        torch.testing.assert_close(opt(x), block(x))
        torch.testing.assert_close(opt.load, block.load)


def test_tuples_of_plain_values_that_are_always_the_same():
    model, opt = optimized(KeepsTuples)
    assert opt.report.rewritten
    for each in (model, opt):
        del each.seen, each.named
        each(torch.randn(5, D, dtype=torch.float64))
    assert (opt.seen, opt.named) == (model.seen, model.named)


class Dispatcher:
    """Keeps what `combine` needs from `dispatch`, as those of Megatron-core do, and on one device that of rhymes-ai/Aria."""

    def __init__(self) -> None:
        self.shape: torch.Size | None = None
        self.order = self.probs = self.counts = None

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.shape = x.shape
        self.order = ids.flatten().argsort(stable=True)
        self.probs = weights.flatten()[self.order]
        self.counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        self.rows = self.order // K
        return x.reshape(-1, D)[self.rows]

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        flat = out.new_zeros(self.shape.numel() // D, D)
        return flat.index_add_(0, self.rows, out * self.probs[:, None]).reshape(self.shape)


class Dispatching(nn.Module):
    """`held` makes what the module holds, `get` says how its code comes to the dispatcher."""

    held: ClassVar[Callable[[], Any]] = Dispatcher

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))
        self.dispatcher = type(self).held()

    def get(self) -> Any:
        return self.dispatcher

    def run(self, dispatcher: Any, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x.reshape(-1, D)).softmax(-1).topk(K)
        rows = dispatcher.dispatch(x, weights, ids).split(dispatcher.counts)
        return dispatcher.combine(torch.cat([expert(part) for expert, part in zip(self.experts, rows)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.get(), x)


@dataclasses.dataclass(slots=True)
class InSlots:
    shape: Any = None
    order: Any = None
    probs: Any = None
    counts: Any = None
    rows: Any = None
    dispatch = Dispatcher.dispatch
    combine = Dispatcher.combine


class Inner:
    def __init__(self) -> None:
        self.inner, self.counts = Dispatcher(), []

    def dispatch(self, *given: torch.Tensor) -> torch.Tensor:
        rows = self.inner.dispatch(*given)
        self.counts = self.inner.counts
        return rows

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        return self.inner.combine(out)


class Tidy(Dispatcher):
    """Leaves nothing, and removes what it set."""

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        result = super().combine(out)
        self.order = self.probs = None
        del self.rows
        return result


class WithProperty(Dispatcher):
    @property
    def order(self) -> Any:
        return self._order

    @order.setter
    def order(self, value: Any) -> None:
        self._order = value


class Listed(Dispatching):
    held = staticmethod(lambda: [Dispatcher()])

    def get(self) -> Any:
        return self.dispatcher[0]


class OfTheClass(Dispatching):
    held = staticmethod(lambda: None)
    of_all = Dispatcher()

    def get(self) -> Any:
        return self.of_all


class Bound(Dispatching):
    """Holds a method of it alone."""

    held = staticmethod(lambda: Dispatcher().dispatch)

    def get(self) -> Any:
        return self.dispatcher.__self__


_HELD = (Dispatcher, InSlots, Inner, Tidy, WithProperty)
KINDS: dict[str, type[Dispatching]] = {
    held.__name__: type(held.__name__, (Dispatching,), {"held": held}) for held in _HELD
}
KINDS |= {kind.__name__: kind for kind in (Listed, OfTheClass, Bound)}


def states(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, D, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


def pair(kind: type[nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    block = kind().double()
    return block, hexa_fx.optimize(block, states(3, 7))


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
    block, opt = pair(KINDS[name])
    assert opt.report.blocks[0].status == "rewritten"
    for training, *sizes in ((False, 3, 7), (True, 2, 5), (False, 1, 1), (True, 9), (True, 0)):
        x, found = states(*sizes), []
        for each in (block.train(training), opt.train(training)):
            found.append((each(x), left(each.get())))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1].keys() == found[1][1].keys()
        assert all(same_fact(one, found[1][1][key]) for key, one in found[0][1].items())
    assert operators_run(opt, (states(3, 7),))


class Scaled(Dispatcher):
    factor: Any = 2.0

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.counts is not None:
            weights = weights * self.factor
        self.name = "scaled"
        return super().dispatch(x, weights, ids)


def test_what_is_read_before_it_is_set_is_a_condition() -> None:
    block, opt = pair(type("Scales", (Dispatching,), {"held": Scaled}))
    assert opt.report.blocks[0].status == "rewritten"
    changes = ({}, {}, {"factor": 3.0}, {"counts": None}, {"name": "other"}, {})
    for change in changes:
        found = []
        for each in (block, opt):
            vars(each.dispatcher).update(change)
            found.append((each(states(2, 5)), left(each.dispatcher)))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1].keys() == found[1][1].keys()
        assert all(same_fact(one, found[1][1][key]) for key, one in found[0][1].items())


class TwoDispatchers(Dispatching):
    """Has two dispatchers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Dispatcher()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.run(self.dispatcher, x)
        self.other.probs = self.dispatcher.probs.sum()
        return out


def test_an_object_that_is_exchanged() -> None:
    block, opt = pair(TwoDispatchers)
    assert opt.report.blocks[0].status == "rewritten"
    found = []
    for each in (block, opt):
        each.other = Dispatcher()
        found.append((each(states(2, 5)), *(left(getattr(each, key)) for key in ("dispatcher", "other"))))
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


class KeptAnew(Dispatching):
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
    block, opt = pair(kind if issubclass(kind, Dispatching) else type("Refused", (Dispatching,), {"held": kind}))
    assert opt.report.blocks[0].status == "refused"
    assert words in opt.report.blocks[0].reason
    torch.testing.assert_close(opt(states(2, 5)), block(states(2, 5)))


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


class Managed(Dispatching):
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
