"""Functions of several processes: seen through where there is nobody to talk to, and never tried where there is."""

from typing import Any

import torch
import torch.distributed as dist
from harness import run
from torch import nn

import hexa_fx
from tests.zoo.common import MLP, Looped

GROUP: Any = None


class Parallel(Looped):
    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = Summed.apply(self.experts[e](rows))
        return given


class Summed(torch.autograd.Function):
    """The tensor itself; its gradient is added up over the group that is set, as libraries find theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size(GROUP) > 1:
            dist.all_reduce(gradient, group=GROUP)
        return gradient


def inside_experts(rank: int, world: int, alone: bool) -> str:
    """One rank at a time is optimized; with a collective, the other would have to come to it."""
    global GROUP
    groups = [dist.new_group([each]) for each in range(world)]
    GROUP = groups[rank] if alone else dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(Parallel(lambda: MLP(8, 12), 8)).double()
    if rank == 0 or alone:
        hexa_fx.optimize_(model, torch.randn(9, 8).double(), hexa_fx.HexaConfig(own_code_when_small=False))
    dist.barrier()
    return model.report.blocks[0].status if rank == 0 or alone else "rewritten" if alone else "refused"


def test_a_group_of_one_adds_nothing() -> None:
    assert run(2, inside_experts, True) == ["rewritten", "rewritten"]


def test_nobody_waits_for_a_function_that_is_tried() -> None:
    assert run(2, inside_experts, False) == ["refused", "refused"]
