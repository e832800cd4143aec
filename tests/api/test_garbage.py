"""Analysis does not spend its time in full garbage collections, and leaves the collector as it was."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from gc import get_freeze_count  # before tests/conftest.py replaces it
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import api, optimizing
from hexa_fx.isolation.size import collect, collections_are_cheap


@pytest.mark.parametrize("call", [hexa_fx.optimize_, hexa_fx.explain])
def test_thresholds(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, inside = gc.get_threshold(), []

    def stopped(*_: Any, **__: Any) -> None:
        inside.append(gc.get_threshold())
        raise KeyboardInterrupt

    for module in (api, optimizing):
        monkeypatch.setattr(module, "analyse_model", stopped)
    with pytest.raises(KeyboardInterrupt):
        call(nn.Linear(4, 4), torch.randn(2, 4))
    assert inside == [(30 * before[0], *before[1:])]
    assert gc.get_threshold() == before


def test_thresholds_may_be_the_largest() -> None:
    before = gc.get_threshold()
    gc.set_threshold(2**30, 10, 10)
    try:
        with collections_are_cheap():
            assert gc.get_threshold() == (2**31 - 1, 10, 10)
        assert gc.get_threshold() == (2**30, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_dynamo_and_dtensor_are_imported_neither_with_the_package_nor_by_optimize() -> None:
    """They take a second each, of every process."""
    assert subprocess.run([sys.executable, "-c", _IMPORTS], check=False).returncode == 0


_IMPORTS = """
import sys, torch, hexa_fx
from hexa_fx.isolation.trial_modes import RaisesOnHost
from benchmarks.real_blocks import ListMixture
hexa_fx.optimize(ListMixture(16, 8, 4, 2), torch.randn(1, 8, 16))
assert sys.modules.keys().isdisjoint({"torch.distributed.tensor", "torch.distributed.fsdp", "networkx"})
from hexa_fx.isolation import size
from hexa_fx.large_blocks import lazy_gradient
for module in (size, lazy_gradient):
    module.LEAST_BYTES = 1
config = hexa_fx.HexaConfig(strict=True, analysis_bytes=1 << 15)
hexa_fx.optimize(ListMixture(16, 8, 4, 2), torch.randn(1, 8, 16), config)
with RaisesOnHost():
    torch.ones(2) + 1
sys.exit("torch._dynamo" in sys.modules)
"""


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_pass_over_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        before = weakref.ref(Knot())
        with collections_are_cheap():
            inside = weakref.ref(Knot())
            collect()
            assert (before() is None, inside() is None) == (False, True)
            collect(everything=True)
            assert before() is None
        assert not gc.get_freeze_count()
        gc.freeze()
        with collections_are_cheap():
            inside = weakref.ref(Knot())
            collect(everything=True)
            assert inside() is None
            assert gc.get_freeze_count()  # not ours
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
        if frozen:
            gc.freeze()


@pytest.mark.parametrize(("on_a_device", "enabled", "full"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_a_full_collection_is_made_before_the_model_runs_on_a_device(
    monkeypatch: pytest.MonkeyPatch, on_a_device: bool, enabled: bool, full: int
) -> None:
    generations: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_a_device)
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation) or 0)
    with collections_are_cheap():
        pass
    assert generations == [2] * full
