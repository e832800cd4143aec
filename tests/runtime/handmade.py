"""Two tiny MoE blocks and graphs for them written by hand: what a rewriter would have made, right and wrong."""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from hexa_fx.ir import InputGuard, PackedWeight, RewrittenBlock

D, WIDTH, E, K = 8, 6, 4, 2


def dense_moe(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """``sum_s w[t, s] * down_e(silu(gate_e(x)) * up_e(x))`` over all experts at once: stands for the real operator."""
    coefficients = torch.zeros(x.shape[0], w1.shape[0], dtype=weights.dtype, device=x.device)
    there = (index >= 0) & (index < w1.shape[0])
    index = index.clamp(0, w1.shape[0] - 1)
    coefficients = coefficients.scatter_add(1, index, weights * there)
    gate, up = torch.einsum("td,eid->tei", x, w1).chunk(2, dim=-1)
    y = torch.einsum("tei,edi->ted", F.silu(gate) * up, w2)
    chosen = torch.zeros_like(coefficients, dtype=torch.long).scatter_add(1, index, there.long())
    y = y.masked_fill(chosen[..., None] == 0, 0)  # what an expert makes of others' tokens counts for nothing, be it NaN
    return torch.einsum("ted,te->td", y, coefficients.to(y.dtype)).to(x.dtype)


class Router(nn.Module):
    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.proj = nn.Linear(D, num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.proj(x).softmax(-1)
        weights, index = torch.topk(scores, K, dim=-1)
        return index, weights / weights.sum(-1, keepdim=True)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(D, WIDTH, bias=False)
        self.w3 = nn.Linear(D, WIDTH, bias=False)
        self.w2 = nn.Linear(WIDTH, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ListMoE(nn.Module):
    """Router inside, a list of experts, a buffer that counts tokens in training."""

    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.router = Router(num_experts)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.register_buffer("seen", torch.zeros(num_experts))

    def forward(self, hidden: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """The list's forward."""
        x = hidden.reshape(-1, hidden.shape[-1])
        index, weights = self.router(x)
        if self.training:
            self.seen += F.one_hot(index, len(self.experts)).sum((0, 1)).to(self.seen.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if token.numel():
                y = expert(x[token]) * weights[token, slot, None]
                out = out.index_add(0, token, y.to(out.dtype))
        if scale is not None:
            out = out * scale
        return out.reshape(hidden.shape)


plain = ListMoE.forward


def around(forward: Callable[..., torch.Tensor]) -> type[ListMoE]:
    """A block with something around the plain forward."""
    return type("Around", (ListMoE,), {"forward": forward})


class NumberedPlaces(ListMoE):
    """Adds a row of a table to each output, by its place; longer sequences index past the table."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(length, D))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The list's forward, and the rows."""
        return super().forward(hidden) + self.places[torch.arange(hidden.shape[1], device=hidden.device)]


class StackedExperts(nn.Module):
    """Stacked weights, routing given from outside."""

    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * WIDTH, D) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, D, WIDTH) * 0.3)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in range(len(self.down)):
            token, slot = torch.where(index == number)
            gate, up = F.linear(x[token], self.gate_up[number]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[number])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def list_packed(num_experts: int = E) -> tuple[PackedWeight, ...]:
    def paths(name: str) -> tuple[str, ...]:
        return tuple(f"experts.{number}.{name}.weight" for number in range(num_experts))

    return (
        PackedWeight("_hexa_w1", (paths("w1"), paths("w3"))),
        PackedWeight("_hexa_w2", (paths("w2"),)),
    )


def list_rewritten(
    train: bool = True, moe: Callable[..., torch.Tensor] = dense_moe, num_experts: int = E, count_twice: bool = False
) -> RewrittenBlock:
    """The rewritten `ListMoE`; ``moe`` and ``count_twice`` make it wrong."""
    graph = torch.fx.Graph()
    hidden = graph.placeholder("hidden")
    size = graph.call_method("size", (hidden,))
    last = graph.call_method("size", (hidden, -1))
    x = graph.call_method("reshape", (hidden, -1, last))
    routed = graph.call_module("router", (x,))
    index = graph.call_function(operator.getitem, (routed, 0))
    weights = graph.call_function(operator.getitem, (routed, 1))
    if train:
        seen = graph.get_attr("seen")
        counted = graph.call_method("sum", (graph.call_function(F.one_hot, (index, num_experts)), (0, 1)))
        for _ in range(2 if count_twice else 1):
            graph.call_method("add_", (seen, counted))
    w1, w2 = graph.call_module("_hexa_w1"), graph.call_module("_hexa_w2")
    y = graph.call_function(moe, (x, index, weights, w1, w2))
    graph.output(graph.call_method("reshape", (y, size)))
    guards = (
        InputGuard("hidden", "tensor", dtype=torch.float32, ndim=3),
        InputGuard("scale", "constant", value=None),
    )
    given = "layers.0.moe", graph, list_packed(num_experts), guards
    return RewrittenBlock(*given, training=train, num_experts=num_experts)


def stacked_rewritten(moe: Callable[..., torch.Tensor] = dense_moe, num_experts: int = E) -> RewrittenBlock:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "index", "weights")]
    weights = [graph.get_attr(name) for name in ("gate_up", "down")]
    graph.output(graph.call_function(moe, (*inputs, *weights)))
    guards = (
        InputGuard("x", "tensor", dtype=torch.float32, ndim=2),
        InputGuard("index", "tensor", dtype=torch.int64, ndim=2),
        InputGuard("weights", "tensor", dtype=torch.float32, ndim=2),
    )
    return RewrittenBlock("experts", graph, (), guards, num_experts=num_experts)


def routing(tokens: int, seed: int = 0, num_experts: int = E) -> tuple[Any, ...]:
    """Inputs of `StackedExperts`: (T, D) tokens, (T, k) distinct experts, (T, k) weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator)
    index = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :K]
    return x, index, torch.rand(tokens, K, generator=generator)
