"""Unequal devices, emulated: each rank's experts run on a green context of some of its GPU's multiprocessors.

Reported for weighted and uniform shards, data-centric (B_i) and model-centric (h_i): the slowest rank's time in the experts,
forward and backward, against the ideal, 1 / sum of 1 / t_i, where t_i is the time of all the work on rank i alone; and the
whole step with communication. Memory and links are not slowed down.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.partition_layers import Stack, partition
from hexa_fx.allocation import allocate
from hexa_fx.passes.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape
from hexa_fx.runtime.distributed.groups import make_groups
from hexa_fx.runtime.distributed.profile import profile_devices

SETTINGS = {2: ((132, 64),), 4: ((132, 132, 64, 32),)}


_contexts: list[Any] = []


def green_stream(sms: int, device: torch.device) -> Any:
    """A stream on ``sms`` multiprocessors; None for all of them."""
    if device.type != "cuda" or sms >= torch.cuda.get_device_properties(device).multi_processor_count:
        return None
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=sms, device_id=device.index)
    _contexts.append(context)  # must outlive its streams
    if hasattr(context, "Stream"):
        return context.Stream()
    context.set_context()
    try:
        return torch.cuda.Stream()
    finally:
        context.pop_context()


def launch_by_kernel() -> None:
    """Launches CUkernels instead of CUfunctions, which belong to the context they were looked up in."""
    from hexa_fx.jit import kernel
    from hexa_fx.runtime import cuda_launch

    prepare = kernel.KernelHandle._prepare

    def prepared(self: Any, device: int) -> Any:
        prepare(self, device)
        self._functions[device] = self._kernel
        return self._kernel

    kernel.KernelHandle._prepare = prepared  # type: ignore[method-assign]
    kernel.get_kernel.cache_clear()
    cuda_launch.forget_plans()
    cuda_launch.fallbacks.clear()
    cuda_launch._permanent.clear()


def works_on(stream: Any, shape: ExpertShape, device: Any, dtype: torch.dtype) -> bool:
    """Whether our kernels run on this stream, without falling back."""
    if stream is None:
        return True
    from hexa_fx.runtime import cuda_launch

    known = set(cuda_launch.fallbacks)
    work(shape, 1024, 512, device, dtype, stream)()
    torch.cuda.synchronize()
    return set(cuda_launch.fallbacks) == known


def on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def work(
    shape: ExpertShape, tokens: int, channels: int, device: Any, dtype: torch.dtype, stream: Any
) -> Callable[[], None]:
    """Forward and backward of the experts with so many tokens and channels."""
    if not tokens or not channels:
        return lambda: None
    gated = shape.matrices == 3
    wide = (2 if gated else 1) * channels

    def rand(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_(0.02).requires_grad_()

    x, w1 = rand(tokens, shape.hidden_size), rand(shape.num_experts, wide, shape.hidden_size)
    w2 = rand(shape.num_experts, shape.hidden_size, channels)
    index = torch.rand(tokens, shape.num_experts, device=device).topk(shape.top_k, 1).indices
    weights = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device, dtype=dtype).requires_grad_()
    static = ("silu" if gated else "gelu", "concat" if gated else "none", [], "nk", "nk", False)

    def run() -> None:
        with on(stream):
            y = torch.ops.hexa.moe_ffn(x, index, weights, w1, None, None, None, w2, None, *static)
            torch.autograd.grad(y, (x, weights, w1, w2), torch.ones_like(y))

    return run


def unequal(
    shape: ExpertShape,
    name: str,
    tokens: int,
    length: int,
    device: Any,
    dtype: torch.dtype,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Records of one shape for every setting of this number of ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for sms in SETTINGS.get(world, ((132,) * world,)):
        stream = green_stream(sms[rank], device)
        fine = works_on(stream, shape, device, dtype)
        if not fine:
            launch_by_kernel()
            fine = works_on(stream, shape, device, dtype)
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, fine, group=make_groups().host)
        yield {"question": "green context", "sms": sms, "our_kernels_run": everywhere}
        with on(stream):
            gated = shape.matrices == 3
            seconds = profile_devices(shape, gated=gated, dtype=dtype, device=device, groups=make_groups(), repeats=3)
        alone = _each(work(shape, tokens, shape.intermediate_size, device, dtype, stream), device, repeats)
        ideal = 1 / sum(1 / t for t in alone)
        head = {"question": "unequal devices", "shape": name, "tokens": tokens, "sms": sms}
        yield head | {"capacities": seconds, "alone_ms": alone, "ideal_ms": round(ideal, 3)}
        for kind in ("data", "model"):
            times = {}
            for split, t in (("uniform", (1.0,) * world), ("weighted", seconds), ("weighted by time alone", alone)):
                if kind == "data":
                    sizes = tuple(length * b for b in allocate(t, tokens // length))
                    run = work(shape, sizes[rank], shape.intermediate_size, device, dtype, stream)
                else:
                    sizes = allocate(t, shape.intermediate_size, tile=_tile(shape))
                    run = work(shape, tokens, sizes[rank], device, dtype, stream)
                each = _each(run, device, repeats)
                times[split] = max(each)
                yield head | {
                    "kind": kind,
                    "split": split,
                    "sizes": sizes,
                    "each_ms": each,
                    "experts_ms": max(each),
                    "over_ideal": round(max(each) / ideal, 4),
                    "gain_over_uniform": round(1 - max(each) / times["uniform"], 4),
                }
            del run
        _known[name] = (head, seconds, stream)


def _tile(shape: ExpertShape) -> int:
    return 128 if shape.intermediate_size > 4096 else 64


_known: dict[str, tuple[dict[str, Any], tuple[float, ...], Any]] = {}


def unequal_steps(
    shape: ExpertShape, name: str, tokens: int, length: int, device: Any, dtype: torch.dtype, repeats: int
) -> Iterator[dict[str, Any]]:
    """Whole steps of two partitioned layers, after `unequal`; only the experts are slowed down, attention is not."""
    world = dist.get_world_size()
    head, seconds, stream = _known[name]
    for kind in ("data", "model"):
        times: dict[str, float] = {}
        for split, t in (("uniform", (1.0,) * world), ("weighted", seconds)):
            model = Stack(2, shape, length, device, dtype)
            config = PartitionConfig(batch=tokens // length, tokens=tokens, static_tokens=True, tile=_tile(shape))
            # uniform shards still feed equal batches; weighted ones feed B_i
            plan = plan_layers({f"layers.{i}.moe": shape for i in range(2)}, t, kind, config)
            if kind == "model":
                even = PartitionConfig(batch=tokens // length, tokens=tokens, static_tokens=True)
                equal = plan_layers({}, (1.0,) * world, "model", even)
                plan = replace(plan, batch=equal.batch, tokens=equal.tokens)
            session = partition(model, plan, stream).session
            assert plan.tokens is not None
            x = torch.randn(plan.tokens[session.rank], shape.hidden_size, device=device, dtype=dtype)

            def step(model: Stack = model, x: Tensor = x) -> None:
                model.zero_grad(set_to_none=True)
                model(x).float().sum().mul(1e-3).backward()

            times[split] = max(_each(step, device, repeats))
            yield head | {
                "kind": f"{kind} step",
                "split": split,
                "batch": plan.batch,
                "h": plan.layers[0].shards,
                "step_ms": times[split],
                "gain_over_uniform": round(1 - times[split] / times["uniform"], 4),
            }
            session.close()
            del model, step, x, session
            gc.collect()


def _each(run: Callable[[], None], device: Any, repeats: int) -> list[float]:
    """Median milliseconds on every rank, all at once."""
    samples = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    mine = torch.tensor([statistics.median(samples[1:])], dtype=torch.float64, device=device)
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(out, mine)
    return [round(float(t), 3) for t in out]
