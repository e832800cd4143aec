"""Whatever code reads from Python may change: it is analysed again, or its own code runs, or it is refused; both agree."""

import collections
import contextvars
import copy
import decimal
import enum
import functools
import itertools
import operator
import os
import threading
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import hexa_fx
from tests.zoo.common import looped
from tests.zoo.compare import operators_run

D, E, K = 8, 4, 2
SCALE = 1.0
SCALES = {"now": 1.0}
CONFIG = types.SimpleNamespace(scale=1.0)
SETTINGS = types.ModuleType("settings_of_test_python_reads")
SETTINGS.SCALE = 1.0
VARIABLE = contextvars.ContextVar("scale", default=1.0)
NAME = "HEXA_TEST_PYTHON_READS"


def of_one(x):
    return 1.0


def of_two(x):
    return 2.0


BY_NAME = {"one": of_one}


class Options:
    scale = 1.0
    level = 1.0

    def __init__(self, scale=1.0):
        self.scale = scale

    def at(self, x=None):
        return self.scale

    __call__ = at

    def __float__(self):
        return self.scale

    def __getitem__(self, key):
        return self.scale


CURRENT = Options()


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Delegating:
    def __init__(self, options):
        self.__dict__["options"] = options

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.options, name)


class Kind(enum.Enum):
    ONE, TWO = 1.0, 2.0


class Named(NamedTuple):
    scale: float = 1.0


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(D, 12), nn.Linear(12, D), nn.Identity()

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.a(x))))


class Block(nn.Module):
    """A plain loop over experts, whose weights ``scale`` multiplies."""

    level = 1.0

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), nn.ModuleList(Expert() for _ in range(E))
        self.made()

    def made(self):
        pass

    def scale(self, x):
        return 1.0

    def forward(self, x):
        w, i = self.gate(x).softmax(-1).topk(K)
        return looped(x, w * self.scale(x), i, self.experts)


def holding(value):
    return lambda self: setattr(self, "held", value())


def with_dropout(self):
    """Only where the variant is about it: modes that differ are two analyses."""
    for expert in self.experts:
        expert.drop = nn.Dropout(0.5)


def put(**values):
    return lambda m, monkeypatch: [setattr(m, name, value) for name, value in values.items()]


def patched(holder, name, value=2.0, **options):
    return lambda m, monkeypatch: monkeypatch.setattr(holder, name, value, **options)


def item(holder, name, value=2.0):
    return lambda m, monkeypatch: monkeypatch.setitem(holder, name, value)


def rescaled(m, monkeypatch):
    m.held.scale = 2.0


def registered(kind):
    """None under a name, where a tensor or a module comes later."""
    return lambda self: getattr(self, f"register_{kind}")("held", None)


def closure(value):
    def held(x):
        return value

    def change(new):
        nonlocal value
        value = new

    held.change = change
    return held


def with_default(x, value=1.0):
    return value


def doubled(module, args, out):
    return out * 2


def patched_forward(module):
    plain = module.forward
    module.forward = lambda x: plain(x) * 2


HOOKS: list[Any] = []


class Twice(nn.Module):
    def forward(self, x):
        return x * 2


KEPT = Options()


def imported_in_the_function(self, x):
    import settings_of_test_python_reads

    return settings_of_test_python_reads.SCALE


def imported_by_name(self, x):
    from settings_of_test_python_reads import SCALE as scale

    return scale


def decorated(function):
    times = [1.0]

    @functools.wraps(function)
    def forward(self, x):
        return function(self, x) * times[0]

    forward.times = times
    return forward


def one(self, x):
    """The scale where something else changes."""
    return 1.0


def factor(self, x):
    return 1.0 if self.held is None else self.held


def factors(self, x):
    return 1.0 if self.held is None else self.held(x)


def number(self, x):
    return self.held


def called(self, x):
    return self.held(x)


def first(self, x):
    return self.held[0]


def scale_of_held(self, x):
    return self.held.scale


DOUBLE = torch.full((1,), 2.0).double()
VARIANTS: dict[str, tuple[Any, ...]] = {
    "buffer_is_none": (factor, put(held=DOUBLE), registered("buffer")),
    "parameter_is_none": (factor, put(held=nn.Parameter(DOUBLE.clone())), registered("parameter")),
    "module_is_none": (factors, put(held=nn.Linear(D, 1).double()), registered("module")),
    "default_of_getattr": (lambda self, x: getattr(self, "held", 1.0), put(held=2.0)),
    "asked_by_hasattr": (lambda self, x: 2.0 if hasattr(self, "held") else 1.0, put(held=2.0)),
    "class_default_shadowed": (lambda self, x: self.level, put(level=2.0)),
    "class_attribute_set": (lambda self, x: self.level, lambda m, p: p.setattr(type(m), "level", 2.0, raising=False)),
    "attribute_of_a_base_class": (lambda self, x: type(self).level, patched(Block, "level")),
    "numpy_number": (lambda self, x: float(self.held), put(held=np.float64(2)), holding(lambda: np.float64(1))),
    "a_range": (first, put(held=range(2, 9)), holding(lambda: range(1, 9))),
    "a_deque": (first, lambda m, p: m.held.appendleft(2.0), holding(lambda: collections.deque([1.0]))),
    "a_set": (lambda self, x: 1.0 + ("b" in self.held), lambda m, p: m.held.add("b"), holding(lambda: {"a"})),
    "a_frozenset": (lambda self, x: 1.0 + ("b" in self.held), put(held=frozenset({"b"})), holding(frozenset)),
    "an_enum": (lambda self, x: self.held.value, put(held=Kind.TWO), holding(lambda: Kind.ONE)),
    "object_with_float": (lambda self, x: float(self.held), rescaled, holding(Options)),
    "object_with_items": (lambda self, x: self.held["any"], rescaled, holding(Options)),
    "object_that_is_called": (called, rescaled, holding(Options)),
    "special_method_replaced": (
        lambda self, x: float(self.held),
        patched(Options, "__float__", lambda self: 2.0),
        holding(Options),
    ),
    "bound_method": (called, lambda m, p: setattr(m.held.__self__, "scale", 2.0), holding(lambda: Options().at)),
    "partial": (
        lambda self, x: self.held("any"),
        lambda m, p: setattr(m.held.args[0], "scale", 2.0),
        holding(lambda: functools.partial(operator.getitem, Options())),
    ),
    "cell_of_a_closure": (called, lambda m, p: m.held.change(2.0), holding(lambda: closure(1.0))),
    "cell_of_a_closure_that_bears_a_name_of_torchs": (
        called,
        lambda m, p: m.held.change(2.0),
        holding(lambda: functools.wraps(torch.nn.functional.gelu)(closure(1.0))),
    ),
    "a_lambda": (called, put(held=lambda x: 2.0), holding(lambda: lambda x: 1.0)),
    "default_of_a_function": (called, patched(with_default, "__defaults__", (2.0,)), holding(lambda: with_default)),
    "global_number": (lambda self, x: SCALE, item(globals(), "SCALE")),
    "global_function": (lambda self, x: of_one(x), item(globals(), "of_one", of_two)),
    "global_dict": (lambda self, x: SCALES["now"], item(SCALES, "now")),
    "key_missing_in_a_global_dict": (lambda self, x: SCALES.get("later", 1.0), item(SCALES, "later")),
    "global_namespace": (lambda self, x: CONFIG.scale, patched(CONFIG, "scale")),
    "global_object": (lambda self, x: CURRENT.scale, patched(CURRENT, "scale")),
    "attribute_of_a_global_class": (lambda self, x: Options.level, patched(Options, "level")),
    "attribute_of_a_module": (lambda self, x: SETTINGS.SCALE, patched(SETTINGS, "SCALE")),
    "imported_in_the_function": (imported_in_the_function, patched(SETTINGS, "SCALE")),
    "imported_by_name": (imported_by_name, patched(SETTINGS, "SCALE")),
    "table_of_functions": (lambda self, x: BY_NAME["one"](x), item(BY_NAME, "one", of_two)),
    "environment_by_getenv": (lambda self, x: float(os.getenv(NAME, "1")), lambda m, p: p.setenv(NAME, "2")),
    "environment_by_in": (lambda self, x: 2.0 if NAME in os.environ else 1.0, lambda m, p: p.setenv(NAME, "2")),
    "requires_grad": (
        lambda self, x: 1.0 if self.gate.weight.requires_grad else 2.0,
        lambda m, p: m.gate.weight.requires_grad_(False),
    ),
    "default_dtype": (
        lambda self, x: 1.0 if torch.get_default_dtype() == torch.float32 else 2.0,
        lambda m, p: torch.set_default_dtype(torch.float64),
    ),
    "dropout_switched_on": (
        one,
        lambda m, p: [d.train() for d in m.modules() if isinstance(d, nn.Dropout)],
        with_dropout,
    ),
    "forward_on_a_linear": (one, lambda m, p: patched_forward(m.experts[1].a)),
    "forward_on_a_dropout": (one, lambda m, p: patched_forward(m.experts[1].drop), with_dropout),
    "forward_of_the_experts_class": (one, patched(Expert, "forward", lambda self, x: self.b(self.a(x).relu()) * 2)),
    "forward_of_a_class_of_torch": (one, patched(nn.Dropout, "forward", lambda self, x: x * 2), with_dropout),
    "decorated_forward": (
        one,
        lambda m, p: type(m).forward.times.__setitem__(0, 2.0),
        None,
        decorated(Block.forward),
    ),
    "forward_of_a_base_class": (
        one,
        lambda m, p: p.setattr(Block, "forward", lambda self, x, plain=Block.forward: plain(self, x) * 2),
        None,
        lambda self, x: super(type(self), self).forward(x),
    ),
    "hook_on_a_linear": (one, lambda m, p: m.experts[2].b.register_forward_hook(doubled)),
    "hook_on_a_dropout": (one, lambda m, p: m.experts[2].drop.register_forward_hook(doubled), with_dropout),
    "hook_on_all_modules": (one, lambda m, p: HOOKS.append(nn.modules.module.register_module_forward_hook(doubled))),
    "call_of_the_experts_class": (one, patched(Expert, "__call__", lambda self, x: self.forward(x) * 2)),
    "method_of_the_class": (one, lambda m, p: p.setattr(type(m), "scale", lambda self, x: 2.0)),
    "method_of_the_instance": (one, put(scale=lambda x: 2.0)),
    "parametrization": (
        one,
        lambda m, p: parametrize.register_parametrization(m.experts[0].a, "weight", Twice()),
    ),
    "by_a_name_that_is_made": (
        lambda self, x: getattr(self, "he" + "ld"),
        put(held=2.0),
        lambda self: setattr(self, "held", 1.0),
    ),
    "object_that_delegates": (
        scale_of_held,
        lambda m, p: setattr(m.held.options, "scale", 2.0),
        holding(lambda: Delegating(Options())),
    ),
    "list_of_objects": (
        lambda self, x: self.held[0].scale,
        lambda m, p: setattr(m.held[0], "scale", 2.0),
        holding(lambda: [Options()]),
    ),
    "length_of_a_list_of_objects": (
        lambda self, x: float(len(self.held)),
        lambda m, p: m.held.append(Options()),
        holding(lambda: [Options()]),
    ),
    "a_defaultdict": (
        lambda self, x: self.held.get("a", 1.0),
        lambda m, p: m.held.__setitem__("a", 2.0),
        holding(lambda: collections.defaultdict(lambda: 1.0)),
    ),
    "object_with_slots": (scale_of_held, rescaled, holding(Slots)),
    "named_tuple": (scale_of_held, put(held=Named(2.0)), holding(Named)),
    "nested_dicts": (
        lambda self, x: self.held["a"]["b"][0],
        put(held={"a": {"b": (2.0,)}}),
        holding(lambda: {"a": {"b": (1.0,)}}),
    ),
    "another_type_of_number": (lambda self, x: 2.0 if self.held is True else 1.0, put(held=True), holding(lambda: 1)),
    "not_a_number": (number, put(held=float("nan")), holding(lambda: 1.0)),
    "number_of_kept_tensors": (
        lambda self, x: 1.0 / len(self.state_dict()),
        lambda m, p: m.register_buffer("more", torch.zeros(1)),
    ),
}
"""By name: the scale, what is done to it later, what is made before, and another forward."""


def variant(name):
    """The block of that name, and what is done to it later."""
    scale, change, made, forward, *_ = (*VARIANTS[name], None, None)
    members = {"scale": scale, "made": made or Block.made} | ({"forward": forward} if forward else {})
    return type(name, (Block,), members), change


UNREADABLE = {
    "numpy_array": (lambda self, x: float(self.held[0]), lambda: np.array([1.0])),
    "a_decimal": (lambda self, x: float(self.held), lambda: decimal.Decimal(1)),
    "weak_reference": (lambda self, x: self.held().scale, lambda: weakref.ref(KEPT)),
    "by_vars": (lambda self, x: vars(self).get("other", 1.0), lambda: None),
    "an_iterator": (lambda self, x: float(next(self.held)), lambda: itertools.count(1)),
    "by_globals": (lambda self, x: globals()["SCALE"], lambda: None),
    "context_variable": (lambda self, x: VARIABLE.get(), lambda: None),
    "set_of_objects": (lambda self, x: next(iter(self.held)).scale, lambda: {Options()}),
}


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.delenv(NAME, raising=False)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    for hook in HOOKS:
        hook.remove()
    HOOKS.clear()


def x(rows=24):
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def calls(model):
    (block,) = model.report.blocks
    return block.calls


@pytest.mark.parametrize("name", VARIANTS)
def test_a_change_is_noticed(name, monkeypatch):
    kind, change = variant(name)
    model = kind().double().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), x())
    assert operators_run(optimized, (x(),)), optimized.report
    optimized(x())
    assert calls(optimized) == (1, 0, {}, 1)
    before = model(x())
    for m in (model, optimized):
        change(m, monkeypatch)
    torch.manual_seed(1)
    expected = model(x())
    torch.manual_seed(1)
    torch.testing.assert_close(optimized(x()), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert name in ("requires_grad", "another_type_of_number") or not torch.equal(before, expected)
    rewritten, _, own, kinds = calls(optimized)
    assert (rewritten, sum(own.values()), kinds) in ((2, 0, 2), (1, 1, 1)), "it was analysed again, or its own code ran"
    assert bool(operators_run(optimized, (x(),))) is (kinds == 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 3 else ()) for i, name in enumerate(VARIANTS)]
)
def test_copies_and_second_blocks_notice_it_too(name, monkeypatch):
    kind, change = variant(name)
    model = nn.Sequential(kind(), kind()).double().eval()
    if not name.startswith("cell_of_a_closure"):  # whose copies change with it
        change(model[1], monkeypatch)
    unverified = hexa_fx.HexaConfig(verify=False)  # verified in the test above
    optimized = copy.deepcopy(hexa_fx.optimize(copy.deepcopy(model), x(), unverified))
    torch.manual_seed(1)
    expected = model(x())
    torch.manual_seed(1)
    torch.testing.assert_close(optimized(x()), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("scale", "held"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_leaves_no_trace_is_refused(scale, held):
    kind = type("Reading", (Block,), {"scale": scale, "made": holding(held)})
    (block,) = hexa_fx.explain(kind().double().eval(), x()).blocks
    assert block.status == "refused"
    assert "may change without a trace" in block.reason
    assert block.location is not None


@pytest.mark.parametrize("asks", ["==", "in", "is", "held"])
def test_a_decision_on_a_dtype(asks):
    class Deciding(Block):
        def scale(self, x):
            kind = x.dtype
            decided = {
                "==": lambda: x.dtype == torch.float64,
                "in": lambda: x.dtype in (torch.float64, torch.float16),
                "is": lambda: torch.float64 is kind,
                "held": lambda: {torch.float64: True}.get(kind, False),
            }[asks]()
            return 2.0 if decided else 1.0

    model = Deciding().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), x().float())
    for dtype in (torch.float32, torch.float64):
        given = x().to(dtype)
        torch.testing.assert_close(optimized.to(dtype)(given), model.to(dtype)(given), rtol=1e-5, atol=1e-5)


def test_the_environment_is_as_it_was_after_a_block_that_asks_it():
    kind, _ = variant("environment_by_getenv")
    before = dict(vars(os.environ))
    hexa_fx.explain(kind().double().eval(), x())
    assert vars(os.environ) == before


def test_what_other_threads_read_meanwhile_is_no_condition(monkeypatch):
    """A progress bar is drawn by a thread, whose library may be imported just then."""
    model, done = Block().double().eval(), threading.Event()

    def read():
        while not done.wait(1e-4):
            SETTINGS.passing = iter(())
            assert SETTINGS.passing is not None
            assert os.environ.get(NAME) is None

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        optimized = hexa_fx.optimize(model, x())
    finally:
        done.set()
        thread.join()
        del SETTINGS.passing
    assert operators_run(optimized, (x(),)), optimized.report
    monkeypatch.setenv(NAME, "2")
    assert operators_run(optimized, (x(),)), "what the thread read is no condition"
