"""Step time and peak memory by mode, overlap and memory of the shared cache."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.partition_layers import Stack, expert_parallel, fsdp2, partition
from benchmarks.partition_shapes import MEMORY, TINY, Options, Record, attempt, clean, milliseconds
from benchmarks.partition_trace import compute_ms, hidden_shares
from hexa_fx.distributed.groups import make_groups
from hexa_fx.distributed.profile import measure_bandwidth
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.passes.partition.plan import partition_model
from hexa_fx.passes.partition.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape

MODES = ("local", "data", "model", "model-paper", "ep", "fsdp2")
TRACED = 3


def stepper(model: Stack, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).float().sum().mul(1e-3).backward()

    return run


def as_graph(run: Callable[[], None], session: PartitionSession) -> Callable[[], None]:
    """The same step as a CUDA graph, which takes the host one call."""
    graphed = session.graphed(run, warmup=1)
    for _ in range(4):
        graphed()
    if not graphed.replays:
        raise RuntimeError(f"the step is not replayed: {graphed.reason}")
    return graphed


def prepared(mode: str, shape: ExpertShape, tokens: int, layers: int, o: Options) -> Any:
    """The model under a mode, and its session if it is partitioned."""
    model = Stack(layers, shape, o.length, o.device, o.dtype)
    if mode == "ep":
        expert_parallel(model)
    if mode == "fsdp2":
        fsdp2(model)
    if mode not in ("data", "model", "model-paper"):
        return model, None
    config = PartitionConfig(
        batch=tokens // o.length,
        tokens=tokens,
        static_tokens=True,
        reduce="all_reduce" if mode == "model-paper" else "reduce_scatter",
    )
    paths = {f"layers.{i}.moe": shape for i in range(layers)}
    plan = plan_layers(paths, [1.0] * dist.get_world_size(), mode.split("-")[0], config)
    return model, partition(model, plan).session


def step_time(mode: str, shape: ExpertShape, tokens: int, o: Options) -> Record:
    clean(o)
    model, session = prepared(mode, shape, tokens, o.layers, o)
    clean(o)
    if o.cuda:
        torch.cuda.reset_peak_memory_stats()
    x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=o.device, dtype=o.dtype)
    record: Record = {"mode": mode, "step_ms": milliseconds(stepper(model, x), o, o.repeats)}
    if o.cuda:
        record["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
    if session is not None:
        record["gathered_mib"] = session.cache.nbytes / 2**20
        session.close()
    return record


def chosen(shape: ExpertShape, tokens: int, o: Options) -> Record:
    """What `partition_model` picks for the middle of a model, with what it measured."""
    clean(o)
    model = Stack(o.layers, shape, o.length, o.device, o.dtype)
    x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=o.device, dtype=o.dtype)
    config = PartitionConfig(batch=tokens // o.length, tokens=tokens)
    start = time.perf_counter()
    plan = partition_model(model, model.blocks(), None, "auto", None, config, example=lambda: model(x))
    layer = plan.layers[-1]
    assert layer.cost is not None
    return {"picked": layer.mode, "seconds_to_plan": time.perf_counter() - start} | asdict(layer.cost)


def links(o: Options) -> Iterator[Record]:
    bandwidth, latency = measure_bandwidth(make_groups(), o.device, 2**20 if o.smoke else 256 * 2**20)
    yield {"question": "links", "bytes_per_second": bandwidth, "latency_s": latency}


def sweep(name: str, shape: ExpertShape, counts: Sequence[int], o: Options) -> Iterator[Record]:
    for tokens in counts:
        head = {"question": "step time", "shape": name, "tokens": tokens, "layers": o.layers}
        times: dict[str, float] = {}
        for mode in MODES:
            record = attempt(functools.partial(step_time, mode, shape, tokens, o), o)
            times[mode] = record.get("step_ms", float("inf"))
            yield head | {"mode": mode} | record
        record = attempt(functools.partial(chosen, shape, tokens, o), o)
        if "picked" in record:
            mine = times[{"data_centric": "data", "model_centric": "model", "fsdp": "fsdp2"}[record["picked"]]]
            best = min(times["data"], times["model"], times["fsdp2"])
            if best < float("inf"):
                record |= {"step_ms": mine, "best_ms": best, "over_best": round(mine / best, 4)}
        yield head | {"mode": "auto"} | record


def overlap(name: str, shape: ExpertShape, counts: Sequence[int], o: Options) -> Iterator[Record]:
    """A trace of data-centric steps with two slots, at the two larger token counts: launched by the host, then as a CUDA graph."""
    for captured in (False, True) if o.cuda else (False,):
        for tokens in counts[1:]:
            layers = 4 if shape.weight_numel > 10**9 else 6
            head = {"question": "overlap", "shape": name, "tokens": tokens, "layers": layers, "captured": captured}
            yield head | attempt(functools.partial(_overlap, shape, tokens, layers, captured, o), o)


def _overlap(shape: ExpertShape, tokens: int, layers: int, captured: bool, o: Options) -> Record:
    clean(o)
    x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=o.device, dtype=o.dtype)
    layer_ms = _layer_ms(shape, tokens, x, o)
    clean(o)
    model, session = prepared("data", shape, tokens, layers, o)
    run = stepper(model, x)
    step = milliseconds(run, o, 2)
    gathers, deferred = session.cache.gathers, session.reductions.deferred
    if captured:
        run = as_graph(run, session)
        step = milliseconds(run, o, 2)
    dist.barrier()
    shares = hidden_shares(run, dist.barrier, TRACED, layer_ms) if o.cuda else {}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, shares | {"layer_forward_ms": round(layer_ms, 3)}, group=make_groups().host)
    session.close()
    counted = {"gathers": gathers / 3, "deferred_sums": deferred / 3}  # of `milliseconds`: a warm-up and two
    return {"step_ms": step, **counted, "traced_steps": TRACED, "ranks": found}


def _layer_ms(shape: ExpertShape, tokens: int, x: Tensor, o: Options) -> float:
    """Compute time of one layer's forward with all weights there: attention, router and experts on this rank's tokens."""
    model, _ = prepared("local", shape, tokens, 2, o)
    with torch.no_grad():
        model(x)
        return compute_ms(lambda: model(x)) / 2 if o.cuda else 0.0


def memory(o: Options) -> Iterator[Record]:
    shape = TINY["tiny"][0] if o.smoke else MEMORY
    tokens = o.length * dist.get_world_size()
    for layers in (2, 4, 8, 12):
        clean(o)
        model, session = prepared("data", shape, tokens, layers, o)
        clean(o)
        x = torch.randn(tokens // dist.get_world_size(), shape.hidden_size, device=o.device, dtype=o.dtype)
        run = stepper(model, x)
        run()
        if o.cuda:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            peak = {"held_mib": held / 2**20, "peak_above_held_mib": (torch.cuda.max_memory_allocated() - held) / 2**20}
        else:
            peak = {}
        whole = shape.weight_numel * o.dtype.itemsize / 2**20
        cache = session.cache.nbytes / 2**20
        yield {"question": "memory", "layers": layers, "weights_of_a_layer_mib": whole, "gathered_mib": cache} | peak
        session.close()
        del model, session, run
