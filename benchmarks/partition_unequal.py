"""Unequal devices, emulated: each rank's experts run on a green context of some of its GPU's multiprocessors.

Reported for weighted and uniform shards, data-centric (B_i) and model-centric (h_i): the slowest rank's time in the experts,
forward and backward, against the ideal, 1 / sum of 1 / t_i, where t_i is the time of all the work on rank i without pauses;
and the whole step with communication. Memory and links are not slowed down. Shares by `profile_costs`, beside shares
proportional to its t_i and to the time of all the work.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.partition_layers import Stack, on, partition
from hexa_fx.allocation import KERNEL_COLUMNS, DeviceCosts
from hexa_fx.distributed.groups import make_groups
from hexa_fx.distributed.profile import gathered, profile_costs, synchronize, timed
from hexa_fx.passes.partition.plan_layers import PartitionConfig, batch_shares, plan_layers
from hexa_fx.plan import ExpertShape

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
    from hexa_fx.cuda import choosing as cuda_choosing
    from hexa_fx.cuda import fallback as cuda_fallback
    from hexa_fx.jit import kernel

    prepare = kernel.KernelHandle._prepare

    def prepared(self: Any, device: int) -> Any:
        prepare(self, device)
        self._functions[device] = self._kernel
        return self._kernel

    kernel.KernelHandle._prepare = prepared  # type: ignore[method-assign]
    kernel.get_kernel.cache_clear()
    cuda_choosing.forget_choices()
    cuda_fallback.fallbacks.clear()
    cuda_fallback._permanent.clear()


def works_on(stream: Any, shape: ExpertShape, device: Any, dtype: torch.dtype) -> bool:
    """Whether our kernels run on this stream, without falling back."""
    if stream is None:
        return True
    from hexa_fx.cuda import fallback as cuda_fallback

    known = set(cuda_fallback.fallbacks)
    work(shape, 1024, 512, device, dtype, stream)()
    torch.cuda.synchronize()
    return set(cuda_fallback.fallbacks) == known


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
    shape: ExpertShape, name: str, tokens: int, length: int, device: Any, dtype: torch.dtype, seconds: float
) -> Iterator[dict[str, Any]]:
    """Records of one shape for every setting of this number of ranks; each case is timed for so many seconds."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for sms in SETTINGS.get(world, ((132,) * world,)):
        stream = green_stream(sms[rank], device)
        fine = works_on(stream, shape, device, dtype)
        if not fine:
            launch_by_kernel()
            fine = works_on(stream, shape, device, dtype)
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, fine, group=make_groups().host)
        yield {"question": "green context", "shape": name, "sms": sms, "our_kernels_run": everywhere}
        with on(stream):
            gated = shape.matrices == 3
            costs = profile_costs(shape, gated=gated, tokens=tokens, dtype=dtype, device=device, groups=make_groups())
        whole = work(shape, tokens, shape.intermediate_size, device, dtype, stream)
        alone = [round(1e3 * t, 3) for t in gathered(_sustained(whole, device, seconds), make_groups())]
        del whole
        ideal = 1 / sum(1 / t for t in alone)
        head = {"question": "unequal devices", "shape": name, "tokens": tokens, "sms": sms}
        yield head | {"costs": asdict(costs), "alone_ms": alone, "ideal_ms": round(ideal, 3)}
        splits = {
            "uniform": DeviceCosts.proportional((1.0,) * world),
            "weighted": costs,
            "proportional to t_i": DeviceCosts.proportional(costs.seconds),
            "proportional to time alone": DeviceCosts.proportional(alone),
            "weighted, steps not counted": costs,
        }
        for kind in ("data", "model"):
            times = {}
            for split, known in splits.items():
                step = 1 if "not counted" in split else shape.channels(KERNEL_COLUMNS)
                if kind == "data" and step == 1:
                    continue
                if kind == "data":
                    sizes = tuple(length * b for b in batch_shares(known, tokens // length, tokens))
                    run = work(shape, sizes[rank], shape.intermediate_size, device, dtype, stream)
                else:
                    sizes = known.by_channels.split(shape.intermediate_size, tile=tile(shape), step=step)
                    run = work(shape, tokens, sizes[rank], device, dtype, stream)
                each = _each(run, device, seconds)
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
        _known[name] = (head, costs, stream)


def tile(shape: ExpertShape) -> int:
    return 128 if shape.intermediate_size > 4096 else 64


_known: dict[str, tuple[dict[str, Any], DeviceCosts, Any]] = {}


def unequal_steps(
    shape: ExpertShape, name: str, tokens: int, length: int, device: Any, dtype: torch.dtype, seconds: float
) -> Iterator[dict[str, Any]]:
    """Whole steps of two partitioned layers, after `unequal`; only the experts are slowed down, attention is not."""
    world = dist.get_world_size()
    if name not in _known:  # `unequal` failed
        return
    head, costs, stream = _known[name]
    uniform = DeviceCosts.proportional((1.0,) * world)
    for kind in ("data", "model"):
        times: dict[str, float] = {}
        for split, known in (("uniform", uniform), ("weighted", costs)):
            model = Stack(2, shape, length, device, dtype)
            config = PartitionConfig(
                batch=tokens // length,
                tokens=tokens,
                static_tokens=True,
                tile=tile(shape),
                kernel_columns=KERNEL_COLUMNS,
            )
            # uniform shards still feed equal batches; weighted ones feed B_i
            plan = plan_layers({f"layers.{i}.moe": shape for i in range(2)}, known, kind, config)
            if kind == "model":
                even = PartitionConfig(batch=tokens // length, tokens=tokens, static_tokens=True)
                equal = plan_layers({}, uniform, "model", even)
                plan = replace(plan, batch=equal.batch, tokens=equal.tokens)
            session = partition(model, plan, stream).session
            assert plan.tokens is not None
            x = torch.randn(plan.tokens[session.rank], shape.hidden_size, device=device, dtype=dtype)

            def step(model: Stack = model, x: Tensor = x) -> None:
                model.zero_grad(set_to_none=True)
                model(x).float().sum().mul(1e-3).backward()

            times[split] = max(_each(step, device, seconds))
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


def _each(run: Callable[[], None], device: torch.device, seconds: float) -> list[float]:
    """Median milliseconds of a run on every rank, over so many runs that they take ``seconds``.

    Runs follow each other as the layers of a model do: devices begin each together, hosts wait for nothing and run ahead.
    """
    longest = max(gathered(min(timed(run, device, 1) for _ in range(2)), make_groups()))
    count = min(50, max(3, round(seconds / max(longest, 1e-6))))
    measure = _by_events if device.type == "cuda" else _by_clock
    return [round(1e3 * t, 3) for t in gathered(statistics.median(measure(run, device, count)), make_groups())]


def _by_events(run: Callable[[], None], device: torch.device, count: int) -> list[float]:
    together, ahead = torch.zeros(1, device=device), 3  # so many runs until the host is ahead
    marks = []
    for _ in range(count + ahead):
        dist.all_reduce(together)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        marks.append((begin, end))
    synchronize(device)
    return [1e-3 * begin.elapsed_time(end) for begin, end in marks[ahead:]]


def _by_clock(run: Callable[[], None], device: torch.device, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        dist.barrier()
        samples.append(timed(run, device, 1))
    return samples


def _sustained(run: Callable[[], None], device: Any, seconds: float) -> float:
    """Seconds of a run in the middle of many, without a pause in which the device would cool and raise its clock."""
    once = max(timed(run, device, 1), 1e-6)
    count = max(2, round(seconds / once))
    timed(run, device, max(1, count // 2))
    return timed(run, device, count) / count
