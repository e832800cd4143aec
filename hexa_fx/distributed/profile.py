"""Measures capacities t_i and bandwidth, on the real operator and the real links."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hexa_fx.allocation import KERNEL_COLUMNS, Affine, DeviceCosts
from hexa_fx.cuda.modes import kernels_awaited
from hexa_fx.distributed.groups import Groups, gather_even, make_groups
from hexa_fx.distributed.timing import gathered, room, timed
from hexa_fx.errors import InputError
from hexa_fx.plan import ExpertShape


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

    def work(self, token_share: float, channel_share: float) -> Callable[[], None]:
        """A function that runs the experts forward and backward on a share of the tokens and of the channels."""
        import hexa_fx.ops  # noqa: F401  (defines the operator)

        tokens = self.tokens_of(token_share)
        channels = self.channels if channel_share == 1.0 else self.channels_of(channel_share)
        top_k, hidden = min(self.shape.top_k, self.experts), self.shape.hidden_size
        generator = torch.Generator(self.device).manual_seed(0)

        def rand(*size: int) -> Tensor:
            values = torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)
            return values.mul_(0.1).requires_grad_()

        x, w1 = rand(tokens, hidden), rand(self.experts, (2 if self.gated else 1) * channels, hidden)
        w2 = rand(self.experts, hidden, channels)
        index = torch.arange(tokens * top_k, device=self.device).view(tokens, top_k) % self.experts
        weights = torch.full((tokens, top_k), 1.0 / top_k, device=self.device, dtype=self.dtype).requires_grad_()
        glu, activation = ("concat", "silu") if self.gated else ("none", "gelu")
        static: tuple[Any, ...] = (activation, glu, [], "nk", "nk", False)

        def run() -> None:
            y = torch.ops.hexa.moe_ffn(x, index, weights, w1, None, None, None, w2, None, *static)
            torch.autograd.grad(y, (x, weights, w1, w2), torch.ones_like(y))

        return run


def _fitting(shape: ExpertShape, room: int) -> tuple[int, int]:
    """How many experts and channels fit ``room`` channels of one expert in all."""
    if shape.num_experts * shape.intermediate_size <= room:
        return shape.num_experts, shape.intermediate_size
    step = shape.channels(KERNEL_COLUMNS)
    experts = min(shape.num_experts, max(shape.top_k, min(8, room // step)))
    channels = room // experts // step * step
    return experts, min(shape.intermediate_size, max(step, channels))


def _warm(run: Callable[[], None], device: torch.device, seconds: float) -> None:
    run()
    _seconds(run, device, seconds)


def _seconds(run: Callable[[], None], device: torch.device, least: float) -> float:
    """Seconds of one run, averaged over as many as last ``least`` seconds."""
    once = max(timed(run, device, 1), 1e-6)
    count = max(1, round(least / once))
    return timed(run, device, count) / count


def measure_bandwidth(groups: Groups, device: torch.device, nbytes: int = 8 * 2**20) -> tuple[float, float]:
    """Bytes a second that a rank receives in a large all-gather, and seconds of a small one; equal on all ranks."""

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
