"""What code reads of attributes that were put on parameters and buffers is a condition of every call, also what is missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hexa_fx
from tests.runtime.handmade import D, ListMoE
from tests.zoo.compare import compare, operators_run


class Asking(ListMoE):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden) * getattr(self.router.proj.weight, "scale", 1.0)
        if hasattr(self.kept, "halved"):
            out = out / 2
        try:
            return out * self.experts[1].w1.weight.times
        except AttributeError:
            return out


def scaled(model: Any) -> None:
    model.router.proj.weight.scale = 3.0


def halved(model: Any) -> None:
    model.kept.halved = True


def times(model: Any) -> None:
    model.experts[1].w1.weight.times = 4.0


@pytest.mark.parametrize("there", [False, True], ids=["missing", "there"])
@pytest.mark.parametrize("wake", [scaled, halved, times])
def test_an_attribute_of_a_tensor(wake: Callable[[Any], None], there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")
    torch.manual_seed(0)
    model = Asking().double().eval()
    if there:
        wake(model)
    original, given = copy.deepcopy(model), (torch.randn(9, D, dtype=torch.float64),)
    if there:  # deepcopy leaves them out
        wake(original)
    optimized = hexa_fx.optimize(model, given)
    assert optimized.report.rewritten, optimized.report
    assert operators_run(optimized, given)
    assert compare(original, optimized, given).within(1e-10)
    for each in (original, optimized):
        if there:
            each.router.proj.weight.scale = 7.0
        wake(each)
    assert compare(original, optimized, given).within(1e-10)
    assert not hasattr(torch.Tensor, "__getattr__")
