"""Code of a Python module that is not, or no longer, in sys.modules: its globals cannot be looked at again in later calls."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import hexa_fx
from tests.runtime.handmade import D, ListMoE

SOURCE = """
def scaled(x):
    return x * SCALE

SCALE = 1.0
"""


class Scaled(ListMoE):
    def __init__(self, helper: types.ModuleType) -> None:
        super().__init__()
        self.helper = helper.scaled

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.helper(super().forward(hidden))


@pytest.mark.parametrize("held", ["it", "another", "none"])
def test_globals_of_a_module(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")
    helper, another = types.ModuleType("hexa_helper"), types.ModuleType("hexa_helper")
    for module in (helper, another):
        exec(SOURCE, vars(module))
    if held != "none":
        monkeypatch.setitem(sys.modules, "hexa_helper", helper if held == "it" else another)
    torch.manual_seed(0)
    model = Scaled(helper).double().eval()
    given = torch.randn(9, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(model, given)
    assert bool(optimized.report.rewritten) == (held == "it"), optimized.report
    assert held == "it" or "SCALE" in optimized.report.blocks[0].reason
    helper.SCALE = 3.0
    torch.testing.assert_close(optimized(given), model(given))
