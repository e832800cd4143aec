"""Blocks that drop tokens by how many there are: said where their batch is shared out over ranks."""

import pytest
import torch
from harness import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx import batch_dependence
from hexa_fx.capture.observe import Observation


class Limited(nn.Module):
    """Top-1 experts that take at most a share of the tokens each."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token = torch.where(index == number)[0][: int(len(x) * self.share)]
            out[token] = expert(x[token]) * weights[token, None]
        return out


def warned(rank: int, world: int, share: float) -> list[str]:
    torch.manual_seed(0)
    model, said = nn.Sequential(Limited(share), nn.Tanh(), Limited(share)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_dependence.log, "warning", lambda text, *args: said.append(text % args))
        config = hexa_fx.HexaConfig(verify=False)
        mesh = init_device_mesh("cpu", (world,))
        hexa_fx.optimize_(model, torch.randn(16, 8), config, mesh=mesh, strategy="data", capacities=None)
    model.partition.close()
    return said


class Drawing(nn.Module):
    """Draws random numbers that decide only now and then."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Drawing.calls += 1
        torch.rand(1)
        return x * (1 + max(0, Drawing.calls - 2))


def test_random_choices_that_were_alike_twice_are_no_capacity() -> None:
    call = Observation("0", Drawing(), (torch.randn(6, 8),), {})
    assert not batch_dependence._depends_on_batch(call)


def test_a_capacity_is_said() -> None:
    assert run(1, warned, 1.0) == [[]]
    ((said,),) = run(1, warned, 0.2)
    assert "'0' gives to a token depends on the others of its batch" in said
