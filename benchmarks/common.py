"""Shapes, routings and clocks that the benchmarks share. Nothing here imports CUDA until it is called."""

from __future__ import annotations

import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoeShape:
    """One MoE layer: T tokens, k experts per token, E experts, D model size, I intermediate size."""

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


def medians(
    runs: dict[str, Callable[[], object]],
    rounds: int = 9,
    sustained: bool = True,
    warm_s: float = 0.25,
    turns: int = 1,
) -> dict[str, float]:
    """Median milliseconds of each.

    A matmul at full rate meets the card's power limit within milliseconds, and the clock falls by a tenth. `sustained` runs
    each one alone for `warm_s` before it is timed, without pauses, so that each has the clock that it would train with. Over
    seconds the clock moves too, with the card's temperature: the first one runs once more before all, so that nobody is timed on
    a card that has just rested, and of several `turns` every other one is in the opposite order. The median is over all turns.
    Without `sustained` they take turns call by call, and whoever follows one that leaves the tensor cores idle starts on a
    cool card.
    """
    for run in runs.values():
        run()
    pairs: dict[str, list[_Pair]] = {name: [] for name in runs}
    if not sustained:
        warm_s, turns, calls = 0.0, rounds, 1
    else:
        calls = -(-2 * rounds // turns)
        _timed(next(iter(runs.values())), 0, 2 * warm_s)
    for turn in range(turns):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            pairs[name] += _timed(runs[name], calls, warm_s)
    return {name: _median(found) for name, found in pairs.items()}


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]
_AHEAD = 2  # runs that wait on the device while it warms up: it never idles, and the host is not seconds ahead


def _timed(run: Callable[[], object], calls: int, warm_s: float) -> list[_Pair]:
    start, under_way = time.perf_counter(), deque[torch.cuda.Event]()
    run()
    while time.perf_counter() - start < warm_s:
        run()
        under_way.append(torch.cuda.Event())
        under_way[-1].record()
        if len(under_way) > _AHEAD:
            under_way.popleft().synchronize()
    run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for first, last in pairs:
        first.record()
        run()
        last.record()
    return pairs


def _median(pairs: list[_Pair]) -> float:
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(last) for first, last in pairs)[len(pairs) // 2]


def environment() -> dict[str, str]:
    """What a result depends on: command, versions, device."""
    return {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": torch.cuda.get_device_name(),
    }
