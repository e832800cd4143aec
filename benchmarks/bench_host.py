"""What the host takes to queue an MoE layer, when calls are replayed and when they are not, on one GPU.

    python benchmarks/bench_host.py [--shapes swin-512-k2,...] [--json FILE]

``host``: microseconds until forward, backward, or forward without gradients returns on an idle device; the device works on
afterwards. ``step``: milliseconds of forward + backward when steps follow each other, which the slower of host and device decides.
``device``: microseconds in which the device runs kernels during such a step, from a trace. Medians, both ways in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from common import SHAPES, medians
from kept_rows import keep, options_of
from layers import Weights, layer, make_weights, optimized_experts

from hexa_fx.ops import moe_ffn_autograd

WAYS = ("replayed", "general")
ROUNDS, CALLS = 5, 20


@contextmanager
def general() -> Iterator[None]:
    """Inside, no call is replayed."""
    held = dict(moe_ffn_autograd._on_cuda)
    moe_ffn_autograd._on_cuda.clear()
    try:
        yield
    finally:
        moe_ffn_autograd._on_cuda.update(held)


def host(run: Callable[[], torch.Tensor], dy: torch.Tensor, p: Weights) -> dict[str, float]:
    """Microseconds of each part; the device is idle when a part begins."""
    times: dict[str, list[float]] = {"forward": [], "backward": [], "no_grad": []}

    def timed(part: str, call: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = call()
        times[part].append(1e6 * (time.perf_counter() - start))
        return out

    for _ in range(CALLS):
        y = timed("forward", run)
        timed("backward", lambda y=y: y.backward(dy))
        for leaf in p.leaves.values():
            leaf.grad = None
        with torch.no_grad():
            timed("no_grad", run)
    return {part: median(found) for part, found in times.items()}


def busy(step: Callable[[], None]) -> float:
    """Microseconds of kernels in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in trace.key_averages()) / CALLS


def rows(name: str) -> Iterator[dict[str, Any]]:
    shape = SHAPES[name]
    p = make_weights(shape, "balanced")
    run = layer(optimized_experts(shape, p), p)
    dy = torch.randn_like(run())

    def step() -> None:
        run().backward(dy)
        for leaf in p.leaves.values():
            leaf.grad = None

    def step_general() -> None:
        with general():
            step()

    for _ in range(3):
        step()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        found["replayed"].append(host(run, dy, p))
        with general():
            found["general"].append(host(run, dy, p))
    in_a_row = medians({"replayed": step, "general": step_general}, rounds=30, turns=4)
    device = busy(step)
    for way in WAYS:
        parts = {f"host_{part}_us": round(median(one[part] for one in found[way]), 1) for part in found[way][0]}
        yield {"shape": name, "way": way, **parts, "step_ms": round(in_a_row[way], 3), "device_us": round(device, 1)}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default="swin-512-k1,swin-512-k2,swin-256-k2")
    options = parser.parse_args()
    found = []
    for name in options.shapes.split(","):
        for row in rows(name):
            print(row, flush=True)
            found.append(row)
    keep(found, options.json)


if __name__ == "__main__":
    main()
