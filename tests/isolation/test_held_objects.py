"""What objects that a block holds contain is asked at every call, noticed when it changes, and put back as it was."""

import argparse
import copy
import dataclasses
import enum
import functools
import logging
import pathlib
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.isolation import module_state
from hexa_fx.isolation.contents import Contents, Holder
from tests.zoo.compare import operators_run

D, E = 8, 4


class Scores(enum.Enum):
    SOFTMAX, SIGMOID = "softmax", "sigmoid"


@dataclasses.dataclass
class Routing:
    top_k: int = 2
    norm_topk_prob: bool = True
    scaling_factor: float = 1.5
    scores: Scores = Scores.SOFTMAX
    scales: list[float] = dataclasses.field(default_factory=lambda: [1.0, 1.0])


@dataclasses.dataclass
class Config:
    routing: Routing = dataclasses.field(default_factory=Routing)
    hidden_act: str = "relu"
    use_cache: bool = True
    dtype: str = "float32"

    @property
    def activation(self):
        return ACTIVATIONS[self.hidden_act]

    def normalised(self):
        return self.routing.norm_topk_prob


@dataclasses.dataclass(slots=True)
class WithSlots:
    routing: Routing = dataclasses.field(default_factory=Routing)
    hidden_act: str = "relu"
    use_cache: bool = True
    dtype: str = "float32"
    activation = Config.activation
    normalised = Config.normalised


class Aliases:
    """Some names stand for others, as in transformers' configs; others come from elsewhere."""

    attribute_map: ClassVar = {"hidden_act": "act"}

    def __init__(self):
        self.routing, self.act, self.use_cache, self.dtype = Routing(), "relu", True, "float32"

    def __setattr__(self, name, value):
        super().__setattr__(self.attribute_map.get(name, name), value)

    def __getattribute__(self, name):
        return super().__getattribute__(super().__getattribute__("attribute_map").get(name, name))

    activation = Config.activation
    normalised = Config.normalised


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


class Block(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.router, self.config = nn.Linear(D, E), config
        self.up = nn.ModuleList(nn.Linear(D, 12) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(12, D) for _ in range(E))

    def settings(self):
        routing = self.config.routing
        return (
            routing.top_k,
            self.config.normalised(),
            routing.scaling_factor * routing.scales[0],
            routing.scores is Scores.SOFTMAX,
            self.config.activation,
        )

    def forward(self, x):
        top_k, normalised, scale, softmax, activation = self.settings()
        logits = self.router(x)
        weights, chosen = (logits.softmax(-1) if softmax else logits.sigmoid()).topk(top_k)
        if normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype) * scale
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(chosen == number)
            inner = self.down[number](activation(self.up[number](x[token])))
            out.index_add_(0, token, inner * weights[token, slot, None])
        return out


class OfNamespace(Block):
    def settings(self):
        c = self.config
        return c.top_k, c.norm_topk_prob, c.scaling_factor, c.scores == "softmax", ACTIVATIONS[c.hidden_act]


class OfDict(Block):
    def settings(self):
        c = self.config
        top_k, normalised, scale = c["top_k"], c.get("norm_topk_prob", False), c["scaling_factor"]
        return top_k, normalised, scale, c["scores"] == "softmax", ACTIVATIONS[c["hidden_act"]]


def settings_of(config):
    return OfNamespace.settings(SimpleNamespace(config=config))


class ByFunction(Block):
    def settings(self):
        return settings_of(self.config)


FLAT: dict[str, Any] = {
    "top_k": 2,
    "norm_topk_prob": True,
    "scaling_factor": 1.5,
    "scores": "softmax",
    "hidden_act": "relu",
    "use_cache": True,
    "dtype": "float32",
}
KINDS = {
    "dataclass": lambda: Block(Config()),
    "slots": lambda: Block(WithSlots()),
    "aliases": lambda: Block(Aliases()),
    "namespace": lambda: OfNamespace(SimpleNamespace(**FLAT)),
    "python namespace": lambda: OfNamespace(argparse.Namespace(**FLAT)),
    "dict": lambda: OfDict(dict(FLAT)),
    "function": lambda: ByFunction(SimpleNamespace(**FLAT)),
}
CHANGES = {
    "top_k": 1,
    "norm_topk_prob": False,
    "scaling_factor": 0.5,
    "scores": "sigmoid",
    "hidden_act": "gelu",
}


def put(config: Any, name: str, value: Any) -> None:
    if isinstance(config, dict):
        config[name] = value
        return
    of_routing = {field.name for field in dataclasses.fields(Routing)}
    holder = config.routing if name in of_routing and hasattr(config, "routing") else config
    setattr(holder, name, Scores(value) if isinstance(getattr(holder, name), Scores) else value)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {}


def made(models: dict[str, nn.Module], kind: str) -> tuple[nn.Module, nn.Module]:
    """A model and its rewritten form, which is made once; both as they were."""
    if kind not in models:
        torch.manual_seed(0)
        model = nn.Sequential(KINDS[kind]())
        models[kind] = hexa_fx.optimize(model, x(), hexa_fx.HexaConfig(verify=False))
        assert models[kind].report.rewritten
    rewritten = copy.deepcopy(models[kind])
    return hexa_fx.undo_(copy.deepcopy(rewritten)), rewritten


def x() -> torch.Tensor:
    return torch.randn(20, D, generator=torch.Generator().manual_seed(1))


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_what_was_read_is_noticed(models, kind, name, caplog):
    model, rewritten = made(models, kind)
    assert operators_run(rewritten, (x(),))
    before = model(x())
    for m in (model, rewritten):
        put(m[0].config, name, CHANGES[name])
    torch.testing.assert_close(rewritten(x()), model(x()))
    assert not torch.allclose(before, model(x()))
    assert operators_run(rewritten, (x(),))
    assert not warnings(caplog)
    for m in (model, rewritten):
        put(m[0].config, name, {**FLAT}[name])
    assert operators_run(rewritten, (x(),))
    torch.testing.assert_close(rewritten(x()), before)


NOTING = ["dataclass", "slots", "aliases", "python namespace"]


@pytest.mark.parametrize("name", ["use_cache", "dtype", "new"])
@pytest.mark.parametrize("kind", NOTING)
def test_what_was_not_read_may_change(models, kind, name, caplog):
    _, rewritten = made(models, kind)
    if (kind, name) != ("slots", "new"):  # which cannot have one
        setattr(rewritten[0].config, name, 7)
    assert operators_run(rewritten, (x(),))
    assert not warnings(caplog)


@pytest.mark.parametrize("item", [3.0, torch.tensor(3.0), torch.full((20, 1), 3.0)], ids=["number", "scalar", "tensor"])
def test_an_item_of_a_list_in_a_config(models, item):
    model, rewritten = made(models, "dataclass")
    for m in (model, rewritten):
        m[0].config.routing.scales[0] = item
    torch.testing.assert_close(rewritten(x()), model(x()))


class Sharp(Config):
    """Some attributes come from elsewhere."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return {"extra": 1}[name]


def test_classes_are_left_as_they_were():
    before = {cls: vars(cls).get("__getattribute__") for cls in (Config, Sharp, Routing, WithSlots, Aliases)}
    for config in (Config(), Sharp(), WithSlots(), Aliases()):
        hexa_fx.explain(nn.Sequential(Block(config)), x())
    assert {cls: vars(cls).get("__getattribute__") for cls in before} == before


class WithActivation(Block):
    def __init__(self, activation):
        super().__init__(None)
        self.activation = activation

    def settings(self):
        return 2, True, 1.0, True, self.activation


class Act:
    """Called, and has a setting of its own."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, x):
        return F.leaky_relu(x, self.slope)


class Plain:
    def __call__(self, x):
        return F.relu(x)


class Tanh:
    def __call__(self, x):
        return x.tanh()


def sharper(block):
    block.activation.slope = 0.5


CALLED = {
    "slope": (lambda: Act(0.01), sharper),
    "class": (Plain, lambda block: setattr(block, "activation", Tanh())),
    "partial": (
        lambda: functools.partial(F.gelu, approximate="tanh"),
        lambda block: setattr(block, "activation", functools.partial(F.silu)),
    ),
    "function": (lambda: F.gelu, lambda block: setattr(block, "activation", Tanh())),
}


@pytest.mark.parametrize("kind", CALLED)
def test_activations_that_are_objects(kind):
    activation, change = CALLED[kind]
    torch.manual_seed(0)
    model = nn.Sequential(WithActivation(activation()))
    rewritten = hexa_fx.optimize(model, x(), hexa_fx.HexaConfig(verify=False))
    for again in (rewritten, copy.deepcopy(rewritten), pickle.loads(pickle.dumps(rewritten))):
        assert operators_run(again, (x(),))
    before = model(x())
    for m in (model, rewritten):
        change(m[0])
    torch.testing.assert_close(rewritten(x()), model(x()))
    assert not torch.allclose(before, model(x()))


def test_blocks_that_hold_equal_objects_are_analysed_once():
    model = nn.Sequential(*(Block(Config()) for _ in range(3)))
    report = hexa_fx.explain(model, x())
    assert [block.same_as for block in report.rewritten] == [None, "0", "0"]


class Tempered(Block):
    """A tensor in an object."""

    def forward(self, x):
        return super().forward(x * self.config.temperature)


def test_a_tensor_in_an_object_is_refused():
    config = Config()
    config.temperature = torch.tensor(2.0)
    (refused,) = hexa_fx.explain(nn.Sequential(Tempered(config)), x()).refused
    assert "neither a parameter nor a buffer" in refused.reason


class Lru(OrderedDict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("a method of the user's was called")


@dataclass(frozen=True, slots=True)
class Slotted:
    last: int = 1


class Unset:
    """Has a slot that is empty at first, and attributes beside it; what it lacks it asks another object for."""

    __slots__ = ("__dict__", "last")

    def __init__(self) -> None:
        self.first = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(1, name)


def rename(held: dict[str, int]) -> None:
    held["c"] = held.pop("b")


def take_first(held: dict[str, int]) -> None:
    del held["a"]


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda held: held.append(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "set": (lambda: {1, 2}, lambda held: held.add(3)),
    "dict": (lambda: {"a": 1, "b": 2}, lambda held: held.update(c=3)),
    "key of a dict": (lambda: {"a": 1, "b": 2}, rename),
    "order of a dict": (lambda: {"a": 1, "b": 2}, take_first),
    "counter": (lambda: Counter("ab"), lambda held: held.update("c")),
    "dict with defaults": (lambda: defaultdict(list, a=[]), lambda held: held["b"]),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda held: held.update(c=3)),
    "ordered dict, an item less": (lambda: OrderedDict(a=1, b=2), take_first),
    "ordered dict, another order": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "ordered dict of the user's": (lambda: Lru(), lambda held: OrderedDict.__setitem__(held, "a", 1)),
    "slot": (Slotted, lambda held: object.__setattr__(held, "last", 2)),
    "empty slot": (Unset, lambda held: setattr(held, "last", 2)),
    "attribute beside slots": (Unset, lambda held: setattr(held, "first", 2)),
}


def seen(held: Any) -> Any:
    """As the user sees it, order included."""
    if isinstance(held, Unset):
        return vars(held).copy(), _is_filled(held)
    return repr(held)


def _is_filled(held: Unset) -> bool:
    try:
        Unset.last.__get__(held)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_is_noticed_and_undone(name: str) -> None:
    make, change = IN_PLACE[name]
    held = make()
    before = Contents([Holder("held", held)])
    was = copy.deepcopy(seen(held))
    assert not before.changed()
    change(held)
    assert [holder.value for holder in before.changed()] == [held]
    before.restore()
    assert seen(held) == was
    assert not before.changed()


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: {"a": 10**6}, lambda held: held.update(a=10**3 * 10**3)),
        (lambda: {"text"}, lambda held: (held.clear(), held.add("".join(["te", "xt"])))),
        (lambda: {(0, 1): None}, lambda held: (held.clear(), held.update({tuple(range(2)): None}))),
        (lambda: pathlib.PurePath("a", "b"), str),
    ],
)
def test_equal_contents_are_no_change(make: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    held = make()
    before = Contents([Holder("held", held)])
    use(held)
    assert not before.changed()


def _loads(*_: Any, **__: Any) -> Any:
    raise AssertionError("a method of the user's own kind of collection was called")


_METHODS = "__bool__ __len__ __iter__ __contains__ __getitem__ __eq__ keys values items".split()
LAZY = {
    kind: type(f"Lazy{kind.__name__}", (kind,), dict.fromkeys(_METHODS, _loads) | {"__hash__": None})
    for kind in (dict, OrderedDict, list, tuple, set)
}
"""Kinds that look for what they hold when asked, as transformers' tables of models by config, which import each model's code."""
IN_GLOBALS = [kind() for kind in LAZY.values()]


class HoldsLazy(Block):
    tables: ClassVar = IN_GLOBALS


def test_collections_of_the_user_s_own_kind_are_not_asked() -> None:
    model = nn.Sequential(HoldsLazy(Config()))
    optimized = hexa_fx.optimize(model, x())
    assert operators_run(optimized, (x(),))
    torch.testing.assert_close(optimized(x()), model(x()))


MANY = 1 << 15


class HoldsVocabulary(Block):
    """And counts its calls in there, if it is told to."""

    def __init__(self, config: Config, counts: bool) -> None:
        super().__init__(config)
        self.counts, self.words, self.ids = counts, [str(i) for i in range(MANY)], {str(i): i for i in range(MANY)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.ids["calls"] = self.ids.get("calls", 0) + 1
        return super().forward(x) * len(self.words) / MANY


@pytest.mark.parametrize("counts", [False, True])
def test_vocabularies_are_shared_and_left_as_they_are(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(HoldsVocabulary(Config(), counts))
    seen: list[int] = []
    leaves = module_state._leaves
    monkeypatch.setattr(module_state, "_leaves", lambda label, value: (seen.append(1), leaves(label, value))[1])
    expected = model(x())
    optimized = hexa_fx.optimize(model, x())
    assert counts or len(seen) < MANY
    for calls in (1, 2, 3):
        torch.testing.assert_close(optimized(x()), expected)
        assert optimized[0].ids.get("calls", 1) == 1 + calls * counts
    assert (model[0].ids.get("calls", 1), len(model[0].words)) == (1, MANY)
    assert counts or operators_run(optimized, (x(),))


@pytest.mark.parametrize("make", [lambda: [*range(MANY)], lambda: {i: i for i in range(MANY)}, lambda: {*range(MANY)}])
def test_a_change_of_data_is_noticed_and_undone(make: Callable[[], Any]) -> None:
    held = make()
    before = Contents([Holder("held", held)])
    held.popitem() if isinstance(held, dict) else held.pop()
    assert [holder.value for holder in before.changed()] == [held]
    before.restore()
    assert held == make()
    assert not before.changed()
