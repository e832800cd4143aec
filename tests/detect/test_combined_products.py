"""Experts that all compute, whose outputs one product adds up: the gates multiply what is between the products."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.zoo.compare import compare, operators_run

D, E, H, K = 6, 4, 10, 2


class Combined(nn.Module):
    def __init__(self, combine: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router, self.combine = nn.Linear(D, E), combine
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(E, *size) / 3) for size in ((D, H), (D, H), (H, D)))
        self.bias = nn.Parameter(torch.randn(E, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, ids, weights)
        hidden = F.silu(torch.einsum("...d,edi->...ei", x, self.gate) + self.bias) * torch.einsum(
            "...d,edi->...ei", x, self.up
        )
        return self.combine(self, hidden * gates[..., None], x)


COMBINES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "einsum": lambda m, h, x: torch.einsum("tei,eid->td", h, m.down),
    "weight first": lambda m, h, x: torch.einsum("eid,tei->td", m.down, h),
    "turned": lambda m, h, x: torch.einsum("tei,edi->td", h, m.down.transpose(1, 2)),
    "sequences": lambda m, h, x: torch.einsum("bsei,eid->bsd", h, m.down),
}


@pytest.mark.parametrize("combine", COMBINES)
def test_outputs_are_told_apart(combine: str) -> None:
    shape = (2, 7, D) if combine == "sequences" else (13, D)
    x = torch.randn(shape, dtype=torch.float64)
    block = Combined(COMBINES[combine]).double()
    opt = hexa_fx.optimize(copy.deepcopy(block), (x,), hexa_fx.HexaConfig(own_code_when_small=False))
    for given in (x, x[..., :5, :], torch.randn(3, *shape[1:], dtype=torch.float64)):
        assert compare(block, opt, (given,)).within(1e-12)
        assert operators_run(opt, (given,))


class Heads(nn.Module):
    """An attention whose heads are in the first dimension of its weights, beside experts in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(E, D, 3 * H) / 3), nn.Parameter(torch.randn(E, H, D) / 3)
        self.experts = Combined(COMBINES["sequences"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bsd,hdi->bhsi", x, self.qkv).chunk(3, -1)
        x = x + torch.einsum("bhsi,hid->bsd", F.scaled_dot_product_attention(q, k, v), self.out)
        return x + Combined.forward(self.experts, x)


def test_heads_of_an_attention_stay_one_product() -> None:
    from hexa_fx.capture import capture
    from hexa_fx.passes.canonicalize import canonicalize_block

    captured = capture(Heads().double(), (torch.randn(2, 7, D, dtype=torch.float64),), {}, "block")
    before = len(captured.graph.find_nodes(op="call_method", target="sum"))
    assert len(canonicalize_block(captured).graph.find_nodes(op="call_method", target="sum")) == before
