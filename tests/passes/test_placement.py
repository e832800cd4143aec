"""Blocks whose weights are not simply on one device keep their code, with a sentence; the others of the model are rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.passes.placement import why_misplaced
from tests.runtime.handmade import D, ListMoE

hooks = pytest.importorskip("accelerate.hooks")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ListMoE(), ListMoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_an_offloaded_block_is_left_and_the_others_are_rewritten():
    model, x = Two().eval(), torch.randn(12, D, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    hooks.attach_align_device_hook(model.second, execution_device="cpu", offload=True)
    assert all(parameter.is_meta for parameter in model.second.parameters())
    found = hexa_fx.optimize(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert [block.status for block in found.report.blocks] == ["rewritten", "refused"]
    assert "offloaded (accelerate" in found.report.blocks[1].reason
    assert "device_map" in found.report.blocks[1].reason
    torch.testing.assert_close(found(x), expected)


def test_hooks_that_only_place_inputs_are_fine():
    model, x = Two().eval(), torch.randn(12, D, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    for block in (model.first, model.second):
        hooks.add_hook_to_module(block, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    found = hexa_fx.optimize(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert [block.status for block in found.report.blocks] == ["rewritten", "rewritten"], str(found.report)
    torch.testing.assert_close(found(x), expected)


def test_a_block_on_two_devices():
    block = ListMoE()
    block.router = nn.Linear(D, 4, bias=False, device="meta")
    assert "offloaded" in why_misplaced(block)
    assert why_misplaced(ListMoE()) == ""
