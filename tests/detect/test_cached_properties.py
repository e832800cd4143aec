"""`functools.cached_property` of modules and of what they read: the call that asks first asks, and then it is an attribute."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, Mixture
from tests.zoo.compare import compare, operators_run

CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


class Settings:
    def __init__(self) -> None:
        self.factor = 3.0

    @functools.cached_property
    def scale(self) -> float:
        return self.factor / 2

    @functools.cached_property
    def inner(self) -> Any:
        return types.SimpleNamespace(scale=self.factor)


class Cached(Mixture):
    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor], settings: Settings) -> None:
        super().__init__()
        self.use, self.settings, self.factor = use, settings, 2.0
        self.register_buffer("per_column", torch.rand(D))

    @functools.cached_property
    def number(self) -> float:
        return self.factor / 4

    @functools.cached_property
    def nothing(self) -> None:
        return None

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        return self.per_column

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        return self.per_column * 2

    @functools.cached_property
    def modules_in_order(self) -> list[nn.Module]:
        return [*self.experts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m.mix(x)[2]
    return out


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "number": lambda m, x: plain(m, x) * m.number,
    "nothing": lambda m, x: plain(m, x) if m.nothing is None else x,
    "buffer": lambda m, x: plain(m, x) * m.buffer,
    "tensor": lambda m, x: plain(m, x) * m.tensor,
    "modules": lambda m, x: plain(m, x) * len(m.modules_in_order),
    "settings": lambda m, x: plain(m, x) * m.settings.scale * m.settings.inner.scale,
}


def layers(use: str) -> nn.Sequential:
    torch.manual_seed(0)
    settings = Settings()
    return nn.Sequential(*(Cached(USES[use], settings) for _ in range(2))).double()


def tokens(rows: int = 9) -> torch.Tensor:
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given", [True, False])
def test_calls_are_rewritten_from_the_first_on(use: str, given: bool) -> None:
    model = layers(use)
    opt = hexa_fx.optimize(copy.deepcopy(model), (tokens(),) if given else None, config=CONFIG)
    assert not any(vars(layer).keys() & vars(Cached).keys() - {"forward"} for layer in opt)  # nobody has asked so far
    assert vars(opt[0].settings).keys() == {"factor"}
    for each in (model, opt):  # what they are computed from changes before that
        each[1].factor = each[0].settings.factor = 5.0
        each[0].per_column.mul_(0.5)
    for train in (False, True):
        assert compare(model, opt, (tokens(),), train=train).within(1e-12)
    assert all(not forward.own and len(forward.specialisations) <= 1 + given for forward in forwards(opt))
    twin = copy.deepcopy(opt)
    assert compare(model, twin, (tokens(11),)).within(1e-12)
    assert operators_run(twin, (tokens(11),))


def forwards(opt: nn.Module) -> list[Any]:
    return [vars(layer)["forward"] for layer in opt.children()]


def test_a_layer_is_analysed_as_one_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import hexa_fx.analysis as analysis

    seen, before = [], analysis.analyse
    monkeypatch.setattr(analysis, "analyse", lambda o, c: (seen.append(o.path), before(o, c))[1])
    model = layers("tensor")
    opt = hexa_fx.optimize(copy.deepcopy(model), config=CONFIG)
    for _ in range(2):
        assert compare(model, opt, (tokens(),)).within(1e-12)
    assert seen == ["0"]


def test_a_call_of_another_kind_asks_for_nothing() -> None:
    model = layers("number")
    model[0].use = model[1].use = lambda m, x: plain(m, x) * (m.number if m.training else 1)
    opt = hexa_fx.optimize(copy.deepcopy(model), (tokens(),), config=CONFIG)
    assert compare(model, opt, (tokens(),), train=False).within(1e-12)
    for each in (model, opt):
        assert "number" not in vars(each[0])
        each[0].factor = 9.0
    assert compare(model, opt, (tokens(),), train=True).within(1e-12)


def test_another_value_is_noticed() -> None:
    model = layers("settings")
    model[0].use = model[1].use = lambda m, x: plain(m, x) * m.tensor * m.number * m.settings.scale
    opt = hexa_fx.optimize(copy.deepcopy(model), config=CONFIG)
    changes: list[Callable[[Any], object]] = [
        lambda m: setattr(m[0], "number", 7.0),
        lambda m: setattr(m[0].settings, "scale", 0.3),
        lambda m: setattr(m[1], "tensor", torch.linspace(-1, 1, D, dtype=torch.float64)),
        lambda m: (delattr(m[0], "number"), setattr(m[0], "factor", -1.0)),
    ]
    for change in changes:
        for each in (model, opt):
            change(each)
        assert compare(model, opt, (tokens(),)).within(1e-12)
        assert operators_run(opt, (tokens(),))
    assert not any(forward.own for forward in forwards(opt))
