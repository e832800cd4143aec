"""Correctness, step time, memory and overlap of partitioned MoE layers.

    torchrun --nproc_per_node 2 benchmarks/bench_partition.py --out results.json            # CUDA, NCCL
    torchrun --nproc_per_node 2 benchmarks/bench_partition.py --out results.json --smoke    # CPU, Gloo, tiny
    python benchmarks/bench_partition.py --prebuild 2,4      # builds the kernels of those runs, all at a time, on one GPU

A model of attention, router and experts (`hexa::moe_ffn`) a layer, forward and backward, no optimizer, random weights and
routing. Sections (``--sections``):

    correctness  relative error of outputs and gradients to float32 on one device, beside that of one device in bf16
    sweep        step time and peak memory by shape and number of global tokens:
                 local        every rank holds all weights, nothing is communicated (gradients stay partial)
                 data         data-centric, two slots         model        model-centric, reduce-scatter
                 model-paper  the paper's all-reduce          auto         what partition_model picks, and its numbers
                 ep           whole experts, tokens by all-to-all (its own routing loop)       fsdp2  fully_shard a layer
    overlap      a profiler trace of one data-centric step: share of gather and reduce-scatter time beside compute
    memory       gathered weights and peak memory from 2 to 12 layers
    unequal      unequal devices by green contexts (partition_unequal.py)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.common import environment
from benchmarks.partition_layers import Stack, expert_parallel, fsdp2, partition
from benchmarks.partition_trace import hidden_shares
from benchmarks.partition_unequal import SETTINGS, unequal, unequal_steps, work
from hexa_fx.passes.partition import partition_model
from hexa_fx.passes.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape, Plan
from hexa_fx.runtime.distributed.groups import make_groups
from hexa_fx.runtime.distributed.profile import measure_bandwidth

MIXTRAL = ExpertShape(8, 4096, 14336, 3, 2)
QWEN3 = ExpertShape(128, 2048, 768, 3, 8)
SWIN = ExpertShape(8, 512, 2048, 2, 2)
SHAPES = {
    "mixtral": (MIXTRAL, (8192, 32768, 131072)),
    "qwen3-30b": (QWEN3, (8192, 32768, 131072)),
    "swin-moe-b": (SWIN, (8192, 32768, 131072)),
}
SMOKE = {"tiny": (ExpertShape(4, 32, 128, 3, 2), (64, 256))}
MODES = ("local", "data", "model", "model-paper", "ep", "fsdp2")
SECTIONS = ("correctness", "sweep", "overlap", "memory", "unequal")

Record = dict[str, Any]


def own(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


# --- correctness -----------------------------------------------------------------------------------------------------


def correctness(device: Any, dtype: torch.dtype) -> Iterator[Record]:
    world, rank = dist.get_world_size(), dist.get_rank()
    shape, length, sequences = ExpertShape(8, 256, 512, 3, 2), 64, 4 * world
    speeds = {"even": [1.0] * world, "uneven": [1.0 + r for r in range(world)], "h0": [1.0] * (world - 1) + [1e6]}
    for name, seconds in speeds.items():
        for kind, reduce in (("model", "reduce_scatter"), ("model", "all_reduce"), ("data", "reduce_scatter")):
            config = PartitionConfig(batch=sequences, tile=64, reduce=reduce, slots=2)
            plan = plan_layers({f"layers.{i}.moe": shape for i in range(3)}, seconds, kind, config)
            case = {"split": name, "kind": kind, "reduce": reduce, "h": plan.layers[0].shards, "batch": plan.batch}
            yield {"question": "correctness"} | case | _error(plan, shape, length, device, dtype, rank)


def _error(plan: Plan, shape: ExpertShape, length: int, device: Any, dtype: torch.dtype, rank: int) -> Record:
    torch.manual_seed(1)
    x = torch.randn(sum(plan.batch) * length, shape.hidden_size, device=device)
    exact = Stack(3, shape, length, device, torch.float32)
    alone, model = (Stack(3, shape, length, device, torch.float32).to(dtype) for _ in range(2))
    with torch.no_grad():
        for p, q in zip(exact.parameters(), alone.parameters()):
            p.copy_(q.float())  # the same weights, so that only arithmetic differs
    installed = partition(model, plan)
    mine = own(tuple(b * length for b in plan.batch), rank)
    outputs = []
    for net, rows in ((exact, x.to(dtype).float()), (alone, x.to(dtype)), (model, x.to(dtype)[mine])):
        y = net(rows)
        (y.float() ** 2).sum().div(x.shape[0]).backward()
        outputs.append(y.detach().float())
    errors = [_relative(outputs[2], outputs[0][mine]), _relative(outputs[1], outputs[0])]
    errors += [max(pair) for pair in zip(*_gradient_errors(model, exact, alone, installed))]
    worst = torch.tensor(errors, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    installed.session.close()
    names = ("output", "output_one_device", "gradient", "gradient_one_device")
    return dict(zip(names, (round(float(v), 6) for v in worst)))


def _gradient_errors(model: Stack, exact: Stack, alone: Stack, installed: Any) -> Iterator[tuple[float, float]]:
    cuts = {shard.name: shard.chunks for shard in installed.shards}
    for (name, p), q, a in zip(model.named_parameters(), exact.parameters(), alone.parameters()):
        ours, theirs, single = p.grad.float(), q.grad, a.grad.float()
        if name in cuts:
            theirs, single = (
                torch.cat([t.narrow(c.dim, c.start, c.length) for c in cuts[name]], cuts[name][0].dim)
                for t in (theirs, single)
            )
        else:
            dist.all_reduce(ours)
        if theirs.numel():
            yield _relative(ours, theirs), _relative(single, theirs)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12)) if b.numel() else 0.0


# --- time and memory -------------------------------------------------------------------------------------------------


def sync(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], None], device: Any, repeats: int) -> float:
    """Median milliseconds of the slowest rank, after one warm-up."""
    samples = []
    for _ in range(repeats + 1):
        sync(device)
        dist.barrier()
        start = time.perf_counter()
        run()
        sync(device)
        samples.append(time.perf_counter() - start)
    value = torch.tensor([statistics.median(samples[1:])], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return round(float(value) * 1e3, 3)


def clean(device: Any) -> None:
    gc.collect()  # a model and its patched forward refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def stepper(model: Stack, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).float().sum().mul(1e-3).backward()

    return run


def prepared(mode: str, shape: ExpertShape, tokens: int, layers: int, length: int, device: Any, dtype: Any) -> Any:
    """The model under a mode, and its session if it is partitioned."""
    model = Stack(layers, shape, length, device, dtype)
    if mode == "ep":
        expert_parallel(model)
    if mode == "fsdp2":
        fsdp2(model)
    if mode not in ("data", "model", "model-paper"):
        return model, None
    config = PartitionConfig(
        batch=tokens // length,
        tokens=tokens,
        static_tokens=True,
        reduce="all_reduce" if mode == "model-paper" else "reduce_scatter",
    )
    paths = {f"layers.{i}.moe": shape for i in range(layers)}
    plan = plan_layers(paths, [1.0] * dist.get_world_size(), mode.split("-")[0], config)
    return model, partition(model, plan).session


def step_time(mode: str, shape: ExpertShape, tokens: int, args: Any, device: Any, dtype: Any) -> Record:
    clean(device)
    model, session = prepared(mode, shape, tokens, args.layers, args.length, device, dtype)
    clean(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=device, dtype=dtype)
    record: Record = {"mode": mode, "step_ms": timed(stepper(model, x), device, args.repeats)}
    if device.type == "cuda":
        record["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
    if session is not None:
        record["gathered_mib"] = session.cache.nbytes / 2**20
        session.close()
    return record


def chosen(shape: ExpertShape, tokens: int, args: Any, device: Any, dtype: Any) -> Record:
    """What `partition_model` picks for the middle of a model, with what it measured."""
    clean(device)
    model = Stack(args.layers, shape, args.length, device, dtype)
    x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=device, dtype=dtype)
    config = PartitionConfig(batch=tokens // args.length, tokens=tokens)
    start = time.perf_counter()
    plan = partition_model(model, model.blocks(), None, "auto", None, config, example=lambda: model(x))
    layer = plan.layers[-1]
    assert layer.cost is not None
    return {"picked": layer.mode, "seconds_to_plan": time.perf_counter() - start} | asdict(layer.cost)


def sweep(args: Any, device: Any, dtype: Any) -> Iterator[Record]:
    bandwidth, latency = measure_bandwidth(make_groups(), device, 2**20 if args.smoke else 256 * 2**20)
    yield {"question": "links", "bytes_per_second": bandwidth, "latency_s": latency}
    for name, (shape, counts) in args.shapes.items():
        for tokens in counts:
            head = {"question": "step time", "shape": name, "tokens": tokens, "layers": args.layers}
            times: dict[str, float] = {}
            for mode in MODES:
                record = attempt(lambda m=mode, s=shape, t=tokens: step_time(m, s, t, args, device, dtype), args)
                times[mode] = record.get("step_ms", float("inf"))
                yield head | {"mode": mode} | record
            record = attempt(lambda s=shape, t=tokens: chosen(s, t, args, device, dtype), args)
            if "picked" in record:
                mine = times["data" if record["picked"] == "data_centric" else "model"]
                best = min(times["data"], times["model"])
                record |= {"step_ms": mine, "best_ms": best, "over_best": round(mine / best, 4)}
            yield head | {"mode": "auto"} | record


def attempt(run: Callable[[], Record], args: Any) -> Record:
    """Errors are raised on all ranks alike (out of memory, say), or the job times out."""
    late = torch.tensor([time.monotonic() > args.end], dtype=torch.int32)
    dist.all_reduce(late, op=dist.ReduceOp.MAX, group=make_groups().host)
    if late.item():
        return {"skipped": "out of time"}
    try:
        return run()
    except (RuntimeError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def overlap(args: Any, device: Any, dtype: Any) -> Iterator[Record]:
    """Six layers, so that first and last, which cannot be hidden, weigh less."""
    for name, (shape, counts) in args.shapes.items():
        for tokens in counts[1:]:
            layers = 4 if shape.weight_numel > 10**9 else 6
            head = {"question": "overlap", "shape": name, "tokens": tokens, "layers": layers}
            yield head | attempt(lambda s=shape, t=tokens, n=layers: _overlap(s, t, n, args, device, dtype), args)


def _overlap(shape: ExpertShape, tokens: int, layers: int, args: Any, device: Any, dtype: Any) -> Record:
    clean(device)
    model, session = prepared("data", shape, tokens, layers, args.length, device, dtype)
    x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=device, dtype=dtype)
    run = stepper(model, x)
    step = timed(run, device, 2)
    dist.barrier()
    shares = hidden_shares(run) if device.type == "cuda" else {}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, shares, group=make_groups().host)
    gathers, deferred = session.cache.gathers, session.reductions.deferred
    session.close()
    steps = 4 if device.type == "cuda" else 3
    return {"step_ms": step, "gathers": gathers / steps, "deferred_sums": deferred / steps, "ranks": found}


def memory(args: Any, device: Any, dtype: Any) -> Iterator[Record]:
    shape = ExpertShape(4, 32, 128, 3, 2) if args.smoke else ExpertShape(8, 2048, 4096, 3, 2)
    length = args.length
    tokens = length * dist.get_world_size()
    for layers in (2, 4, 8, 12):
        clean(device)
        model, session = prepared("data", shape, tokens, layers, length, device, dtype)
        clean(device)
        x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=device, dtype=dtype)
        run = stepper(model, x)
        run()
        if device.type == "cuda":
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            peak = {"held_mib": held / 2**20, "peak_above_held_mib": (torch.cuda.max_memory_allocated() - held) / 2**20}
        else:
            peak = {}
        whole = shape.weight_numel * dtype.itemsize / 2**20
        cache = session.cache.nbytes / 2**20
        yield {"question": "memory", "layers": layers, "weights_of_a_layer_mib": whole, "gathered_mib": cache} | peak
        session.close()
        del model, session, run


def unequal_devices(args: Any, device: Any, dtype: Any) -> Iterator[Record]:
    shapes = args.shapes if args.smoke else {"mixtral": (MIXTRAL, (65536,)), "swin-moe-b": (SWIN, (131072,))}
    for run in (unequal, unequal_steps):
        for name, (shape, counts) in shapes.items():
            clean(device)
            length = args.length if args.smoke else 1024 if name == "mixtral" else 2048
            yield from run(shape, name, counts[-1], length, device, dtype, args.repeats)


def take_esfk_apart() -> None:
    from hexa_fx.runtime import cuda_gemm_sm90 as sm90

    def parts(x: Any, g: Any, weight: Any, x_index: Any, offs: Any, top_k: int, layout: Any, has_bias: bool) -> Any:
        assert not has_bias
        dx = sm90.esmm(g, weight, None, None, offs, 1, "kn" if layout == "nk" else "nk")
        return dx, sm90.estmm(x, g, x_index, None, offs, top_k, layout), None

    sm90.esfk = parts


# --- kernels ---------------------------------------------------------------------------------------------------------


def prebuild(worlds: list[int], args: Any) -> None:
    """Runs every product that the sections will run, in the sizes of every rank count, without launching anything."""
    from hexa_fx.runtime.cuda_launch import prebuild as build

    device, dtype = torch.device("cuda", 0), torch.bfloat16

    def experts(shape: ExpertShape, tokens: int, channels: int, kind: torch.dtype = dtype) -> None:
        work(shape, tokens, channels, device, kind, None)()

    def run() -> None:
        from hexa_fx.runtime.distributed import profile

        for world in worlds:
            for shape, counts in args.shapes.values():
                for tokens in counts:
                    experts(shape, tokens // world, shape.intermediate_size)
                    experts(shape, tokens, shape.intermediate_size // world)
                    one = replace(shape, num_experts=shape.num_experts // world, top_k=1)
                    experts(one, tokens * shape.top_k // world, shape.intermediate_size)
                    data_centric(shape, tokens // world)
                    torch.cuda.empty_cache()
            for sizes in SETTINGS[world]:
                for share in sizes:
                    part = share / sum(sizes)
                    experts(MIXTRAL, 65536, int(MIXTRAL.intermediate_size * part) // 128 * 128)
                    experts(SWIN, 131072, int(SWIN.intermediate_size * part) // 64 * 64)
                    for shape, tokens in ((MIXTRAL, int(65536 * part)), (SWIN, int(131072 * part))):
                        experts(shape, tokens, shape.intermediate_size)
                        data_centric(shape, tokens)
        for shape in (MIXTRAL, QWEN3, SWIN):
            profile._proxy(shape, shape.matrices == 3, 16384, dtype, device)()
        for shape in (MIXTRAL, SWIN):
            experts(shape, 1024, 512)
        small = ExpertShape(8, 256, 512, 3, 2)
        for kind in (torch.bfloat16, torch.float32):
            for tokens in (256, 512, 1024):
                experts(small, tokens, 512, kind)
                experts(small, tokens, 128, kind)
                data_centric(small, tokens, kind)
        data_centric(ExpertShape(8, 2048, 4096, 3, 2), 2048)

    def data_centric(shape: ExpertShape, tokens: int, kind: torch.dtype = dtype) -> None:
        from hexa_fx.runtime.distributed.geometry import Geometry

        geometry = Geometry(shape, "split" if shape.matrices == 3 else "none", "nk", "kn", False)
        rows = torch.empty(shape.intermediate_size, geometry.row, device=device, dtype=kind)
        views = [None if w is None else w.detach().requires_grad_() for w in geometry.views(rows)]
        x = torch.empty(tokens, shape.hidden_size, device=device, dtype=kind).requires_grad_()
        index = torch.zeros(tokens, shape.top_k, device=device, dtype=torch.int64)
        weights = torch.empty(tokens, shape.top_k, device=device, dtype=kind).requires_grad_()
        static = ("silu" if shape.matrices == 3 else "gelu", geometry.glu, [], "nk", "kn", False)
        y = torch.ops.hexa.moe_ffn(x, index, weights, *views, None, *static)
        torch.autograd.grad(y, [x, weights, *(v for v in views if v is not None)], torch.ones_like(y))

    start = time.monotonic()
    print(f"{build(run)} kernels in {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="partition.json")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--prebuild", default="")
    parser.add_argument("--esfk-parts", action="store_true", help="dX and dW of a projection by a kernel each")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="skip what would start later")
    args = parser.parse_args()
    args.end = time.monotonic() + args.seconds
    args.shapes = SMOKE if args.smoke else {name: SHAPES[name] for name in args.shapes.split(",")}
    args.length = 16 if args.smoke else 2048
    if args.esfk_parts:
        take_esfk_apart()
    if args.prebuild:
        prebuild([int(n) for n in args.prebuild.split(",")], args)
        return
    rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() and not args.smoke
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    dtype = torch.bfloat16 if cuda else torch.float32
    sections: dict[str, Callable[[], Iterator[Record]]] = {
        "correctness": lambda: correctness(device, dtype),
        "sweep": lambda: sweep(args, device, dtype),
        "overlap": lambda: overlap(args, device, dtype),
        "memory": lambda: memory(args, device, dtype),
        "unequal": lambda: unequal_devices(args, device, dtype),
    }
    header: Record = environment() if cuda else {"device": "cpu", "torch": torch.__version__}
    options = "--esfk-parts " if args.esfk_parts else ""
    options += (
        f"--sections {args.sections} --shapes {','.join(args.shapes)} --layers {args.layers} --repeats {args.repeats}"
    )
    header["command"] = f"torchrun --nproc_per_node {dist.get_world_size()} benchmarks/bench_partition.py {options}"
    header["ranks"] = dist.get_world_size()
    records: list[Record] = []
    for section in args.sections.split(","):
        start = time.monotonic()
        for record in sections[section]():
            records.append(record)
            save(args.out, header, records)
        records.append({"question": "seconds", "section": section, "seconds": round(time.monotonic() - start, 1)})
        save(args.out, header, records)
    if cuda:
        from hexa_fx.runtime import cuda_launch

        records.append({"question": "fallbacks", "found": dict(cuda_launch.fallbacks)})
        save(args.out, header, records)
    dist.barrier()
    dist.destroy_process_group()


def save(path: str, header: Record, records: list[Record]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(records[-1]), flush=True)
        with open(f"{path}.partial", "w") as file:
            json.dump(header | {"records": records}, file, indent=1)
        os.replace(f"{path}.partial", path)


if __name__ == "__main__":
    main()
