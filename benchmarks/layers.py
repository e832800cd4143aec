"""One MoE layer's data, the implementations written here, and the plain matmuls of its FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import MoeShape, routing
from torch import Tensor, nn

import hexa_fx
from hexa_fx.ir import FfnSpec
from hexa_fx.jit.background import builder, prebuild

MIB = 2.0**20


@dataclass
class Weights:
    """Parameters and inputs of one layer, all with gradients."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"x": self.x, "gates": self.gates, "w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {name: t for name, t in named.items() if t is not None}


def make_weights(shape: MoeShape, kind: str) -> Weights:
    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.nn.Parameter(torch.empty(*size, device="cuda", dtype=shape.dtype).normal_(0, scale))

    ids, gates = make_routing(shape, kind)
    e, d, i, width = shape.experts, shape.model, shape.inner, shape.width
    w1, w2 = random(e, width, d, scale=d**-0.5), random(e, d, i, scale=i**-0.5)
    b1, b2 = (random(e, width), random(e, d)) if shape.bias else (None, None)
    return Weights(random(shape.tokens, d), ids, gates, w1, b1, w2, b2)


def make_routing(shape: MoeShape, kind: str) -> tuple[Tensor, Tensor]:
    ids = routing(kind, shape)
    return ids, torch.rand(ids.shape, device="cuda").softmax(-1).to(shape.dtype).requires_grad_()


def activate(h: Tensor, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(h)
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


class LoopExperts(nn.Module):
    """The eager loop of model code: nonzero, gather, two linears, weighted index_add."""

    def __init__(self, shape: MoeShape, p: Weights) -> None:
        super().__init__()
        self.gated, self.w1, self.b1, self.w2, self.b2 = shape.gated, p.w1, p.b1, p.w2, p.b2

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Of tokens (T, D), expert ids and routing weights (T, k): (T, D)."""
        out = torch.zeros_like(x)
        hit = torch.bincount(ids.reshape(-1), minlength=self.w1.shape[0]).nonzero().flatten().tolist()
        for e in hit:
            token, slot = (ids == e).nonzero(as_tuple=True)
            h = F.linear(x[token], self.w1[e], None if self.b1 is None else self.b1[e])
            y = F.linear(activate(h, self.gated), self.w2[e], None if self.b2 is None else self.b2[e])
            out = out.index_add(0, token, y * gates[token, slot, None])
        return out


class ExpertList(nn.Module):
    """The same of experts in a list, each a module with matrices of its own, as models had before weights were stacked."""

    class Expert(nn.Module):
        def __init__(self, w1: Tensor, w2: Tensor) -> None:
            super().__init__()
            gate, up = w1.chunk(2)
            self.gate_proj, self.up_proj, self.down_proj = (_linear(each) for each in (gate, up, w2))

        def forward(self, x: Tensor) -> Tensor:
            """(n, D) of (n, D)."""
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    def __init__(self, shape: MoeShape, p: Weights) -> None:
        super().__init__()
        if not shape.gated or shape.bias:
            raise NotImplementedError("gated experts without bias only")
        self.experts = nn.ModuleList(self.Expert(*each) for each in zip(p.w1.detach(), p.w2.detach()))

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Of tokens (T, D), expert ids and routing weights (T, k): (T, D)."""
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * gates[token, slot, None])
        return out


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    made.weight = nn.Parameter(weight.clone())
    return made


def transformers_experts(shape: MoeShape, p: Weights, implementation: str) -> nn.Module:
    """transformers' Qwen3-MoE experts on the same parameters."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    if not shape.gated or shape.bias:
        raise NotImplementedError("gated experts without bias only")
    config = Qwen3MoeConfig(
        hidden_size=shape.model,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=1,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = p.w1, p.w2
    return experts


def optimized_experts(shape: MoeShape, p: Weights, config: hexa_fx.HexaConfig | None = None) -> nn.Module:
    """What `hexa_fx.optimize_` makes of transformers' experts, or of the loop where transformers has none of the kind.

    Raises:
        RuntimeError: they were not rewritten; the message is the report.
    """
    original = transformers_experts(shape, p, "eager") if shape.gated and not shape.bias else LoopExperts(shape, p)
    return optimized(original, p, config)


def optimized(original: nn.Module, p: Weights, config: hexa_fx.HexaConfig | None = None) -> nn.Module:
    """As `optimized_experts`, of experts at hand."""
    experts = hexa_fx.optimize_(original, (p.x.detach()[:256], p.ids[:256], p.gates.detach()[:256]), config)
    if not experts.report.rewritten:
        raise RuntimeError(str(experts.report))
    builder().wait()  # they build in the background
    return experts


def build_kernels(shapes: Iterable[MoeShape], exact: bool = True, fp8: bool = False) -> None:
    """Builds the kernels of layers of all shapes at a time, so that no shape waits for its own; says how long it took.

    Args:
        exact: those of the layers' dtype; fp8: those of FP8 block compute.
    """
    from hexa_fx.cli.model_layers import layer_of
    from hexa_fx.cuda.choosing import card_of  # imports CUTLASS's Python
    from hexa_fx.cuda.kernel_set import fp8_kernel_set, kernel_set

    start, card, wanted = time.monotonic(), card_of(torch.cuda.current_device()), []
    for shape in shapes:
        one = layer_of(
            FfnSpec("silu", "concat", "nk", "nk") if shape.gated else FfnSpec("gelu", "none", "nk", "nk"),
            experts=shape.experts,
            top_k=shape.top_k,
            hidden=shape.model,
            inner=shape.inner,
            dtype=shape.dtype,
            biases=shape.bias,
            gates=shape.dtype,
        )
        wanted += [*(kernel_set(one, card) if exact else ()), *(fp8_kernel_set(one, card) if fp8 else ())]
    print(f"{len(prebuild(wanted))} kernels in {time.monotonic() - start:.1f} s", flush=True)


def layer(experts: nn.Module, p: Weights) -> Callable[[], Tensor]:
    """A call of the experts on the benchmark's data."""
    return lambda: experts(p.x, p.ids, p.gates)  # type: ignore[no-any-return]


class ListLayer(NamedTuple):
    """The same of experts in a list, whose parameters are no leaves of the data."""

    experts: nn.Module
    p: Weights

    def __call__(self) -> Tensor:
        return self.experts(self.p.x, self.p.ids, self.p.gates)  # type: ignore[no-any-return]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.p.x, self.p.gates, *self.experts.parameters()]


def dense_layer(shape: MoeShape, p: Weights) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same FLOPs as plain matmuls: forward, forward + backward."""
    rows = torch.randn(shape.rows, shape.model, device="cuda", dtype=shape.dtype)
    h = torch.randn(shape.rows, shape.width, device="cuda", dtype=shape.dtype)
    a = torch.randn(shape.rows, shape.inner, device="cuda", dtype=shape.dtype)
    w1, w2 = p.w1.detach()[0], p.w2.detach()[0]

    def forward() -> None:
        rows @ w1.t()
        a @ w2.t()

    def both() -> None:
        forward()
        rows @ w2  # d activation
        rows.t() @ a  # dW2
        h @ w1  # dX
        h.t() @ rows  # dW1

    return forward, both


def training(run: Callable[[], Tensor], p: Weights, dy: Tensor) -> Callable[[], None]:
    leaves = run.leaves if isinstance(run, ListLayer) else list(p.leaves.values())

    def step() -> None:
        torch.autograd.grad(run(), leaves, dy)

    return step


def inference(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.no_grad():
            return run()

    return step
