"""A training step of one MoE layer whose gradients are added to float32 buffers (``main_grad``) or to ``.grad``, one GPU.

    python benchmarks/bench_main_grad.py [--shapes qwen3-30b,...] [--json FILE]

``kernel``: weight tiles add to the buffer in their epilogue. ``torch``: the gradient is written in 16 bits, torch adds it to the
buffer afterwards. ``grad``: it is written in 16 bits and added to nothing, as in a first micro-batch. ``sum``: as in a further one,
weight tiles add to the ``.grad`` that is there; ``torch sum``: torch adds to it. Milliseconds of forward + backward, the ways in
turns, each at its own sustained clock; the peak is above what was there before, with 16-bit gradients that were not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from common import SHAPES, medians
from kept_rows import keep, options_of
from launching import prebuild
from layers import MIB, Weights, layer, make_weights, optimized_experts

from hexa_fx.cuda import register as cuda_ops
from hexa_fx.ops import grad_sums, main_grad

ROUNDS = 3


def steps(run: Callable[[], torch.Tensor], p: Weights, dy: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Forward and backward, by the way that gradients go."""

    def step(way: Callable[[], AbstractContextManager[Any]], buffers: bool, sums: bool = False) -> None:
        for leaf in p.leaves.values():
            leaf.grad = None
        for weight in (p.w1, p.w2):
            weight.main_grad = held[weight] if buffers else None  # type: ignore[attr-defined]
            weight.grad = before[weight] if sums else None
        with way():
            run().backward(dy)

    held = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in (p.w1, p.w2)}
    before = {weight: torch.randn_like(weight) for weight in (p.w1, p.w2)}
    not_beside = partial(mock.patch.object, grad_sums, "beside", lambda taken, *_: tuple(taken))
    by_torch = partial(mock.patch.object, main_grad, "_direct", return_value=())
    return {
        "kernel": lambda: step(nullcontext, True),
        "torch": lambda: step(by_torch, True),
        "grad": lambda: step(nullcontext, False),
        "sum": lambda: step(nullcontext, False, sums=True),
        "torch sum": lambda: step(not_beside, False, sums=True),
    }


def peak(step: Callable[[], None], p: Weights) -> float:
    """MiB."""
    for leaf in p.leaves.values():
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def apart(ways: dict[str, Callable[[], None]], p: Weights, steps: int = 16) -> float:
    """How far the two sums of the same micro-batch are apart, relative to their size: what rounding each gradient costs."""
    found = []
    for way in ("kernel", "torch"):
        ways[way]()
        p.w1.main_grad.zero_()  # type: ignore[attr-defined]
        for _ in range(steps):
            ways[way]()
        found.append(p.w1.main_grad.clone())  # type: ignore[attr-defined]
    return float((found[1] - found[0]).norm() / found[0].norm())


def bench(name: str) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    torch.manual_seed(0)
    p = make_weights(shape, "balanced")
    run, dy = layer(optimized_experts(shape, p), p), torch.randn_like(p.x)
    prebuild(lambda: [way() for way in steps(run, p, dy).values()])
    ways = steps(run, p, dy)
    rounds = [medians(ways) for _ in range(ROUNDS)]
    rows = []
    for way, step in ways.items():
        times = [found[way] for found in rounds]
        rows.append(
            {"shape": name, "way": way, "train_ms": median(times), "rounds_ms": times, "peak_mib": peak(step, p)}
        )
    rows[1]["rounding"] = apart(ways, p)
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Prints the rows, writes the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default="qwen3-30b,olmoe,sonic-7b,mixtral")
    options = parser.parse_args()
    cuda_ops.register()
    rows: list[dict[str, Any]] = []
    for name in options.shapes.split(","):
        rows += bench(name)
        torch.cuda.empty_cache()
        keep(rows, options.json)


if __name__ == "__main__":
    main()
