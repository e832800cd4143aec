"""What code counts in globals and classes: it is no constant, and a rewritten block would not count."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.test_what_strangers_write import Mixture, _tokens
from tests.zoo.common import TopKGate
from tests.zoo.variant import K

CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)
CALLS: defaultdict[str, int] = defaultdict(int)
KINDS: Counter[str] = Counter()


class Settings:
    calls = 0


class InDict(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["forward"] += 1
        return super().forward(x)


class InCounter(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KINDS["forward"] += 1
        return super().forward(x)


class InClass(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Settings.calls += 1
        return super().forward(x)


class InItsClass(Mixture):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x)


class Two(Mixture):
    """Its class holds a number that is read elsewhere too: Python has one object for both."""

    factor = 2

    def __init__(self) -> None:
        super().__init__()
        self.gate = TopKGate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert K == 2
        return super().forward(x) * type(self).factor


@pytest.mark.parametrize(
    ("kind", "where"),
    [(InDict, "CALLS.forward"), (InCounter, "KINDS.forward"), (InClass, "Settings.calls"), (InItsClass, "calls")],
)
def test_a_counter_is_named_and_goes_on_counting(kind: type[nn.Module], where: str) -> None:
    torch.manual_seed(0)
    optimized = hexa_fx.optimize(kind().double(), _tokens(2, 7), CONFIG)
    (block,) = optimized.report.blocks
    assert block.reason.startswith("the code changes '")
    assert f"{where}' in every call, which the rewritten block would not" in block.reason

    def counted() -> int:
        return CALLS["forward"] + KINDS["forward"] + Settings.calls + InItsClass.calls

    before = counted()
    optimized(_tokens(3, 5))
    assert counted() == before + 1


def test_a_number_in_a_class_is_watched_though_it_is_like_another() -> None:
    torch.manual_seed(0)
    block = Two().double()
    optimized = hexa_fx.optimize(block, _tokens(2, 7), CONFIG)
    assert optimized.report.rewritten
    try:
        Two.factor = 3
        torch.testing.assert_close(optimized(_tokens(3, 5)), block(_tokens(3, 5)))
    finally:
        Two.factor = 2
