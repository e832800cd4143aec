"""The analysis of a block holds a bounded amount of memory beside the model, and still compares in float64."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx
from hexa_fx import passes
from hexa_fx.capture import capture
from hexa_fx.capture.observe import Observation
from hexa_fx.isolation import size
from hexa_fx.large_blocks import lazy_gradient, upcast_weight
from hexa_fx.passes import analyse
from hexa_fx.passes.block_analysis import BlockAnalysis
from tests.live_memory import LiveMemory

E, D, INNER, K, T = 16, 128, 128, 2, 12
BOUND = 3 << 20
"""The block's weights are 1.5 MiB in bfloat16, so a copy in float64 would take 6 MiB."""


class Routed(nn.Module):
    """A router and stacked experts; subclasses run them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up = nn.Parameter(torch.empty(E, 2 * INNER, D))
        self.down = nn.Parameter(torch.empty(E, D, INNER))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.router(x).softmax(-1).topk(K)


class Loop(Routed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


class Grouped(Routed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.route(x)
        return self.mix(x, index, weights)

    def mix(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = index.flatten().argsort(stable=True)
        ends = torch.bincount(index.flatten(), minlength=E).cumsum(0, dtype=torch.int32)
        rows = x[order // K]
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, order // K, y)


class Batched(Routed):
    """All experts on all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.route(x)
        scores = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weights)
        gate, up = torch.bmm(x.expand(E, *x.shape), self.gate_up.mT).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.down.mT)
        return (y * scores.T[..., None]).sum(0)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(D, D, bias=False) for n in ("gate", "up", "down")}) for _ in range(E)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            rows = x[token]
            y = expert["down"](F.silu(expert["gate"](rows)) * expert["up"](rows))
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def filled(block: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0, 0.1, generator=generator)
    return block.bfloat16().eval()


def bounded(
    monkeypatch: pytest.MonkeyPatch,
    block: nn.Module,
    inputs: tuple[torch.Tensor, ...] | None = None,
    bound: int = BOUND,
) -> BlockAnalysis:
    """The analysis of a block that counts as large."""
    for module in (size, lazy_gradient):
        monkeypatch.setattr(module, "LEAST_BYTES", 1 << 16)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    return analyse(Observation("block", block, inputs or (x,), {}), hexa_fx.HexaConfig(analysis_bytes=bound))


@pytest.mark.parametrize(("kind", "experts"), [(Loop, 48), (Grouped, 48), (Batched, E), (Listed, E)])
def test_the_analysis_holds_less_than_it_may(kind: type[nn.Module], experts: int, monkeypatch: pytest.MonkeyPatch):
    """With 48 experts the bound is less than a copy in bfloat16 too. The others hold what all experts make, or move weights.

    A result that all experts add to is recorded after every write, but an experiment holds it once: it takes no tokens.
    """
    monkeypatch.setitem(globals(), "E", experts)
    block, recorded = filled(kind()), []

    def spied(module: nn.Module, args: Any, *others: Any, **options: Any) -> Any:
        recorded.append(len(args[0]))
        return capture(module, args, *others, **options)

    monkeypatch.setattr(passes, "capture", spied)
    with LiveMemory(*block.parameters()) as memory:
        analysis = bounded(monkeypatch, block)
    assert analysis.rewritten is not None, analysis.refusal
    assert analysis.check.dtype == torch.float64
    assert all(case.outcome == "equal" for case in analysis.check.cases)
    assert any(case.gradient_error > 0 for case in analysis.check.cases)
    assert memory.peak <= BOUND, f"{memory.peak / 2**20:.1f} MiB: {memory.held}"
    assert recorded == ([T, 8, 4] if kind is Batched else [T])


def test_all_experts_are_reached_in_as_few_turns_as_memory_allows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "E", 40)
    check = bounded(monkeypatch, filled(Loop()), bound=32 << 20).check
    assert check.ok
    assert check.all_reached
    assert not [case.name for case in check.cases if "on from expert" in case.name]


class OfTwoModes(nn.Module):
    """Asks for its mode, and does the same in both."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * float(1 + (self.training or 1))


class Reads:
    """How often every element of a block's weights is upcast to float64."""

    def __init__(self, block: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.all = 0, sum(weight.numel() for weight in block.parameters() if weight.dim() > 1)
        raise_piece = upcast_weight.upcast_piece

        def counted(piece: torch.Tensor) -> torch.Tensor:
            self.read += piece.numel()
            return raise_piece(piece)

        monkeypatch.setattr(upcast_weight, "upcast_piece", counted)

    @property
    def times(self) -> float:
        return self.read / self.all


class Given(Grouped):
    """Experts whose routing is an argument, as those of transformers: `Grouped` behind a router of somebody else's."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.mix(x, index, weights)


def routed(tokens: int) -> tuple[torch.Tensor, ...]:
    """Tokens, and experts and weights for each."""
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
    return (
        torch.randn(tokens, D, generator=generator).bfloat16(),
        index,
        torch.rand(tokens, K, generator=generator).bfloat16(),
    )


@pytest.mark.parametrize(("kind", "experts", "top_k", "most"), [(Listed, E, K, 24), (Given, 48, 4, 20)])
def test_what_was_read_of_a_weight_is_not_read_again(
    kind: type[nn.Module], experts: int, top_k: int, most: float, monkeypatch: pytest.MonkeyPatch
):
    """A product and its bias are taken once in all experiments; experts that are given are reached as often as others."""
    monkeypatch.setitem(globals(), "E", experts)
    monkeypatch.setitem(globals(), "K", top_k)
    block = filled(kind())
    reads = Reads(block, monkeypatch)
    analysis = bounded(monkeypatch, block, routed(T) if kind is Given else None)
    assert analysis.rewritten is not None, analysis.refusal
    assert not [case.name for case in analysis.check.cases if "on from expert" in case.name]
    assert reads.times <= most


class WholeGradients(TorchDispatchMode):
    """Counts gradients of one expert's matrix that are filled up to a whole stack."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.select_backward.default and args[0].dim() == 2
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Loop, Given])
def test_no_expert_has_a_gradient_as_large_as_all_of_them(kind: type[nn.Module]):
    """Of a stack that is copied to float64 as a whole that took most of the time: its square in the number of experts."""
    block = filled(kind()).float()
    inputs = tuple(value.float() if value.is_floating_point() else value for value in routed(T))
    with WholeGradients() as filled_up:
        analysis = analyse(Observation("block", block, inputs[: 3 if kind is Given else 1], {}), hexa_fx.HexaConfig())
    assert analysis.rewritten is not None, analysis.refusal
    assert any(case.gradient_error > 0 for case in analysis.check.cases)
    assert filled_up.count == 0
