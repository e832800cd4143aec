"""Times work on devices: capacities t_i and bandwidth, on the real operator and the real links; and what ``auto`` weighs, a layer's
experts in each mode and what runs between MoE blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hexa_fx.allocation import KERNEL_COLUMNS, Affine, DeviceCosts, Measured, even
from hexa_fx.cuda.modes import kernels_awaited
from hexa_fx.distributed.collectives import all_gather_v, all_reduce, fill_slot, finish, reduce_scatter_v, wait
from hexa_fx.distributed.geometry import Geometry, Weights
from hexa_fx.distributed.groups import Groups, gather_even, make_groups
from hexa_fx.errors import InputError
from hexa_fx.plan import ExpertShape, Reduce


def timed(run: Callable[[], object], device: torch.device, count: int) -> float:
    """Wall-clock seconds of ``count`` consecutive runs, including the device's work."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return time.perf_counter() - start


def launching(run: Callable[[], object], device: torch.device) -> float:
    """Seconds after which the host has started a run's work and may go on; 0 where the host itself does the work."""
    if device.type == "cpu":
        return 0.0
    synchronize(device)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    synchronize(device)
    return seconds


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gathered(value: float, groups: Groups) -> tuple[float, ...]:
    """Every rank's value, exchanged over the host group."""
    out = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(groups.world)]
    dist.all_gather(out, torch.tensor([value], dtype=torch.float64, device="cpu"), group=groups.host)
    return tuple(float(t) for t in out)


def room(device: torch.device) -> float:
    """Bytes of memory that may be used on the device."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 4.0 * 2**30


@kernels_awaited()
def profile_devices(
    shape: ExpertShape,
    *,
    gated: bool = True,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    groups: Groups | None = None,
    repeats: int = 5,
    min_seconds: float | None = None,
) -> tuple[float, ...]:
    """Measures t_i: median seconds that a layer's experts take, forward and backward, on every rank's device.

    The paper times large matrix products. This times the operator that will run, synchronised, after a warm-up, on all ranks
    at once, as they will run at once. A collective call. `hexa_fx.optimize_` by default measures more (`profile_costs`).

    Args:
        shape: sizes of the layer, e.g. ``hexa_fx.plan.ExpertShape(num_experts=8, hidden_size=4096, intermediate_size=14336,
            matrices=3, top_k=2)``, with three matrices because its experts are gated. At most 64 MiB of weights are allocated
            (on CUDA 4 GiB, or a sixteenth of the free memory if that is less); larger layers are measured with at most 8
            experts (or top_k), and these with fewer channels if need be.
        gated: whether the experts have a gate projection.
        tokens: rows of the measured batch. Default: 1024 / top_k; on CUDA 16384, which fill a large device.
        dtype: element type of tokens and weights.
        device: where this rank measures. Default: the CPU.
        groups: process groups of the ranks that measure. Default: all ranks.
        repeats: number of timed runs, of which the median counts.
        min_seconds: how long one timed run lasts at least, after a warm-up of the same length. Default: 0.05; on CUDA 0.3,
            since a large device at full load lowers its clock within a tenth of a second, where a small one may not.

    Returns:
        Seconds by rank, the same on all ranks: what `hexa_fx.optimize_` takes as ``capacities``.

    Raises:
        InputError: ``shape`` is not an `ExpertShape`.
        PlanError: torch.distributed was not initialised.
        RankError: a rank did not arrive.
    """
    if not isinstance(shape, ExpertShape):
        raise InputError(f"shape is a {type(shape).__name__}; expected a hexa_fx.plan.ExpertShape")
    bench = _Proxy.of(shape, gated, tokens, dtype, device, groups)
    least = bench.least(min_seconds)
    run = bench.work(1.0, 1.0)
    _warm(run, bench.device, least)
    mine = statistics.median(_seconds(run, bench.device, least) for _ in range(repeats))
    return gathered(mine, bench.groups)


@kernels_awaited()
def profile_costs(
    shape: ExpertShape,
    *,
    gated: bool = True,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    groups: Groups | None = None,
    repeats: int = 3,
    min_seconds: float | None = None,
) -> DeviceCosts:
    """Measures t_i, and how the time of every device grows with tokens and with channels.

    A device spends time on a share that does not depend on its size: it reads all weights for however few tokens, moves all
    tokens for however few channels, launches kernels. So each axis is measured at two sizes, around the shares that devices
    get: 3/2 and 3/8 of an even share of the tokens, half and an eighth of the channels. A warm-up of ``min_seconds``, then
    the sizes in turn without a pause, each for a third of that. A collective call.

    Args:
        tokens: of the global batch. Default 16384 a rank on CUDA, 1024 / top_k on a CPU; at most 131072, on a CPU
            2048 / top_k, and what fits a quarter of the free memory.
        shape, gated, dtype, device, groups, repeats, min_seconds: as for `profile_devices`. t_i is the time of 3/2 of an
            even share of the tokens.
    """
    bench = _Proxy.of(shape, gated, tokens, dtype, device, groups).of_batch(tokens)
    least, share = bench.least(min_seconds), min(1.0, 1.5 / bench.groups.world)
    points = {"tokens": (share, 1.0), "few tokens": (share / 4, 1.0), "half": (1.0, 0.5), "eighth": (1.0, 0.125)}
    runs = {name: bench.work(*point) for name, point in points.items()}
    for run in runs.values():
        run()
    _warm(runs["tokens"], bench.device, least)
    samples: dict[str, list[float]] = {name: [] for name in points}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(_seconds(run, bench.device, least / 3))
    times = {name: gathered(statistics.median(found), bench.groups) for name, found in samples.items()}
    low, high = bench.tokens_of(share / 4), bench.tokens_of(share)
    by_tokens = Affine.through((low, times["few tokens"]), (high, times["tokens"]), scale=bench.fixed_scale)
    low, high = bench.channels_of(0.125), bench.channels_of(0.5)
    by_channels = Affine.through((low, times["eighth"]), (high, times["half"]))
    return DeviceCosts(times["tokens"], by_tokens, by_channels, measured=True)


@dataclass(frozen=True)
class _Proxy:
    """The layer as it is measured. Its sizes are equal on all ranks, whatever memory each has."""

    shape: ExpertShape
    gated: bool
    tokens: int
    experts: int
    channels: int
    dtype: torch.dtype
    device: torch.device
    groups: Groups

    @classmethod
    def of(
        cls,
        shape: ExpertShape,
        gated: bool,
        tokens: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
        groups: Groups | None,
    ) -> _Proxy:
        groups = groups or make_groups()
        device = torch.device(device if device is not None else "cpu")
        on_cuda = device.type == "cuda"
        budget = min(4.0 * 2**30, min(gathered(room(device), groups)) / 16) if on_cuda else 64.0 * 2**20
        channel = (3 if gated else 2) * shape.hidden_size * dtype.itemsize  # bytes of one expert's
        experts, channels = _fitting(shape, int(budget // channel))
        count = tokens or (16384 if on_cuda else max(1, 1024 // shape.top_k))
        return cls(shape, gated, count, experts, channels, dtype, device, groups)

    def of_batch(self, tokens: int | None) -> _Proxy:
        """The same for the tokens of a global batch, as far as time and memory allow."""
        if self.device.type == "cpu":
            return replace(self, tokens=min(self.tokens, max(1, 2048 // self.shape.top_k)))
        count = min(tokens or 16384 * self.groups.world, 131072)
        widest = max(self.channels, self.shape.hidden_size)
        token = 4 * self.shape.top_k * widest * self.dtype.itemsize
        return replace(self, tokens=max(1, min(count, int(min(gathered(room(self.device), self.groups)) / 4 // token))))

    @property
    def fixed_scale(self) -> float:
        """What the layer reads for however few tokens over what the proxy reads; the time a token grows with channels only."""
        return self.shape.num_experts / self.experts

    def least(self, min_seconds: float | None) -> float:
        if min_seconds is not None:
            return min_seconds
        return 0.3 if self.device.type == "cuda" else 0.05

    def tokens_of(self, share: float) -> int:
        return max(1, int(self.tokens * share))

    def channels_of(self, share: float) -> int:
        """This share of the channels, rounded to the kernels' step: odd sizes would run other, slower kernels."""
        wanted, step = int(self.channels * share), self.shape.channels(KERNEL_COLUMNS)
        return max(1, wanted // step * step or wanted // 8 * 8 or wanted)

    def work(self, token_share: float, channel_share: float) -> Callable[[], object]:
        """A function that runs the experts forward and backward on a share of the tokens and of the channels."""
        channels = self.channels if channel_share == 1.0 else self.channels_of(channel_share)
        shape = replace(self.shape, num_experts=self.experts, top_k=min(self.shape.top_k, self.experts))
        geometry = Geometry(shape, "concat" if self.gated else "none", "nk", "nk", bias=False)
        return _step_as_stored(geometry, self.tokens_of(token_share), channels, self.dtype, self.device)[0]


def _fitting(shape: ExpertShape, room: int) -> tuple[int, int]:
    """How many experts and channels fit ``room`` channels of one expert in all."""
    if shape.num_experts * shape.intermediate_size <= room:
        return shape.num_experts, shape.intermediate_size
    step = shape.channels(KERNEL_COLUMNS)
    experts = min(shape.num_experts, max(shape.top_k, min(8, room // step)))
    channels = room // experts // step * step
    return experts, min(shape.intermediate_size, max(step, channels))


def _warm(run: Callable[[], object], device: torch.device, seconds: float) -> None:
    run()
    _seconds(run, device, seconds)


def _seconds(run: Callable[[], object], device: torch.device, least: float) -> float:
    """Seconds of one run, averaged over as many as last ``least`` seconds."""
    once = max(timed(run, device, 1), 1e-6)
    count = max(1, round(least / once))
    return timed(run, device, count) / count


def measure_bandwidth(groups: Groups, device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes a second that a rank receives in an all-gather of ``nbytes`` from each, and seconds of a small one; equal on all ranks.

    Links reach their rate only with many bytes, so these should be as many as will travel: at most 256 MiB, on a CPU 8, and what
    fits an eighth of the free memory.
    """
    most = (256 if device.type == "cuda" else 8) * 2**20
    nbytes = max(1, min(nbytes, most, int(min(gathered(room(device), groups)) / 8 / groups.world)))

    def gather(size: int) -> Callable[[], None]:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        out = torch.empty(size * groups.world, dtype=torch.uint8, device=device)
        return lambda: gather_even(out, own, group=groups.main)

    small, large = gather(16), gather(nbytes)
    for run in (small, large):
        run()
    latency, seconds = (statistics.median(timed(run, device, 1) for _ in range(3)) for run in (small, large))
    slowest = max(gathered(seconds, groups))
    return nbytes * (groups.world - 1) / slowest, max(gathered(latency, groups))


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

    def host(*runs: Callable[[], object]) -> float:
        times = (statistics.median(launching(run, device) for _ in range(repeats)) for run in runs)
        return max(gathered(sum(times), groups))

    move = _exchange(shape, tokens, reduce, dtype, device, groups)
    compute = _step_as_stored(small, rows, max(1, shape.intermediate_size // world), dtype, device)[0]
    exchange, by_model = seconds(move, 1.0), seconds(compute)
    forward, step, gather = _experts_data_centric(small, max(1, rows // world), dtype, device, groups)
    by_data, alone = seconds(step), seconds(gather)
    both = seconds(lambda: gather(step))
    covered = min(alone, by_data)
    contention = min(1.0, max(0.0, (both - max(by_data, alone)) / covered)) if covered else 0.0
    whole = _experts_fsdp(small, max(1, rows // world), dtype, device)
    by_fsdp = seconds(whole)
    return Measured(
        expert=seconds(forward),
        experts_model_centric=by_model,
        experts_data_centric=by_data,
        contention=contention,
        exchange=exchange,
        experts_fsdp=by_fsdp,
        host={"model_centric": host(move, compute), "data_centric": host(lambda: gather(step)), "fsdp": host(whole)},
    )


def _tokens(shape: ExpertShape, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, balanced expert ids, and routing weights."""
    x = _drawn(tokens, shape.hidden_size, dtype, device).requires_grad_()
    index = torch.arange(tokens * shape.top_k, device=device).view(tokens, shape.top_k) % shape.num_experts
    weights = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device, dtype=dtype).requires_grad_()
    return x, index, weights


def _drawn(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that leave the job's own random ones alone."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)


def _local_weights(geometry: Geometry, channels: int, dtype: torch.dtype, device: torch.device) -> Weights:
    rows = _drawn(channels, geometry.row, dtype, device) * 0.05
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


def _experts_fsdp(geometry: Geometry, tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    step, weights = _step_as_stored(geometry, tokens, geometry.shape.intermediate_size, dtype, device)
    gathered = [torch.empty_like(weight) for weight in weights]

    def run() -> None:
        with torch.no_grad():
            for _ in range(2):  # out of the gather of forward and of backward
                torch._foreach_copy_(gathered, weights)
        torch._foreach_copy_(gathered, step())

    return run


def _operator(geometry: Geometry) -> Callable[..., Tensor]:
    """The experts' operator on x, ids, routing weights and the weights of the roles."""
    activation = "silu" if geometry.gated else "gelu"
    static: tuple[Any, ...] = (None, activation, geometry.glu, [], geometry.layout1, geometry.layout2, False)
    return lambda *tensors: torch.ops.hexa.moe_ffn(*tensors, *static)  # type: ignore[no-any-return]


def _step_as_stored(
    geometry: Geometry, tokens: int, channels: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """Forward and backward with weights in the layout of the model; returns their gradients. And the weights."""
    x, index, weights = _tokens(geometry.shape, tokens, dtype, device)
    local, experts = _local_weights(geometry, channels, dtype, device), _operator(geometry)

    def step() -> list[Tensor]:
        return _differentiate(experts(x, index, weights, *local), (x, weights, *local))[2:]

    return step, [weight.detach() for weight in local if weight is not None]


def _experts_data_centric(
    geometry: Geometry, tokens: int, dtype: torch.dtype, device: torch.device, groups: Groups
) -> tuple[Callable[[], object], Callable[[], None], Callable[..., None]]:
    """Functions to be timed: forward; forward and backward with the copies; a gather of the weights beside other work."""
    x, index, weights = _tokens(geometry.shape, tokens, dtype, device)
    sizes = even(geometry.shape.intermediate_size, groups.world)
    mine = sizes[groups.rank]
    local = _local_weights(geometry, mine, dtype, device)
    rows = _drawn(geometry.shape.intermediate_size, geometry.row, dtype, device) * 0.05
    views = [None if w is None else w.detach().requires_grad_() for w in geometry.views(rows)]
    experts = _operator(replace(geometry, glu="split" if geometry.gated else "none", layout1="nk", layout2="kn"))

    def forward() -> Tensor:
        return experts(x, index, weights, *views)

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
