"""Each operator alone on one GPU: ms, GB/s or TFLOP/s, and the host's microseconds a call.

    python benchmarks/bench_ops.py [--shapes qwen3-30b,mixtral] [--only esmm,combine] [--json FILE]

Medians over CUDA events on random data; the dense row is one matmul of the same FLOPs. TFLOP/s count routed rows only.
``sm80`` rows force the mma.sync family.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import SHAPES, environment, medians, routing

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)
from hexa_fx.cuda import gemm_sm80 as sm80
from hexa_fx.ops.operands import Esfk, Esmm, EsmmAct, Estmm


def host_us(run: Callable[[], object], repeats: int = 200) -> float:
    """Microseconds the host spends queueing `run`."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def operators(shape: str) -> dict[str, tuple[Callable[[], object], float, float]]:
    """Name -> (call, bytes moved at least, FLOPs)."""
    size = SHAPES[shape]
    tokens, k, experts, d, i = size.tokens, size.top_k, size.experts, size.model, size.inner
    n, ops = tokens * k, torch.ops.hexa
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    index = routing("balanced", size)
    v, inv, offs = ops.reindex(index, experts)
    weights = torch.rand(tokens, k, device="cuda")
    x, h, a = torch.randn(tokens, d, **bf16), torch.randn(n, 2 * i, **bf16), torch.randn(n, i, **bf16)
    y, w1 = torch.randn(n, d, **bf16), torch.randn(experts, 2 * i, d, **bf16) / d**0.5
    w2 = torch.randn(experts, d, i, **bf16) / i**0.5
    dense, dy = torch.randn(n, d, **bf16), torch.randn(tokens, d, **bf16)
    flops, silu = 2.0 * n * d * i, ("silu", "concat", [])
    return {
        "reindex": (lambda: ops.reindex(index, experts), 24.0 * n, 0.0),
        "combine": (lambda: ops.combine(y, weights, inv, offs, k), 2.0 * (n + tokens) * d, 0.0),
        "ess": (lambda: ops.ess(h, None, offs, 1, None), 4.0 * n * i, 0.0),
        "activate": (lambda: ops.activate(h, *silu), 6.0 * n * i, 0.0),
        "activate_backward": (lambda: ops.activate_backward(a, h, weights, v, offs, *silu), 12.0 * n * i, 0.0),
        "dense": (lambda: dense @ w1[0].t(), 0.0, 2 * flops),
        "esmm_act sm80": (
            lambda: sm80.esmm_act(EsmmAct(x, w1, None, None, None, v, offs, k, "nk", "silu", "concat", (), True)),
            0.0,
            2 * flops,
        ),
        "esmm_act": (lambda: ops.esmm_act(x, w1, None, None, None, v, offs, k, "nk", *silu, True), 0.0, 2 * flops),
        "esmm sm80": (lambda: sm80.esmm(Esmm(a, w2, None, None, offs, 1, "nk")), 0.0, flops),
        "esmm": (lambda: ops.esmm(a, w2, None, None, offs, 1, "nk"), 0.0, flops),
        "estmm sm80": (lambda: sm80.estmm(Estmm(x, h, v, None, offs, k, "nk")), 0.0, 2 * flops),
        "estmm": (lambda: ops.estmm(x, h, v, None, offs, k, "nk"), 0.0, 2 * flops),
        "esmm_act_backward": (
            lambda: ops.esmm_act_backward(dy, w2, h, weights, v, offs, k, "kn", *silu),
            0.0,
            flops,
        ),
        "esfk parts": (
            lambda: (ops.esmm(h, w1, None, None, offs, 1, "kn"), ops.estmm(x, h, v, None, offs, k, "nk")),
            0.0,
            4 * flops,
        ),
        "esfk parts sm80": (
            lambda: (
                sm80.esmm(Esmm(h, w1, None, None, offs, 1, "kn")),
                sm80.estmm(Estmm(x, h, v, None, offs, k, "nk")),
            ),
            0.0,
            4 * flops,
        ),
        "esfk sm80": (lambda: sm80.esfk(Esfk(x, h, w1, v, offs, k, "nk", False)), 0.0, 4 * flops),
        "esfk bias sm80": (lambda: sm80.esfk(Esfk(x, h, w1, v, offs, k, "nk", True)), 0.0, 4 * flops),
        "esfk": (lambda: ops.esfk(x, h, w1, v, offs, k, "nk", False), 0.0, 4 * flops),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3-30b,mixtral,qwen3-30b-t64")
    parser.add_argument("--only", default="", help="operators whose name starts with one of these")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        print(f"-- {shape} {SHAPES[shape]}", flush=True)
        chosen = {name: op for name, op in operators(shape).items() if name.startswith(tuple(options.only.split(",")))}
        times = medians({name: run for name, (run, _, _) in chosen.items()})
        for name, (run, size, flops) in chosen.items():
            ms, us = times[name], host_us(run)
            rate = f"{flops / ms / 1e9:8.1f} TFLOP/s" if flops else f"{size / ms / 1e6:8.1f} GB/s"
            print(f"{name:18s} {ms:9.4f} ms {rate}   host {us:6.1f} us", flush=True)
            rows.append({"shape": shape, "operator": name, "ms": ms, "flops": flops, "bytes": size, "host_us": us})
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
