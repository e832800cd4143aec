"""Measures the times that ``auto`` weighs: of a layer's experts in each mode, and of what runs between MoE blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hexa_fx.allocation import Measured, even
from hexa_fx.cuda.modes import kernels_awaited
from hexa_fx.distributed.collectives import (
    all_gather_v,
    all_reduce,
    fill_slot,
    finish,
    reduce_scatter_v,
    wait,
)
from hexa_fx.distributed.geometry import Geometry, Weights
from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.timing import gathered, room, synchronize, timed
from hexa_fx.plan import ExpertShape, Reduce


@kernels_awaited()
def measure_modes(
    geometry: Geometry,
    tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    groups: Groups,
    reduce: Reduce = "reduce_scatter",
    repeats: int = 3,
) -> Measured:
    """Times the experts as each mode runs them on equal ranks, on the slowest of them. A collective call.

    Model-centric: all ``tokens`` and 1/N of the channels. Data-centric: 1/N of the tokens and all channels, with weights as
    views of packed rows, including the copies into and out of these rows. FSDP2: with weights as they are stored, and copies
    of them out of what was gathered, and of gradients into what is summed. A layer too large for an eighth of the free memory is
    measured with proportionally fewer experts and tokens, and the time is scaled. Collectives are run as they are, because for
    small layers the host's time to start them counts more than bytes.
    """
    shape, world = geometry.shape, groups.world
    held = 4 * shape.weight_numel * dtype.itemsize
    held += 4 * tokens * shape.top_k * max(shape.intermediate_size // world, shape.hidden_size) * dtype.itemsize
    part = min(1.0, min(gathered(room(device), groups)) / 8 / max(1, held))
    experts = max(1, min(shape.num_experts, int(shape.num_experts * part)))
    rows = max(world, int(tokens * experts / shape.num_experts))
    small = replace(geometry, shape=replace(shape, num_experts=experts, top_k=min(shape.top_k, experts)))
    scale = tokens * shape.top_k / (rows * small.shape.top_k)

    def seconds(run: Callable[..., object], scale: float = scale) -> float:
        for _ in range(2):  # on CUDA the third call of a kind is the first that is replayed
            run()
        return max(gathered(statistics.median(timed(run, device, 1) for _ in range(repeats)), groups)) * scale

    exchange = seconds(_exchange(shape, tokens, reduce, dtype, device, groups), 1.0)
    by_model = seconds(_experts_model_centric(small, rows, world, dtype, device))
    forward, step, gather = _experts_data_centric(small, max(1, rows // world), dtype, device, groups)
    by_data, alone = seconds(step), seconds(gather)
    both = seconds(lambda: gather(step))
    covered = min(alone, by_data)
    contention = min(1.0, max(0.0, (both - max(by_data, alone)) / covered)) if covered else 0.0
    by_fsdp = seconds(_experts_fsdp(small, max(1, rows // world), dtype, device))
    return Measured(
        expert=seconds(forward),
        experts_model_centric=by_model,
        experts_data_centric=by_data,
        contention=contention,
        exchange=exchange,
        experts_fsdp=by_fsdp,
    )


def _tokens(shape: ExpertShape, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, balanced expert ids, and routing weights."""
    x = torch.randn(tokens, shape.hidden_size, device=device, dtype=dtype).requires_grad_()
    index = torch.arange(tokens * shape.top_k, device=device).view(tokens, shape.top_k) % shape.num_experts
    weights = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device, dtype=dtype).requires_grad_()
    return x, index, weights


def _local_weights(geometry: Geometry, channels: int, dtype: torch.dtype, device: torch.device) -> Weights:
    rows = torch.randn(channels, geometry.row, device=device, dtype=dtype) * 0.05
    w1, b1, w3, b3, w2 = (None if w is None else w.requires_grad_() for w in geometry.unpack(rows, dtype))
    return w1, b1, w3, b3, w2


def _differentiate(y: Tensor, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(y, [t for t in leaves if t is not None], torch.ones_like(y)))


def _exchange(
    shape: ExpertShape, tokens: int, reduce: Reduce, dtype: torch.dtype, device: torch.device, groups: Groups
) -> Callable[[], None]:
    """The collectives of a model-centric layer: tokens, ids and weights there, results back; gradients likewise."""
    sizes, name = even(tokens, groups.world), groups.main_name
    x, index, weights = _tokens(shape, sizes[groups.rank], dtype, device)
    first = sum(sizes[: groups.rank])
    ones = torch.ones_like(x), weights.new_ones(tokens, shape.top_k)

    def run() -> None:
        rows, _, shares = [wait(all_gather_v(t, sizes, name)) for t in (x, index, weights)]
        if reduce == "reduce_scatter":
            y = wait(reduce_scatter_v(rows, sizes, name))
        else:
            y = wait(all_reduce(rows, name)).narrow(0, first, len(x))
        torch.autograd.grad((y, shares), (x, weights), ones)

    return run


def _experts_model_centric(
    geometry: Geometry, tokens: int, world: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    channels = max(1, geometry.shape.intermediate_size // world)
    return _step_as_stored(geometry, tokens, channels, dtype, device)[0]


def _experts_fsdp(geometry: Geometry, tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    step, weights = _step_as_stored(geometry, tokens, geometry.shape.intermediate_size, dtype, device)
    gathered = [torch.empty_like(weight) for weight in weights]

    def run() -> None:
        with torch.no_grad():
            for _ in range(2):  # out of the gather of forward and of backward
                torch._foreach_copy_(gathered, weights)
        torch._foreach_copy_(gathered, step())

    return run


def _step_as_stored(
    geometry: Geometry, tokens: int, channels: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """Forward and backward with weights in the layout of the model; returns their gradients. And the weights."""
    import hexa_fx.ops  # noqa: F401  (defines the operator)

    x, index, weights = _tokens(geometry.shape, tokens, dtype, device)
    local = _local_weights(geometry, channels, dtype, device)
    activation = "silu" if geometry.gated else "gelu"
    static: tuple[Any, ...] = (activation, geometry.glu, [], geometry.layout1, geometry.layout2, False)

    def step() -> list[Tensor]:
        y = torch.ops.hexa.moe_ffn(x, index, weights, *local, None, *static)
        return _differentiate(y, (x, weights, *local))[2:]

    return step, [weight.detach() for weight in local if weight is not None]


def _experts_data_centric(
    geometry: Geometry, tokens: int, dtype: torch.dtype, device: torch.device, groups: Groups
) -> tuple[Callable[[], object], Callable[[], None], Callable[..., None]]:
    """Functions to be timed: forward; forward and backward with the copies; a gather of the weights beside other work."""
    import hexa_fx.ops  # noqa: F401  (defines the operator)

    x, index, weights = _tokens(geometry.shape, tokens, dtype, device)
    sizes = even(geometry.shape.intermediate_size, groups.world)
    mine = sizes[groups.rank]
    local = _local_weights(geometry, mine, dtype, device)
    rows = torch.randn(geometry.shape.intermediate_size, geometry.row, device=device, dtype=dtype) * 0.05
    views = [None if w is None else w.detach().requires_grad_() for w in geometry.views(rows)]
    activation = "silu" if geometry.gated else "gelu"
    static: tuple[Any, ...] = (activation, "split" if geometry.gated else "none", [], "nk", "kn", False)

    def forward() -> Tensor:
        y: Tensor = torch.ops.hexa.moe_ffn(x, index, weights, *views, None, *static)
        return y

    def step() -> None:
        with torch.no_grad():
            for _ in range(2):  # for the gather of forward and of backward
                geometry.pack(local, mine, dtype)
        grads = iter(_differentiate(forward(), (x, weights, *views))[2:])
        sums = geometry.view_grads(tuple(None if v is None else next(grads) for v in views), dtype)  # type: ignore[arg-type]
        geometry.unpack(sums[:mine], dtype)

    buffer, own = torch.empty_like(rows), rows[:mine].clone()

    def gather(beside: Callable[[], None] | None = None) -> None:
        works = fill_slot(buffer, own, sizes, groups.gather_name)
        if beside is not None:
            beside()
        finish(works)

    return forward, step, gather


@dataclass(frozen=True)
class BlockTimes:
    """What a forward of the whole model shows about its MoE blocks: median seconds on the slowest rank.

    Args:
        between: from one MoE block to the next (attention, norms and whatever else is there).
        tokens: how many tokens reach a block.
    """

    between: float
    tokens: int


@kernels_awaited()
def measure_blocks(
    run: Callable[[], object], blocks: Sequence[nn.Module], device: torch.device, groups: Groups
) -> BlockTimes:
    """Runs the model twice and times the second run. A collective call with the same ``run`` on every rank."""
    seen: list[tuple[float, float, int]] = []
    entered: list[float] = []

    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    def before(*_: Any) -> None:
        entered.append(now())

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()), None)
        tokens = 0 if given is None or given.dim() == 0 else given.numel() // max(1, given.shape[-1])
        seen.append((entered.pop(), now(), tokens))

    handles = [block.register_forward_pre_hook(before) for block in blocks]
    handles += [block.register_forward_hook(after, with_kwargs=True) for block in blocks]
    try:
        with torch.no_grad():
            run()
            seen.clear()
            start = now()
            run()
    finally:
        for handle in handles:
            handle.remove()
    ends = [start, *(end for _, end, _ in seen)]
    between = statistics.median([begin - end for (begin, _, _), end in zip(seen, ends)] or [0.0])
    tokens = max((count for _, _, count in seen), default=0)
    return BlockTimes(max(gathered(between, groups)), tokens)
