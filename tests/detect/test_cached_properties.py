"""`functools.cached_property` of modules and of what they read: the call that asks first is the code's own; then it is there."""

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
def test_calls_are_rewritten_once_one_has_asked(use: str, given: bool) -> None:
    model = layers(use)
    opt = hexa_fx.optimize(copy.deepcopy(model), (tokens(),) if given else None, config=CONFIG)
    assert not any(vars(layer).keys() & vars(Cached).keys() - {"forward"} for layer in opt)  # nobody has asked so far
    assert not given or use == "settings" or "no call has asked for" in opt.report.blocks[0].reason
    for each in (model, opt):  # what they are computed from changes before that
        each[1].factor = each[0].settings.factor = 5.0
        each[0].per_column.mul_(0.5)
    for _ in range(2):
        assert compare(model, opt, (tokens(),)).within(1e-12)
    assert operators_run(opt, (tokens(11),))


def test_another_value_is_noticed() -> None:
    model = layers("settings")
    model[0].use = model[1].use = lambda m, x: plain(m, x) * m.tensor * m.number * m.settings.scale
    opt = hexa_fx.optimize(copy.deepcopy(model), config=CONFIG)
    compare(model, opt, (tokens(),))
    changes: list[Callable[[Any], object]] = [
        lambda m: setattr(m[0], "number", 7.0),
        lambda m: setattr(m[0].settings, "scale", 0.3),
        lambda m: setattr(m[1], "tensor", torch.linspace(-1, 1, D, dtype=torch.float64)),
    ]
    for change in changes:
        for each in (model, opt):
            change(each)
        assert compare(model, opt, (tokens(),)).within(1e-12)
        assert operators_run(opt, (tokens(),))
