"""Capacities t_i and bandwidth, measured on the real operator and the real links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexa_fx.plan import ExpertShape
from hexa_fx.runtime.distributed.geometry import Geometry
from hexa_fx.runtime.distributed.groups import Groups, make_groups


def profile_devices(
    shape: ExpertShape,
    *,
    gated: bool = True,
    tokens: int = 1024,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    groups: Groups | None = None,
    repeats: int = 5,
    min_seconds: float = 0.05,
) -> tuple[float, ...]:
    """t_i of every rank: median seconds of the layer's experts, forward and backward, on that rank's device.

    The paper times large matrix products; this times the operator that will run, synchronised, after a warm-up. All
    ranks measure at once, as they will run at once. A collective call.

    Args:
        shape: sizes of the layer. At most 8 experts and 64 MiB of weights are allocated.
        tokens: rows of the proxy batch.
        repeats: timed runs, of which the median counts.
        min_seconds: a timed run repeats the operator until it lasts this long.

    Returns:
        Seconds by rank, equal on all ranks.
    """
    groups = groups or make_groups()
    device = torch.device(device if device is not None else "cpu")
    run = _proxy(shape, gated, tokens, dtype, device)
    run()
    once = max(_timed(run, device, 1), 1e-6)
    count = max(1, round(min_seconds / once))
    mine = statistics.median(_timed(run, device, count) / count for _ in range(repeats))
    return _gathered(mine, groups)


def _proxy(
    shape: ExpertShape, gated: bool, tokens: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    import hexa_fx.ops  # noqa: F401  (defines the operator)

    generator = torch.Generator().manual_seed(0)
    hidden, experts, inner = shape.hidden_size, min(shape.num_experts, 8), shape.intermediate_size
    budget = 64 * 2**20 // (3 * dtype.itemsize)
    inner = max(16, min(inner, budget // max(1, experts * hidden)))

    def rand(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator) * 0.1).to(device=device, dtype=dtype).requires_grad_()

    x, w1, w2 = rand(tokens, hidden), rand(experts, (2 if gated else 1) * inner, hidden), rand(experts, hidden, inner)
    index = (torch.arange(tokens, device=device) % experts).unsqueeze(1)
    static: tuple[Any, ...] = ("silu", "concat" if gated else "none", [], "nk", "nk", False)

    def run() -> None:
        y = torch.ops.hexa.moe_ffn(x, index, None, w1, None, None, None, w2, None, *static)
        torch.autograd.grad(y, (x, w1, w2), torch.ones_like(y))

    return run


def measure_modes(
    shape: ExpertShape,
    tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    groups: Groups,
    repeats: int = 3,
    max_bytes: int = 2 * 2**30,
) -> tuple[float, float]:
    """Seconds of the experts, forward and backward, as each mode runs them on equal ranks: (model-centric, data-centric).

    Model-centric: all ``tokens``, 1/N of the channels. Data-centric: 1/N of the tokens, all channels, weights as views of
    packed rows, gradients packed. The slowest rank counts. Layers above ``max_bytes`` are measured with fewer experts and
    at most 16384 tokens, and the time is scaled. A collective call.
    """
    experts = max(
        1, min(shape.num_experts, max_bytes * shape.num_experts // max(1, shape.weight_numel * dtype.itemsize))
    )
    rows = max(groups.world, min(tokens, 16384 if experts < shape.num_experts else 65536))
    small = replace(shape, num_experts=experts)
    channels = max(1, shape.intermediate_size // groups.world)
    runs = (
        _experts(replace(small, intermediate_size=channels), rows, False, dtype, device),
        _experts(small, rows // groups.world, True, dtype, device),
    )
    out = []
    for run in runs:
        run()
        seconds = statistics.median(_timed(run, device, 1) for _ in range(repeats))
        out.append(max(_gathered(seconds, groups)) * tokens / rows)
    return out[0], out[1]


def _experts(
    shape: ExpertShape, tokens: int, packed: bool, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    import hexa_fx.ops  # noqa: F401  (defines the operator)

    gated = shape.matrices == 3
    geometry = Geometry(shape, "split" if gated else "none", "nk", "kn", bias=False)
    rows = torch.randn(shape.intermediate_size, geometry.row, device=device, dtype=dtype) * 0.05
    views = geometry.views(rows)
    w1, _, w3, _, w2 = (w if w is None else (w if packed else w.contiguous()).detach() for w in views)
    leaves = [w.requires_grad_() for w in (w1, w3, w2) if w is not None]
    x = torch.randn(tokens, shape.hidden_size, device=device, dtype=dtype).requires_grad_()
    index = torch.arange(tokens * shape.top_k, device=device).view(tokens, shape.top_k) % shape.num_experts
    weights = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device, dtype=dtype).requires_grad_()
    static: tuple[Any, ...] = ("silu", geometry.glu, [], "nk", "kn", False)

    def run() -> None:
        y = torch.ops.hexa.moe_ffn(x, index, weights, w1, None, w3, None, w2, None, *static)
        grads = torch.autograd.grad(y, (x, weights, *leaves), torch.ones_like(y))[2:]
        if packed:
            geometry.view_grads((grads[0], None, grads[1] if gated else None, None, grads[-1]), dtype)

    return run


def measure_bandwidth(
    groups: Groups, device: torch.device, nbytes: int = 8 * 2**20, repeats: int = 3
) -> tuple[float, float]:
    """Bytes a second that a rank receives in a large all-gather, and seconds of a small one; equal on all ranks."""

    def gather(size: int) -> Callable[[], None]:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        out = torch.empty(size * groups.world, dtype=torch.uint8, device=device)
        return lambda: dist.all_gather_into_tensor(out, own, group=groups.main)

    small, large = gather(16), gather(nbytes)
    for run in (small, large):
        run()
    latency = statistics.median(_timed(small, device, 1) for _ in range(repeats))
    seconds = statistics.median(_timed(large, device, 1) for _ in range(repeats))
    slowest = max(_gathered(seconds, groups))
    return nbytes * (groups.world - 1) / slowest, max(_gathered(latency, groups))


def _timed(run: Callable[[], None], device: torch.device, count: int) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gathered(value: float, groups: Groups) -> tuple[float, ...]:
    out = [torch.zeros(1, dtype=torch.float64) for _ in range(groups.world)]
    dist.all_gather(out, torch.tensor([value], dtype=torch.float64), group=groups.host)
    return tuple(float(t) for t in out)
