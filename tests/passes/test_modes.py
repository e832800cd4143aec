"""A block holds in both modes unless its code asks for the mode; then a call in the other mode is analysed when it comes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.passes.preconditions import depends_on_mode
from tests.detect.mixture import D, Mixture


class Plain(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


class Dropping(Plain):
    """Asks torch's module for its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(x))


class Copying(Dropping):
    """Asks a copy that it makes meanwhile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(copy.deepcopy(self.drop)(x))[2]


class Looking(Plain):
    """Asks by way of a dict."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * 0.5 if vars(self)["training"] else x)[2]


class Setting(Plain):
    """Does something of its own when its mode is set."""

    factor = 1.0

    def train(self, mode: bool = True) -> Setting:
        self.factor = 0.5 if mode else 1.0
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * self.factor)[2]


class Generated(Plain):
    """Holds a module whose code nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.traced = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.traced(x))


@pytest.mark.parametrize("block", [Dropping, Copying, Looking, Setting, Generated])
def test_code_that_may_ask_for_its_mode_holds_in_one(block: Callable[[], nn.Module]) -> None:
    assert depends_on_mode(capture(block().eval(), (torch.randn(12, D),), {}))


def test_code_that_does_not_holds_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Plain(), torch.randn(12, D)
    recorded: list[str] = []
    monkeypatch.setattr("hexa_fx.passes.capture", lambda *a, **k: recorded.append(a[3]) or capture(*a, **k))
    opt = hexa_fx.optimize(block, x)
    for training in (True, False):
        torch.testing.assert_close(opt.train(training)(x), block.train(training)(x))
    assert len(recorded) == 1
    assert opt.report.blocks[0].calls == (2, 0, {}, 1)


class Training(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise RuntimeError("for training only")
        return super().forward(x)


def test_what_fails_in_one_mode_is_rewritten_in_the_other() -> None:
    block, x = Training(), torch.randn(12, D)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    torch.testing.assert_close(opt(x), block(x))
    with pytest.raises(RuntimeError, match="for training only"):
        opt.eval()(x)
    torch.testing.assert_close(opt.train()(x), block(x))
    assert opt.report.blocks[0].calls.rewritten == 2
