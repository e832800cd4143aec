"""One MoE layer (experts and combine, no router) on one GPU, implementation by implementation.

    python benchmarks/bench_moe_layer.py [--shapes mixtral,...] [--routing balanced,skewed,one] [--impls hexa,...] [--json FILE]

Rows: ``dense`` is plain matmuls of the same FLOPs on contiguous rows (the floor), ``hexa`` is what `hexa_fx.optimize_` makes of
transformers' experts, ``hexa-invariant`` the same with `HexaConfig(batch_invariant=True)`, ``hexa-fp8`` with `compute="fp8_block"`,
``hexa-fp8-step`` likewise, weights quantised anew in every call, as after a step of an optimizer (`hexa-fp8` quantises them once),
``hexa-lists`` what it makes of experts in a list, each with matrices of its own,
``hf-grouped``, ``hf-batched`` and ``hf-eager`` are transformers' own experts modules where transformers is installed, ``loop`` the
eager loop over experts written here, ``sonic``, ``liger`` and ``scatter`` other packages where they are installed (peers.py); one
followed by ``@NAME`` runs only for the shape or the routing of that name. Data is random. Each has its own sustained clock: it
runs alone and without a pause for half a second, then for 0.9 s more, of which the mean is taken, and gives way to the next; the
median of `--turns` such means counts (`common.steady`, which says why not fewer calls). All routings of a shape take part in the
same turns, over one floor. ``saved`` is memory allocated by a training forward that is still there after it, output included;
``peak`` the maximum of forward + backward above what was there before, less the gradients. Errors are ||out - ref|| / ||ref||
against a float32 loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import peers
import torch
import torch.nn.functional as F
from common import LARGE, SHAPES, MoeShape, load, steady
from kept_rows import keep, options_of
from layers import (
    MIB,
    ExpertList,
    ListLayer,
    LoopExperts,
    Weights,
    activate,
    build_kernels,
    dense_layer,
    inference,
    layer,
    make_routing,
    make_weights,
    optimized,
    optimized_experts,
    training,
    transformers_experts,
)
from torch import Tensor, nn

from hexa_fx import HexaConfig


def memory(run: Callable[[], Tensor], p: Weights, dy: Tensor) -> dict[str, float]:
    """MiB saved by a training forward, and peak of forward + backward without the gradients."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    saved = torch.cuda.memory_allocated() - before
    grads = torch.autograd.grad(out, run.leaves if isinstance(run, ListLayer) else list(p.leaves.values()), dy)
    torch.cuda.synchronize()
    own = sum(g.numel() * g.element_size() for g in grads)
    return {"saved_mib": saved / MIB, "peak_mib": (torch.cuda.max_memory_allocated() - before - own) / MIB}


def errors(shape: MoeShape, run: Callable[[], Tensor], p: Weights, dy: Tensor) -> dict[str, float]:
    """Relative errors against a float32 loop; the weights' gradients are compared expert by expert."""
    out = run()
    names = list(p.leaves)
    grads = dict(zip(names, torch.autograd.grad(out, list(p.leaves.values()), dy)))
    ref_out, ref_dx = torch.zeros_like(p.x, dtype=torch.float32), torch.zeros_like(p.x, dtype=torch.float32)
    ref_gates = torch.zeros_like(p.gates, dtype=torch.float32)
    sums = {name: [0.0, 0.0] for name in ("w1", "w2")}
    for e in range(shape.experts):
        token, slot = (p.ids == e).nonzero(as_tuple=True)
        leaf = [t.detach()[e].float().requires_grad_() for t in (p.w1, p.w2)]
        rows = p.x.detach()[token].float().requires_grad_()
        gate = p.gates.detach()[token, slot].float().requires_grad_()
        h = F.linear(rows, leaf[0], None if p.b1 is None else p.b1.detach()[e].float())
        y = (
            F.linear(activate(h, shape.gated), leaf[1], None if p.b2 is None else p.b2.detach()[e].float())
            * gate[:, None]
        )
        ref = torch.autograd.grad(y, [rows, gate, *leaf], dy[token].float())
        ref_out.index_add_(0, token, y.detach())
        ref_dx.index_add_(0, token, ref[0])
        ref_gates[token, slot] = ref[1]
        for name, value in zip(("w1", "w2"), ref[2:]):
            sums[name][0] += float((grads[name][e].float() - value).square().sum())
            sums[name][1] += float(value.square().sum())
    result = {
        "out": relative(out, ref_out),
        "dx": relative(grads["x"], ref_dx),
        "dgates": relative(grads["gates"], ref_gates),
    }
    return result | {f"d{name}": (wrong / max(norm, 1e-30)) ** 0.5 for name, (wrong, norm) in sums.items()}


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value.detach().float() - reference).norm() / reference.norm())


def of_new_weights(experts: nn.Module, p: Weights) -> Callable[[], Tensor]:
    """A call of the experts whose weights count as changed."""
    run = layer(experts, p)

    def call() -> Tensor:
        torch.autograd.graph.increment_version([p.w1, p.w2])
        return run()

    return call


def implementations(shape: MoeShape, p: Weights, names: list[str], ours: nn.Module) -> dict[str, Callable[[], Tensor]]:
    makers: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "hexa": lambda: layer(ours, p),
        "hexa-invariant": lambda: layer(optimized_experts(shape, p, HexaConfig(batch_invariant=True)), p),
        "hexa-fp8": lambda: layer(optimized_experts(shape, p, HexaConfig(compute="fp8_block")), p),
        "hexa-fp8-step": lambda: of_new_weights(optimized_experts(shape, p, HexaConfig(compute="fp8_block")), p),
        "hexa-lists": lambda: ListLayer(optimized(ExpertList(shape, p), p), p),
        "loop": lambda: layer(LoopExperts(shape, p), p),
    }
    for name, implementation in {"hf-grouped": "grouped_mm", "hf-batched": "batched_mm", "hf-eager": "eager"}.items():
        makers[name] = lambda implementation=implementation: layer(transformers_experts(shape, p, implementation), p)
    makers |= {name: partial(maker, shape, p) for name, maker in peers.MAKERS.items()}
    found = {}
    for name in names:
        try:
            run = makers[name]()
            run()
        except ImportError:
            print(f"   {name}: not installed", flush=True)
            continue
        except Exception as error:  # a peer that is not there, or that cannot do this shape, leaves a line
            print(f"   {name}: left out, {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        found[name] = run
    return found


Runs = dict[str, dict[str, Callable[[], Tensor]]]
"""By routing and implementation."""


def bench(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one shape: all routings and implementations in the same turns."""
    shape, kinds = SHAPES[name], options.routing.split(",")
    torch.manual_seed(0)
    began = time.monotonic()
    p = make_weights(shape, kinds[0])
    cases = {kinds[0]: p}
    for kind in kinds[1:]:
        ids, gates = make_routing(shape, kind)
        cases[kind] = replace(p, ids=ids, gates=gates)
    dy, ours = torch.randn_like(p.x), optimized_experts(shape, p)
    asked = [impl.split("@") for impl in options.impls.split(",")]
    runs = {
        kind: implementations(shape, case, [impl for impl, *only in asked if not only or only[0] in (name, kind)], ours)
        for kind, case in cases.items()
    }
    print(f"   {name}: weights made and blocks optimized in {time.monotonic() - began:.1f} s", flush=True)
    ms_f, ms_b = times(shape, cases, runs, dy, options.turns)
    rows = []
    for kind, case in cases.items():
        size = f"{shape.tokens},{shape.top_k},{shape.experts},{shape.model},{shape.inner}"
        print(f"-- {name} {kind} T,k,E,D,I={size} load max/mean,empty {load(case.ids, shape.experts)}", flush=True)
        for impl in ("dense", *runs[kind]):
            key = impl if impl == "dense" else f"{kind} {impl}"
            row: dict[str, Any] = {"shape": name, "routing": kind, "impl": impl}
            row |= {"forward_ms": ms_f[key], "train_ms": ms_b[key]}
            row["forward_tflops"] = shape.forward_flops / ms_f[key] / 1e9
            row["train_tflops"] = 3 * shape.forward_flops / ms_b[key] / 1e9
            row["forward_ratio"], row["train_ratio"] = ms_f[key] / ms_f["dense"], ms_b[key] / ms_b["dense"]
            if impl in runs[kind]:
                row |= memory(runs[kind][impl], case, dy)
                if options.errors and impl != "hexa-lists":
                    row["errors"] = errors(shape, runs[kind][impl], case, dy)
            rows.append(row)
            print(line(row), flush=True)
    return rows


def times(
    shape: MoeShape, cases: dict[str, Weights], runs: Runs, dy: Tensor, turns: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of forward, and of forward and backward: of ``dense``, and of each implementation behind its routing's name."""
    forward, both = dense_layer(shape, next(iter(cases.values())))
    steps, trains = {"dense": forward}, {"dense": both}
    for kind, found in runs.items():
        steps |= {f"{kind} {impl}": inference(run) for impl, run in found.items()}
        trains |= {f"{kind} {impl}": training(run, cases[kind], dy) for impl, run in found.items()}
    return steady(steps, turns), steady(trains, turns)


def line(row: dict[str, Any]) -> str:
    text = f"   {row['impl']:11s} fwd {row['forward_ms']:8.3f} ms {row['forward_tflops']:6.1f} TF x{row['forward_ratio']:.2f}"
    text += f"   f+b {row['train_ms']:8.3f} ms {row['train_tflops']:6.1f} TF x{row['train_ratio']:.2f}"
    if "saved_mib" in row:
        text += f"   saved {row['saved_mib']:7.0f} peak {row['peak_mib']:7.0f} MiB"
    if "errors" in row:
        text += "   err*1e3 " + " ".join(f"{k} {v * 1e3:.1f}" for k, v in row["errors"].items())
    return text


def main() -> None:
    """Prints the table, writes the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default=",".join(LARGE))
    parser.add_argument("--routing", default="balanced")
    parser.add_argument("--impls", default="hexa,hf-grouped")
    parser.add_argument("--turns", type=int, default=2, help="means of each implementation, of which the median counts")
    parser.add_argument("--errors", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    names = options.shapes.split(",")
    build_kernels([SHAPES[name] for name in names], fp8="fp8" in options.impls)
    for name in names:
        rows += bench(name, options)
        torch.cuda.empty_cache()
        keep(rows, options.json)  # after every shape: what was measured stays if a later one fails


if __name__ == "__main__":
    main()
