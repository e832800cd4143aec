"""Analysis does not spend its time in full garbage collections, and leaves the collector as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import api


@pytest.mark.parametrize("call", [hexa_fx.optimize_, hexa_fx.explain])
def test_thresholds(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, inside = gc.get_threshold(), []

    def stopped(*_: Any) -> None:
        inside.append(gc.get_threshold())
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "analyse_model", stopped)
    with pytest.raises(KeyboardInterrupt):
        call(nn.Linear(4, 4), torch.randn(2, 4))
    assert inside == [(*before[:2], 10 * before[2])]
    assert gc.get_threshold() == before


def test_dynamo_is_not_imported_with_the_package() -> None:
    """It takes a second, of every process."""
    code = "import sys, hexa_fx, hexa_fx.analysis; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
