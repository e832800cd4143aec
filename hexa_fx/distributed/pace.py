"""Notices a device that has become slower: it times the experts' own operator on every device, between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hexa_fx.allocation import allocate
from hexa_fx.distributed.geometry import Geometry
from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.profile import profile_devices
from hexa_fx.plan import Plan


@dataclass(frozen=True)
class Pace:
    """How fast the devices are now, the same on all ranks.

    Args:
        seconds: of the same task on each.
        gain: part of the experts' time in a step that shares by these times would save; 0 where the plan's are still the best.
        slower: how many times as long as when the plan was made each device takes, by the quickest of them.
    """

    seconds: tuple[float, ...]
    gain: float
    slower: tuple[float, ...]

    @classmethod
    def of(cls, plan: Plan, seconds: Sequence[float]) -> Pace:
        """What times measured now say about a plan."""
        taken = best = 0.0
        for layer in plan.layers:
            shares = layer.shards if layer.mode == "model_centric" else plan.batch
            total = sum(shares)
            if total:
                taken += _slowest(shares, seconds) / total
                best += _slowest(allocate(seconds, total), seconds) / total
        before = plan.capacities or (1.0,) * plan.world
        ratios = [now / then for now, then in zip(seconds, before)]
        slower = tuple(ratio / min(ratios) for ratio in ratios)
        return cls(tuple(seconds), max(0.0, 1 - best / taken) if taken else 0.0, slower)

    def __str__(self) -> str:
        worst = max(range(len(self.slower)), key=lambda rank: self.slower[rank])
        return (
            f"rank {worst} has become {self.slower[worst]:.2f} times as slow by the quickest; shares by these times would save "
            f"{100 * self.gain:.0f} % of the experts' time"
        )


def timed(geometry: Geometry, held: Tensor, groups: Groups, min_seconds: float | None) -> tuple[float, ...]:
    """Seconds of a layer's experts on every device, in the dtype and on the device of ``held``. A collective call."""
    return profile_devices(
        geometry.shape,
        gated=geometry.gated,
        dtype=held.dtype,
        device=held.device,
        groups=groups,
        repeats=3,
        min_seconds=min_seconds or (0.1 if held.is_cuda else 0.05),
    )


def _slowest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * t for share, t in zip(shares, seconds))
