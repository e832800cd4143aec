"""What code reads of attributes that were put on parameters and buffers is a condition of every call, also what is missing. What it
sets, or does to tensors else that no graph shows, is a refusal."""

from __future__ import annotations

import copy
import types
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


HELD = types.SimpleNamespace(load=torch.zeros(D))


def grad(model: Any, out: torch.Tensor) -> None:
    model.router.proj.weight.grad = torch.zeros_like(model.router.proj.weight)


def of_a_result(model: Any, out: torch.Tensor) -> None:
    out.load = out.sum()


def frozen(model: Any, out: torch.Tensor) -> None:
    model.experts[1].w1.weight.requires_grad_(True)


def hook(model: Any, out: torch.Tensor) -> None:
    model.experts[1].w1.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def exchanged(model: Any, out: torch.Tensor) -> None:
    HELD.load.set_(out.detach().sum(0))


def longer(model: Any, out: torch.Tensor) -> None:
    HELD.load.set_(out.detach().flatten())


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (grad, "sets an attribute of a tensor (grad)"),
        (of_a_result, "sets an attribute of a tensor (load)"),
        (frozen, "sets an attribute of a tensor (requires_grad_)"),
        (hook, "puts hooks on gradients (register_post_accumulate_grad_hook)"),
        (exchanged, "reads a tensor that is neither a parameter nor a buffer"),
        (longer, "puts other memory behind a tensor"),
    ],
)
def test_what_is_done_to_a_tensor(does: Callable[[Any, torch.Tensor], None], reason: str) -> None:
    class Doing(ListMoE):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out = super().forward(hidden)
            does(self, out)
            return out

    before = HELD.load.clone()
    optimized = hexa_fx.optimize(Doing(), torch.randn(9, D))
    (block,) = optimized.report.blocks
    assert reason in block.reason, block.reason
    assert torch.equal(HELD.load, before)
    assert "set_" not in vars(torch.Tensor)
    assert "__setattr__" not in vars(torch.Tensor)
