"""A small model of MoE layers around the canonical operator, whole on one process or partitioned."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

import hexa_fx.ops  # noqa: F401
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition import Installed, install_plan
from hexa_fx.plan import Plan

E, D, I, K = 4, 8, 24, 2  # noqa: E741


@dataclass(frozen=True)
class Kind:
    """Which expert: how gated, layouts, biases, top-k."""

    glu: str = "concat"
    layout1: str = "nk"
    layout2: str = "nk"
    bias: bool = True
    top_k: int = K


class MoEBlock(nn.Module):
    """Attention's stand-in, a router, experts by `hexa::moe_ffn`, and a residual."""

    def __init__(self, kind: Kind, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)

        def rand(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).mul(0.2).to(dtype))

        wide = 2 * I if kind.glu in ("concat", "interleaved") else I
        self.wa, self.wg = rand(D, D), rand(D, E)
        self.w1 = rand(*((E, wide, D) if kind.layout1 == "nk" else (E, D, wide)))
        self.w2 = rand(*((E, D, I) if kind.layout2 == "nk" else (E, I, D)))
        self.w3 = rand(*((E, I, D) if kind.layout1 == "nk" else (E, D, I))) if kind.glu == "split" else None
        self.b1 = rand(E, wide) if kind.bias else None
        self.b3 = rand(E, I) if kind.bias and kind.glu == "split" else None
        self.b2 = rand(E, D) if kind.bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.wa)
        weights, index = torch.topk(torch.softmax(x @ self.wg, -1), self.kind.top_k, -1)
        kind = self.kind
        y = torch.ops.hexa.moe_ffn(
            x,
            index,
            weights,
            *(self.w1, self.b1, self.w3, self.b3, self.w2, self.b2),
            *("silu", kind.glu, [], kind.layout1, kind.layout2, False),
        )
        return x + y


class Net(nn.Module):
    def __init__(self, kinds: list[Kind], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoEBlock(kind, seed, dtype) for seed, kind in enumerate(kinds)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rewritten(model: Net) -> list[RewrittenBlock]:
    """What the rewrite hands to the partition."""
    return [RewrittenBlock(f"layers.{i}", fx.symbolic_trace(layer).graph) for i, layer in enumerate(model.layers)]


def run_graph(block: nn.Module, graph: fx.Graph) -> None:
    """Makes a block run a graph on its own parameters."""
    code = type(fx.GraphModule(block, graph)).forward
    block.forward = types.MethodType(code, block)


def install(model: Net, plan: Plan, **kwargs: Any) -> Installed:
    """Partitions the model in place."""
    installed = install_plan(model, rewritten(model), plan, **kwargs)
    for block in installed.blocks:
        run_graph(model.get_submodule(block.path), block.graph)
        installed.session.bind(model.get_submodule(block.path), block.path)
    return installed


def batch(rows: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, t = (torch.randn(rows, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(dtype), t.to(dtype)


def loss_sum(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).sum()


def own(sizes: tuple[int, ...], rank: int) -> slice:
    """A rank's slice of something split by sizes."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
