"""Eq. 1 and Eq. 2 of the paper: shares of a whole by device speed, as exact integers.

The paper rounds proportional shares. Rounding by largest remainder is not the best integer split; handing one tile
after the other to the device that would finish it first is (it minimises the slowest device's time), also under tiles,
caps and fixed costs a device, which `profile_costs` measures. `Measured` is what the choice of a layer's mode needs beside.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hexa_fx.errors import PlanError

KERNEL_COLUMNS = 256
"""Columns of the first projection that GPU kernels compute at a time: without a gate, 704 channels take as long as 768."""


def allocate(
    seconds: Sequence[float],
    total: int,
    *,
    tile: int = 1,
    step: int = 1,
    caps: Sequence[int] | None = None,
    fixed: Sequence[float] | None = None,
    least: int = 0,
) -> tuple[int, ...]:
    """Split ``total`` units over devices so that the slowest device finishes as early as possible.

    Args:
        seconds: t_i, time of the same task on every device (any unit, positive). Device i takes ``fixed_i + t_i *
            x_i``.
        total: units to hand out; B_global of Eq. 1 or the intermediate size H of Eq. 2.
        tile: every share is a multiple of it, except that one device takes the rest ``total % tile``.
        step: units that devices compute at a time: begun steps count as whole ones. Among splits that finish at the same time,
            shares follow the speed as they would without steps.
        caps: most units a device can hold (memory).
        fixed: time a device spends whatever its share, in the unit of ``seconds * units``.
        least: units that every device gets.

    Returns:
        One share a device, summing to ``total`` exactly.

    Raises:
        PlanError: the arguments make no split possible.
    """
    count = len(seconds)
    caps = [total] * count if caps is None else list(caps)
    fixed = [0.0] * count if fixed is None else list(fixed)
    _check(seconds, total - least * count, tile, step, caps, fixed, least)

    def finish(i: int, share: int) -> tuple[float, float, int]:
        """When a device is done with a share, then what breaks ties."""
        return fixed[i] + seconds[i] * step * -(-share // step), fixed[i] + seconds[i] * share, i

    shares, total = [least] * count, total - least * count
    queue = [finish(i, least + tile) for i in range(count) if caps[i] >= least + tile]
    heapq.heapify(queue)
    for _ in range(total // tile):
        if not queue:
            raise _no_room(total, tile, caps)
        *_, i = heapq.heappop(queue)
        shares[i] += tile
        if shares[i] + tile <= caps[i]:
            heapq.heappush(queue, finish(i, shares[i] + tile))
    rest = total % tile
    if rest:
        fits = [i for i in range(count) if shares[i] + rest <= caps[i]]
        if not fits:
            raise _no_room(total, tile, caps)
        *_, i = min(finish(i, shares[i] + rest) for i in fits)
        shares[i] += rest
    return tuple(shares)


@dataclass(frozen=True)
class Affine:
    """Seconds of device i for x units of work: ``fixed[i] + each[i] * x``."""

    fixed: tuple[float, ...]
    each: tuple[float, ...]

    @classmethod
    def through(cls, low: tuple[int, Sequence[float]], high: tuple[int, Sequence[float]], scale: float = 1.0) -> Affine:
        """The lines through two measured sizes, (units, seconds by device) each.

        At most half of the time at the larger size is taken as fixed: where more is, devices hardly differ, and noise would
        decide. ``scale`` multiplies the fixed times afterwards.
        """
        (x, times), (y, longer) = low, high
        each, fixed = [], []
        for t, u in zip(times, longer):
            slope = min(u / y, max((u - t) / (y - x), 0.5 * u / y)) if y > x else u / y
            each.append(slope)
            fixed.append(scale * max(0.0, u - slope * y))
        return cls(tuple(fixed), tuple(each))

    def split(
        self,
        total: int,
        units: float = 1.0,
        *,
        tile: int = 1,
        step: int = 1,
        caps: Sequence[int] | None = None,
        least: int = 0,
    ) -> tuple[int, ...]:
        """`allocate` with these times, where one of the ``total`` is so many units."""
        times = [t * units for t in self.each]
        return allocate(times, total, tile=tile, step=step, caps=caps, fixed=self.fixed, least=least)


@dataclass(frozen=True)
class DeviceCosts:
    """What devices take for a layer's experts, forward and backward.

    Args:
        seconds: t_i of the same task.
        by_tokens: of so many tokens with all channels (Eq. 1).
        by_channels: of all tokens with so many channels (Eq. 2).
        measured: whether they were, so that they are not exact enough to leave a device out.
    """

    seconds: tuple[float, ...]
    by_tokens: Affine
    by_channels: Affine
    measured: bool = False

    @classmethod
    def proportional(cls, seconds: Sequence[float]) -> DeviceCosts:
        """The paper's: time grows with the share alone."""
        times = tuple(float(t) for t in seconds)
        line = Affine((0.0,) * len(times), times)
        return cls(times, line, line)


def even(
    total: int, count: int, *, tile: int = 1, caps: Sequence[int] | None = None, least: int = 0
) -> tuple[int, ...]:
    """The split of equal devices."""
    return allocate([1.0] * count, total, tile=tile, caps=caps, least=least)


def _check(
    seconds: Sequence[float], total: int, tile: int, step: int, caps: list[int], fixed: list[float], least: int
) -> None:
    if not seconds:
        raise PlanError("no devices to split over")
    if any(not (0 < t < float("inf")) for t in seconds):
        raise PlanError(f"capacities are times of the same task and must be positive and finite, got {list(seconds)}")
    if total < 0 or tile < 1 or step < 1:
        raise PlanError(f"cannot split total={total} in tiles of {tile}, computed {step} at a time")
    if len(caps) != len(seconds) or len(fixed) != len(seconds):
        raise PlanError(f"{len(seconds)} capacities, but {len(caps)} caps and {len(fixed)} fixed times")
    if any(cap < least for cap in caps):
        raise PlanError(
            f"the memory caps {caps} leave a device less than the {least} units that every one gets: raise the caps, or plan with "
            "PartitionConfig(least_channels=0), which FSDP2 beside the partition does not take"
        )


def _no_room(total: int, tile: int, caps: list[int]) -> PlanError:
    return PlanError(
        f"the memory caps {caps} cannot hold {total} units in tiles of {tile}: "
        "raise the caps, lower the tile, or use more devices"
    )


@dataclass(frozen=True)
class Measured:
    """Times of one layer in seconds, measured for the choice of its mode; the same on all ranks.

    Args:
        bandwidth: bytes a second that one rank receives in a large collective.
        latency: seconds of one collective of a few bytes.
        attention: forward time of what runs between two MoE layers (attention and router) on a rank's own tokens, on the
            slowest rank.
        expert: forward time of the layer's experts on a rank's own tokens, on the slowest rank.
        experts_model_centric: forward and backward time of the experts with all tokens and a slice of the channels.
        experts_data_centric: the same with a rank's tokens and all channels, read from and packed into rows. Equal in
            arithmetic to the other, but not in time: model-centric moves N times the token rows through memory,
            data-centric copies weights and their gradients.
        contention: by how many seconds a second of concurrent communication slows down compute. Communication kernels take
            multiprocessors and memory bandwidth, so hidden communication is not free.
        exchange: forward and backward time of the collectives of a model-centric layer, the host's included; None if it was
            not measured. Then it follows from bytes and latency.
        experts_fsdp: as ``experts_data_centric``, with weights as the model stores them and FSDP2's copies; None where FSDP2 is no
            choice.
        host: what the host takes by mode to start the experts' work, forward and backward, with the exchange where tokens travel.
            Nothing on a CPU, which does the work itself.
    """

    bandwidth: float = 0.0
    latency: float = 0.0
    attention: float = 0.0
    expert: float = 0.0
    experts_model_centric: float = 0.0
    experts_data_centric: float = 0.0
    contention: float = 0.0
    exchange: float | None = None
    experts_fsdp: float | None = None
    host: Mapping[str, float] = field(default_factory=dict)

    def without_fsdp(self) -> Measured:
        """The same where FSDP2 is no choice."""
        return replace(self, experts_fsdp=None)

    def describe(self) -> str:
        """The numbers in one line."""
        milliseconds = {
            "attention": self.attention,
            "experts": self.expert,
            "experts' step model-centric": self.experts_model_centric,
            "data-centric": self.experts_data_centric,
        }
        if self.exchange is not None:
            milliseconds["exchange model-centric"] = self.exchange
        if self.experts_fsdp is not None:
            milliseconds["FSDP2"] = self.experts_fsdp
        times = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in milliseconds.items())
        return f"{self.bandwidth / 1e9:.3g} GB/s, {times}, contention {self.contention:.2f}"
