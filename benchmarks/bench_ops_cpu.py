"""`hexa::moe_ffn` on a CPU against the loops that people write, forward and forward + backward.

    python benchmarks/bench_ops_cpu.py [--threads 1] [--dtype float32] [--shapes small] [--json results.json]

One line a shape: milliseconds of transformers' eager loop over stacked weights (`MixtralExperts`) or, marked ``list``, of
a loop over a ModuleList of experts; ours; and how many times faster ours is. The runs alternate and the medians are
compared, so a busy machine disturbs both sides alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hexa_fx import ops
from hexa_fx.ir import FfnSpec


@dataclass(frozen=True)
class Shape:
    """T tokens, k experts per token, E experts, D model size, I intermediate size; weights stacked or in a list."""

    T: int
    k: int
    E: int
    D: int
    I: int  # noqa: E741
    kind: str = "stacked"

    def __str__(self) -> str:
        return f"T={self.T:<5} k={self.k} E={self.E:<3} D={self.D:<4} I={self.I:<4} {self.kind}"


SHAPES = {
    "tiny": [
        Shape(1, 2, 4, 32, 64),
        Shape(1, 2, 8, 128, 256),
        Shape(7, 2, 4, 32, 64),
        Shape(14, 2, 4, 32, 64),
        Shape(14, 2, 8, 64, 128),
        Shape(14, 1, 4, 32, 64),
        Shape(14, 1, 2, 32, 64, "list"),
        Shape(14, 2, 4, 32, 64, "list"),
        Shape(32, 4, 16, 64, 32),
        Shape(3, 1, 1, 32, 64),
        Shape(16, 4, 4, 64, 64),
        Shape(64, 8, 64, 64, 32),
    ],
    "small": [
        Shape(128, 2, 8, 128, 256),
        Shape(128, 2, 8, 128, 256, "list"),
        Shape(256, 2, 4, 256, 512),
        Shape(256, 1, 2, 256, 512, "list"),
        Shape(512, 2, 8, 256, 512),
        Shape(512, 4, 16, 256, 256),
        Shape(256, 8, 64, 128, 96),
        Shape(512, 8, 128, 128, 64),
        Shape(512, 8, 64, 256, 128, "list"),
    ],
    "medium": [
        Shape(1024, 2, 8, 512, 1024),
        Shape(1024, 2, 8, 512, 1024, "list"),
        Shape(2048, 1, 4, 512, 1024),
        Shape(1024, 8, 64, 512, 256),
        Shape(2048, 8, 128, 256, 128),
        Shape(4096, 8, 64, 256, 128),
        Shape(1024, 8, 256, 256, 128),
    ],
}


class ListExpert(nn.Module):
    """One expert of the older style: three linears."""

    def __init__(self, d: int, i: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (
            nn.Linear(d, i, bias=False),
            nn.Linear(d, i, bias=False),
            nn.Linear(i, d, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """w2(silu(w1 x) * w3 x)."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class ListExperts(nn.Module):
    """The loop of transformers 4 and of most hand-written code."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts = nn.ModuleList(ListExpert(shape.D, shape.I) for _ in range(shape.E))

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """One mask, gather and index_add an expert."""
        out = torch.zeros_like(x)
        mask = F.one_hot(top_k_index, num_classes=len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            if token.numel() == 0:
                continue
            y = expert(x[token]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out


def stacked_experts(shape: Shape) -> nn.Module:
    """transformers' own experts module, eager."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=shape.D, intermediate_size=shape.I, num_local_experts=shape.E, num_experts_per_tok=shape.k
    )
    config._experts_implementation = "eager"
    return MixtralExperts(config)


def problem(shape: Shape, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]:
    """(theirs, ours, leaves) on the same data; the leaves take the gradients."""
    torch.manual_seed(0)
    module = (stacked_experts if shape.kind == "stacked" else ListExperts)(shape).to(dtype)
    for p in module.parameters():
        nn.init.normal_(p, std=0.02)
    x = torch.randn(shape.T, shape.D, dtype=dtype, requires_grad=True)
    scores, index = torch.randn(shape.T, shape.E).softmax(-1).topk(shape.k)
    weights = scores.to(dtype).requires_grad_()
    if shape.kind == "stacked":
        w1, w3, w2 = module.gate_up_proj, None, module.down_proj
        spec = FfnSpec("silu", "concat")
    else:
        parts = [torch.stack([getattr(e, n).weight for e in module.experts]) for n in ("w1", "w3", "w2")]
        w1, w3, w2 = (p.detach().requires_grad_() for p in parts)
        spec = FfnSpec("silu", "split")
    leaves = [x, weights, w1, w2, *module.parameters(), *([] if w3 is None else [w3])]
    return (
        lambda: module(x, index, weights),
        lambda: ops.moe_ffn(x, index, weights, w1, None, w3, None, w2, None, spec),
        leaves,
    )


def measure(
    shape: Shape, dtype: torch.dtype, backward: bool, budget: float, clock: Callable[[], float]
) -> dict[str, object]:
    """Median milliseconds of both, from alternating runs within ``budget`` seconds."""
    theirs, ours, leaves = problem(shape, dtype)

    def step(f: Callable[[], Tensor]) -> float:
        for t in leaves:
            t.grad = None
        start = clock()
        if backward:
            y = f()
            y.backward(y.detach())
        else:
            with torch.no_grad():
                f()
        return 1e3 * (clock() - start)

    for f in (theirs, ours):
        step(f), step(f)
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + budget
    while len(times[0]) < 7 or time.perf_counter() < end:
        times[0].append(step(theirs))
        times[1].append(step(ours))
    eager, mine = (statistics.median(t) for t in times)
    return {
        **asdict(shape),
        "pass": "fwd+bwd" if backward else "fwd",
        "eager_ms": eager,
        "ours_ms": mine,
        "times_faster": eager / mine,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--shapes", default="tiny,small,medium", help="comma separated: " + ", ".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time a line")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of the process instead of wall time")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = []
    for shape in [s for group in args.shapes.split(",") for s in SHAPES[group]]:
        for backward in (False, True):
            row = measure(shape, getattr(torch, args.dtype), backward, args.seconds, clock)
            rows.append({"threads": args.threads, "dtype": args.dtype, **row})
            print(
                f"{shape!s:42} {row['pass']:8} eager {row['eager_ms']:9.3f} ms   ours {row['ours_ms']:9.3f} ms   "
                f"{row['times_faster']:6.2f}x",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
