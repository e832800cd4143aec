"""Settings that code reads of classes, Python modules and caches, by way of objects that it makes itself, may change as well."""

import collections
import copy
import dataclasses
import enum
import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import hexa_fx
from tests.capture.test_python_reads import Block, x
from tests.zoo.compare import operators_run

SETTINGS = types.ModuleType("settings_of_test_class_reads")
SETTINGS.scale = 1.0


class Descriptor:
    def __init__(self):
        self.value = 1.0

    def __get__(self, holder, kind=None):
        return self if holder is None else self.value


class Inner:
    def __init__(self, level=1.0):
        self.level = level


class Base:
    inherited = 1.0


class Options(Base):
    level = 1.0
    inner = Inner()
    table: ClassVar[dict[str, float]] = {"scale": 1.0}
    described = Descriptor()

    def __init__(self, scale=1.0, *, only=1.0):
        self.scale, self.only = scale, only

    @property
    def computed(self):
        return self.level

    @classmethod
    def made(cls):
        return cls(cls.level)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    scale: float = 1.0


Named = collections.namedtuple("Named", "scale", defaults=[1.0])


class Once:
    one: Any = None

    def __new__(cls):
        if cls.one is None:
            cls.one = super().__new__(cls)
            cls.one.scale = 1.0
        return cls.one


class OfOne(type):
    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args):
        if cls not in cls.made:
            cls.made[cls] = super().__call__(*args)
        return cls.made[cls]


class OnceByMetaclass(metaclass=OfOne):
    def __init__(self):
        self.scale = 1.0


class Kind(enum.Enum):
    ONE, TWO = 1, 2

    def __init__(self, number):
        self.scale = 1.0


@functools.cache
def cached():
    return Inner()


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


TABLE = AttributeDict(scale=1.0)


def factory():
    return Options()


BY_NAME = {"options": Options}


def attribute(holder, name):
    return lambda m, p: p.setattr(holder, name, 2.0)


def defaults(function):
    return lambda m, p: p.setattr(function, "__defaults__", (2.0,))


VARIANTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "class attribute": (lambda m, x: Options().level, attribute(Options, "level")),
    "by a factory": (lambda m, x: factory().level, attribute(Options, "level")),
    "by a class method": (lambda m, x: Options.made().scale, attribute(Options, "level")),
    "of a base class": (lambda m, x: Options().inherited, attribute(Base, "inherited")),
    "of a class in a table": (lambda m, x: BY_NAME["options"]().level, attribute(Options, "level")),
    "of a class in an attribute": (lambda m, x: m.kind().level, attribute(Options, "level")),
    "by a name that is made": (lambda m, x: getattr(Options(), "le" + "vel"), attribute(Options, "level")),
    "by a path": (lambda m, x: operator.attrgetter("kind.level")(m), attribute(Options, "level")),
    "by a format": (lambda m, x: float("{.level}".format(m.kind)), attribute(Options, "level")),  # noqa: UP032
    "by __dict__": (lambda m, x: Options.__dict__["level"], attribute(Options, "level")),
    "by a property": (lambda m, x: Options().computed, attribute(Options, "level")),
    "of an object in a class": (lambda m, x: Options().inner.level, attribute(Options.inner, "level")),
    "of a dict in a class": (
        lambda m, x: Options().table["scale"],
        lambda m, p: p.setitem(Options.table, "scale", 2.0),
    ),
    "descriptor": (lambda m, x: Options().described, attribute(vars(Options)["described"], "value")),
    "default": (lambda m, x: Options().scale, defaults(Options.__init__)),
    "default by name": (
        lambda m, x: Options().only,
        lambda m, p: p.setattr(Options.__init__, "__kwdefaults__", {"only": 2.0}),
    ),
    "default of a dataclass": (lambda m, x: Frozen().scale, defaults(Frozen.__init__)),
    "default of a named tuple": (lambda m, x: Named().scale, defaults(Named.__new__)),
    "singleton": (lambda m, x: Once().scale, attribute(Once(), "scale")),
    "singleton of a metaclass": (lambda m, x: OnceByMetaclass().scale, attribute(OnceByMetaclass(), "scale")),
    "member of an enum": (lambda m, x: Kind.ONE.scale, attribute(Kind.ONE, "scale")),
    "item of an enum": (lambda m, x: Kind["TWO"].scale, attribute(Kind.TWO, "scale")),
    "cached object": (lambda m, x: cached().level, attribute(cached(), "level")),
    "copy": (lambda m, x: copy.copy(m.held).level, lambda m, p: setattr(m.held, "level", 2.0)),
    "deep copy": (lambda m, x: copy.deepcopy(m.held).level, lambda m, p: setattr(m.held, "level", 2.0)),
    "import_module": (lambda m, x: importlib.import_module(SETTINGS.__name__).scale, attribute(SETTINGS, "scale")),
    "__import__": (lambda m, x: __import__(SETTINGS.__name__).scale, attribute(SETTINGS, "scale")),
    "attrgetter": (lambda m, x: operator.attrgetter("scale")(SETTINGS), attribute(SETTINGS, "scale")),
    "vars": (lambda m, x: vars(SETTINGS)["scale"], attribute(SETTINGS, "scale")),
    "a dict whose items are attributes": (lambda m, x: TABLE.scale, lambda m, p: p.setitem(TABLE, "scale", 2.0)),
    "added to a namespace": (
        lambda m, x: getattr(m.space, "scale", 1.0),
        lambda m, p: setattr(m.space, "scale", 2.0),
    ),
}
REFUSED = frozenset({"by __dict__", "copy", "deep copy", "import_module", "__import__", "attrgetter", "vars"})
"""Names of those whose blocks are refused."""


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    torch.manual_seed(0)
    cached()


def made(self):
    self.held, self.kind, self.space = Inner(), Options, types.SimpleNamespace()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_change_is_noticed(name, monkeypatch):
    scale, change = VARIANTS[name]
    model = type("Scaled", (Block,), {"scale": scale, "made": made})().double().eval()
    unverified = hexa_fx.HexaConfig(verify=False)
    optimized = hexa_fx.optimize(copy.deepcopy(model), x(), unverified)
    assert bool(operators_run(optimized, (x(),))) is (name not in REFUSED), optimized.report
    before = model(x())
    for m in (model, optimized):
        change(m, monkeypatch)
    torch.testing.assert_close(optimized(x()), model(x()), rtol=1e-9, atol=1e-9)
    assert not torch.equal(before, model(x()))
