"""Shapes, routings and clocks that the benchmarks share. Nothing here imports CUDA until it is called."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

os.environ.setdefault(
    "HEXA_FX_WAIT_FOR_KERNELS", "1"
)  # what is measured are kernels, not what runs until they are built


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
    **{f"dsv3-t{t}": MoeShape(t, 8, 256, 7168, 2048) for t in (1, 8, 64)},
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


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of the step, after two calls of it."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def steady(
    runs: dict[str, Callable[[], object]], turns: int = 2, warm_s: float = 0.5, timed_s: float = 0.9
) -> dict[str, float]:
    """Milliseconds that a call of each takes where it is called without end: the mean over `timed_s`, of several turns the median.

    A card at its power limit keeps no clock. On an H200 the clock swings with a period of some 0.8 s, and times by up to 5 %
    either way, for seconds after another load has begun; after a rest the first 0.8 s are 5 % fast and the next tenths 20 % slow. A
    few calls meet one place of that swing, and not the same one for all implementations. Means over a whole period agree within
    1 %, whatever ran before. Every other turn is in the opposite order.
    """
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name in _in_turns(runs, turns):
        _repeat(runs[name], warm_s)
        first, last, calls = _repeat(runs[name], timed_s)
        last.synchronize()
        found[name].append(first.elapsed_time(last) / calls)
    return {name: statistics.median(each) for name, each in found.items()}


def medians(
    runs: dict[str, Callable[[], object]],
    rounds: int = 9,
    warm_s: float = 0.25,
    turns: int = 1,
) -> dict[str, float]:
    """Median milliseconds of each, over a few calls: for what does not meet the power limit, or is compared roughly (see `steady`).

    Each one runs alone for `warm_s` before it is timed, without pauses; the first one runs once more before all, so that nobody is
    timed on a card that has just rested, and of several `turns` every other one is in the opposite order. The median is over all
    turns.
    """
    for run in runs.values():
        run()
    pairs: dict[str, list[_Pair]] = {name: [] for name in runs}
    calls = -(-2 * rounds // turns)
    _repeat(next(iter(runs.values())), 2 * warm_s)
    for name in _in_turns(runs, turns):
        _repeat(runs[name], warm_s)
        pairs[name] += [_timed(runs[name]) for _ in range(calls)]
    return {name: _median(found) for name, found in pairs.items()}


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]
_AHEAD = 2  # calls that wait on the device: it never idles, and the host is not seconds ahead


def _in_turns(names: Iterable[str], turns: int) -> Iterator[str]:
    """All names in each turn, every other time in the opposite order: a card that warms up or cools down favours nobody."""
    order = list(names)
    for turn in range(turns):
        yield from order if turn % 2 == 0 else order[::-1]


def _repeat(run: Callable[[], object], seconds: float) -> tuple[torch.cuda.Event, torch.cuda.Event, int]:
    """Calls without a pause for so long, at least once. Returns events before the first and behind the last, and their number."""
    start, calls = time.perf_counter(), 0
    first, behind = _event(), deque[torch.cuda.Event]()
    while not calls or time.perf_counter() - start < seconds:
        run()
        calls += 1
        behind.append(_event())
        if len(behind) > _AHEAD:
            behind.popleft().synchronize()
    return first, behind[-1], calls


def _timed(run: Callable[[], object]) -> _Pair:
    first = _event()
    run()
    return first, _event()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _median(pairs: list[_Pair]) -> float:
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(last) for first, last in pairs)[len(pairs) // 2]
