"""Correctness and step time of partitioned MoE layers.

    torchrun --nproc_per_node 2 benchmarks/bench_partition.py --out results.json            # CUDA, NCCL
    torchrun --nproc_per_node 2 benchmarks/bench_partition.py --out results.json --smoke    # CPU, Gloo, tiny

One model of attention + router + experts (`hexa::moe_ffn`) a layer, forward and backward, no optimizer. For every shape and
number of global tokens:

    local          every rank holds all weights and runs its own tokens; nothing is communicated (the ideal of data-centric)
    data           data-centric, two slots, prefetch        data-exposed   the same without prefetch
    model          model-centric, reduce-scatter            model-paper    with the paper's all-reduce
    auto           which of the two the cost model picks from measured bandwidth

Each record has the median step in milliseconds, peak memory, and for data-centric the share of gather time that is hidden:
1 - (step - local step - reduce time) / gather time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import types
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import hexa_fx.ops  # noqa: F401
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.cost_model import Measured, layer_cost
from hexa_fx.passes.partition import install_plan
from hexa_fx.passes.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape, Plan
from hexa_fx.runtime.distributed.collectives import wait
from hexa_fx.runtime.distributed.groups import make_groups
from hexa_fx.runtime.distributed.profile import measure_bandwidth, measure_modes

SHAPES = {
    "mixtral": (ExpertShape(8, 4096, 14336, 3, 2), (16384, 65536)),
    "qwen3-30b": (ExpertShape(128, 2048, 768, 3, 8), (16384, 65536)),
    "swin-moe-b": (ExpertShape(8, 512, 2048, 2, 2), (8192, 65536, 262144)),
}
SMOKE = {"tiny": (ExpertShape(4, 32, 64, 3, 2), (64, 256))}
HEADS = 16


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention. On CUDA torch returns None for an empty batch, which a rank with B_i = 0 has."""
    return scaled_dot_product_attention(q, k, v, is_causal=True) if q.shape[0] else q + k + v


fx.wrap("attention")


class Layer(nn.Module):
    """Attention over sequences of ``length`` tokens, a router, experts."""

    def __init__(self, shape: ExpertShape, length: int, device: Any, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        d, i, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
        self.shape, self.length, self.gated = shape, length, shape.matrices == 3

        def rand(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, device=device, dtype=dtype) * size[-1] ** -0.5)

        self.qkv, self.out, self.router = rand(d, 3 * d), rand(d, d), rand(d, e)
        self.w1, self.w2 = rand(e, (2 if self.gated else 1) * i, d), rand(e, d, i)

    def forward(self, x: Tensor) -> Tensor:
        heads = min(HEADS, self.shape.hidden_size // 16)
        q, k, v = (x @ self.qkv).view(-1, self.length, 3, heads, self.shape.hidden_size // heads).unbind(2)
        a = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + a.transpose(1, 2).reshape(-1, self.shape.hidden_size) @ self.out
        weights, index = torch.topk(torch.softmax((x @ self.router).float(), -1), self.shape.top_k, -1)
        static = ("silu" if self.gated else "gelu", "concat" if self.gated else "none", [], "nk", "nk", False)
        y = torch.ops.hexa.moe_ffn(x, index, weights.to(x.dtype), self.w1, None, None, None, self.w2, None, *static)
        return x + y


class Stack(nn.Module):
    def __init__(self, layers: int, *args: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(*args, seed) for seed in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def partition(model: Stack, plan: Plan) -> Any:
    blocks = [RewrittenBlock(f"layers.{i}", fx.symbolic_trace(m).graph) for i, m in enumerate(model.layers)]
    installed = install_plan(model, blocks, plan)
    for forms in installed.blocks:
        for block in forms.values():
            module = model.get_submodule(block.path)
            module.forward = types.MethodType(type(fx.GraphModule(module, block.graph)).forward, module)
            installed.session.bind(module, block.path)
    return installed


def own(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


# --- correctness -----------------------------------------------------------------------------------------------------


def correctness(
    splits: tuple[str, ...], device: Any, dtype: torch.dtype, rank: int, world: int
) -> Iterator[dict[str, Any]]:
    """Relative error of outputs and gradients to float32 on one device, beside that of one device in ``dtype``."""
    shape, length, seqs = ExpertShape(8, 256, 512, 3, 2), 64, 4 * world
    speeds = {"even": [1.0] * world, "uneven": [1.0 + r for r in range(world)], "h0": [1.0] * (world - 1) + [1e6]}
    for name in splits:
        seconds = speeds[name]
        for kind, reduce in (("model", "reduce_scatter"), ("model", "all_reduce"), ("data", "reduce_scatter")):
            config = PartitionConfig(batch=seqs, tile=64, reduce=reduce, slots=2)
            plan = plan_layers({f"layers.{i}": shape for i in range(3)}, seconds, kind, config)
            case = {"split": name, "kind": kind, "reduce": reduce, "h": plan.layers[0].shards, "batch": plan.batch}
            yield case | _error(plan, shape, length, seqs, device, dtype, rank)


def _error(
    plan: Plan, shape: ExpertShape, length: int, seqs: int, device: Any, dtype: torch.dtype, rank: int
) -> dict[str, float]:
    torch.manual_seed(1)
    x = torch.randn(seqs * length, shape.hidden_size, device=device)
    tokens = tuple(b * length for b in plan.batch)
    exact = Stack(3, shape, length, device, torch.float32)
    alone, model = (Stack(3, shape, length, device, torch.float32).to(dtype) for _ in range(2))
    with torch.no_grad():
        for p, q in zip(exact.parameters(), alone.parameters()):
            p.copy_(q.float())  # the same weights, so that only arithmetic differs
    installed = partition(model, plan)
    cuts = {shard.name: shard for shard in installed.shards}
    mine = own(tokens, rank)
    outputs = []
    for net, rows in ((exact, x.to(dtype).float()), (alone, x.to(dtype)), (model, x.to(dtype)[mine])):
        y = net(rows)
        (y.float() ** 2).sum().div(x.shape[0]).backward()
        outputs.append(y.detach().float())
    grads = []
    for (name, p), q, a in zip(model.named_parameters(), exact.parameters(), alone.parameters()):
        ours, theirs, single = p.grad.float(), q.grad, a.grad.float()
        if name in cuts:
            c = cuts[name]
            pick = lambda t, c=c: torch.cat([t.narrow(k.dim, k.start, k.length) for k in c.chunks], c.chunks[0].dim)  # noqa: E731
            theirs, single = pick(theirs), pick(single)
        else:
            dist.all_reduce(ours)
        if theirs.numel():
            grads.append((_relative(ours, theirs), _relative(single, theirs)))
    worst = torch.tensor(
        [
            _relative(outputs[2], outputs[0][mine]),
            _relative(outputs[1], outputs[0]),
            max(g[0] for g in grads),
            max(g[1] for g in grads),
        ],
        device=device,
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    installed.session.close()
    names = ("output", "output_one_device", "gradient", "gradient_one_device")
    return dict(zip(names, (round(float(v), 6) for v in worst)))


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12)) if b.numel() else 0.0


# --- time ------------------------------------------------------------------------------------------------------------


def sync(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Any, device: Any, repeats: int) -> float:
    """Median milliseconds of the slowest rank, after two warm-ups."""
    samples = []
    for _ in range(repeats + 2):
        sync(device)
        dist.barrier()
        start = time.perf_counter()
        run()
        sync(device)
        samples.append(time.perf_counter() - start)
    value = torch.tensor([statistics.median(samples[2:])], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return round(float(value) * 1e3, 3)


def step_time(
    shape: ExpertShape, tokens: int, mode: str, layers: int, length: int, device: Any, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    world = dist.get_world_size()
    gc.collect()  # a model and its patched forward refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = Stack(layers, shape, length, device, dtype)
    installed = None
    if mode != "local":
        kind = mode.split("-")[0]
        config = PartitionConfig(
            batch=tokens // length,
            tokens=tokens,
            static_tokens=True,
            tile=64,
            prefetch=mode != "data-exposed",
            reduce="all_reduce" if mode == "model-paper" else "reduce_scatter",
        )
        plan = plan_layers({f"layers.{i}": shape for i in range(layers)}, [1.0] * world, kind, config)
        installed = partition(model, plan)
    x = torch.randn(tokens // world, shape.hidden_size, device=device, dtype=dtype)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).float().sum().mul(1e-3).backward()

    record: dict[str, Any] = {"mode": mode, "step_ms": timed(run, device, repeats)}
    if device.type == "cuda":
        record["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
    if installed is not None:
        record["gathers"] = installed.session.cache.gathers / (repeats + 2)
        record["cache_mib"] = installed.session.cache.nbytes // 2**20
        installed.session.close()
    return record


def collective_times(shape: ExpertShape, device: Any, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """One layer's weights gathered and its gradients reduced, alone, in milliseconds."""
    groups = make_groups()
    world = groups.world
    rows, row = shape.intermediate_size // world, shape.weight_numel // shape.intermediate_size
    own_rows = torch.zeros(rows, row, device=device, dtype=dtype)
    all_rows = torch.zeros(rows * world, row, device=device, dtype=dtype)
    name = groups.gather_name
    gather = timed(
        lambda: wait(torch.ops.hexa.all_gather_v_(all_rows, own_rows, [rows] * world, name) or all_rows),
        device,
        repeats,
    )
    reduce = timed(lambda: wait(torch.ops.hexa.reduce_scatter_v(all_rows, [rows] * world, name)), device, repeats)
    return {"gather_ms": gather, "reduce_ms": reduce}


def sweep(args: Any, device: Any, dtype: torch.dtype, save: Any) -> None:
    world = dist.get_world_size()
    bandwidth, latency = measure_bandwidth(make_groups(), device, 2**20 if args.smoke else 256 * 2**20)
    save({"question": "links", "bytes_per_second": bandwidth, "latency_s": latency})
    for name, (shape, counts) in (SMOKE if args.smoke else SHAPES).items():
        layers, length = args.layers, 16 if args.smoke else 2048
        alone = collective_times(shape, device, dtype, args.repeats)
        for tokens in counts:
            times: dict[str, float] = {}
            for mode in ("local", "data", "data-exposed", "model", "model-paper"):
                if time.monotonic() > args.end:
                    save(
                        {
                            "question": "step time",
                            "shape": name,
                            "tokens": tokens,
                            "mode": mode,
                            "skipped": "out of time",
                        }
                    )
                    continue
                try:
                    record = step_time(shape, tokens, mode, layers, length, device, dtype, args.repeats)
                except RuntimeError as error:  # raised on all ranks alike (out of memory, say), or the job times out
                    where = {"question": "step time", "shape": name, "tokens": tokens, "mode": mode}
                    save(where | {"error": str(error)[:300]})
                    continue
                times[mode] = record["step_ms"]
                if mode.startswith("data") and "local" in times:
                    moved = record["gathers"] * alone["gather_ms"]
                    exposed = max(0.0, record["step_ms"] - times["local"] - layers * alone["reduce_ms"])
                    record["gather_hidden"] = round(1 - min(1.0, exposed / max(moved, 1e-9)), 3)
                save({"question": "step time", "shape": name, "tokens": tokens, "layers": layers} | record | alone)
            if {"data", "model"} <= set(times):
                # forward of a layer is about a third of its step; the split of it does not matter with two slots
                share = times.get("local", times["data"]) / layers / 3 / 1e3
                by_model, by_data = measure_modes(shape, tokens, dtype=dtype, device=device, groups=make_groups())
                measured = Measured(bandwidth, latency, share / 4, share * 3 / 4, by_model, by_data)
                size = dtype.itemsize
                mode, cost = layer_cost(
                    shape, tokens, world, dtype_bytes=size, reduce_bytes=size, slots=2, measured=measured
                )
                picked = times["model" if mode == "model_centric" else "data"]
                save(
                    {"question": "auto", "shape": name, "tokens": tokens, "picked": mode, "cost": asdict(cost)}
                    | {"step_ms": picked, "best_ms": min(times["data"], times["model"])}
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="skip what would start later")
    args = parser.parse_args()
    args.end = time.monotonic() + args.seconds
    rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() and not args.smoke
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    records: list[dict[str, Any]] = []

    def save(record: dict[str, Any]) -> None:
        records.append(record)
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
            name = torch.cuda.get_device_name() if cuda else "cpu"
            header = {"device": name, "ranks": dist.get_world_size(), "torch": torch.__version__}
            with open(args.out, "w") as file:
                json.dump(header | {"records": records}, file, indent=1)

    dtype = torch.bfloat16 if cuda else torch.float32
    for splits in (("even", "uneven"), ("h0",)):
        for record in correctness(splits, device, dtype, dist.get_rank(), dist.get_world_size()):
            save({"question": "correctness", "dtype": str(dtype)} | record)
        if splits[0] == "even":
            sweep(args, device, dtype, save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
