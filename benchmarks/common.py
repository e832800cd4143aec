"""Shapes, routings and clocks that the benchmarks share. Nothing here imports CUDA until it is called."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoeShape:
    """One MoE layer: T tokens, k experts a token, E experts, D model size, I intermediate size."""

    tokens: int
    top_k: int
    experts: int
    model: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    bias: bool = False

    @property
    def rows(self) -> int:
        """n, routed rows."""
        return self.tokens * self.top_k

    @property
    def width(self) -> int:
        """Columns of the first projection."""
        return self.inner * (2 if self.gated else 1)

    @property
    def forward_flops(self) -> float:
        """Of the two projections; backward has twice as many."""
        return 2.0 * self.rows * self.model * (self.width + self.inner)


SHAPES = {
    "mixtral": MoeShape(8192, 2, 8, 4096, 14336),
    "qwen3-30b": MoeShape(16384, 8, 128, 2048, 768),
    "olmoe": MoeShape(16384, 8, 64, 2048, 1024),
    "dsv3": MoeShape(8192, 8, 256, 7168, 2048),
    "granite-fine": MoeShape(32768, 8, 40, 1536, 512),
    "sonic-7b": MoeShape(24576, 8, 128, 1536, 256),
    "sonic-30b": MoeShape(32768, 8, 128, 4096, 512),
    "swin-512-k1": MoeShape(7840, 1, 8, 512, 2048, torch.float16, gated=False, bias=True),
    "swin-512-k2": MoeShape(7840, 2, 8, 512, 2048, torch.float16, gated=False, bias=True),
    "swin-256-k2": MoeShape(31360, 2, 8, 256, 1024, torch.float16, gated=False, bias=True),
    **{f"qwen3-30b-t{t}": MoeShape(t, 8, 128, 2048, 768) for t in (1, 8, 64)},
    **{f"mixtral-t{t}": MoeShape(t, 2, 8, 4096, 14336) for t in (1, 8, 64)},
}
LARGE = ("mixtral", "qwen3-30b", "olmoe", "dsv3", "granite-fine", "sonic-7b", "sonic-30b")


def routing(kind: str, shape: MoeShape) -> Tensor:
    """Expert ids (T, k), distinct in a row.

    Args:
        kind: ``balanced``; ``skewed``: popularity of the experts differs by a log-normal factor, so that the largest gets
            most tokens; ``one``: every token takes experts 0 .. k-1.
    """
    if kind == "one":
        return torch.arange(shape.top_k, device="cuda").expand(shape.tokens, shape.top_k).contiguous()
    logits = torch.randn(shape.tokens, shape.experts, device="cuda")
    if kind == "skewed":
        logits += 2.0 * torch.randn(shape.experts, device="cuda")
    return logits.topk(shape.top_k, dim=1).indices


def load(ids: Tensor, experts: int) -> str:
    """Largest load over the mean, and empty experts."""
    counts = torch.bincount(ids.reshape(-1), minlength=experts).float()
    return f"{float(counts.max() / counts.mean()):.2f},{int((counts == 0).sum())}"


def medians(runs: dict[str, Callable[[], object]], rounds: int = 9, inner: int = 2) -> dict[str, float]:
    """Median milliseconds of each, taken in turns: the card slows down as it warms up, and so it does for all alike.

    Every measurement is `inner` calls after one that is not timed.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: sorted(a.elapsed_time(b) for a, b in pairs)[len(pairs) // 2] / inner for name, pairs in events.items()
    }


def environment() -> dict[str, str]:
    """What a result depends on: command, versions, device."""
    return {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": torch.cuda.get_device_name(),
    }
