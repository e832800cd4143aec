"""The ways in which a block is read, one after the other, until what was found equals the block."""

from __future__ import annotations

from dataclasses import dataclass

from hexa_fx.passes.region import Live


@dataclass(frozen=True)
class Attempt:
    """One way to read a block. The first one nearly always works; the others are tried if its result differs.

    Args:
        live: see `hexa_fx.passes.region.RegionEmitter`; matters where experts give NaN.
        from_end: see there; matters where the block is given ids.
        prefer_earliest: see `hexa_fx.passes.detect.detect`.
    """

    live: Live | None = None
    from_end: bool = False
    prefer_earliest: bool = False


ATTEMPTS = (
    Attempt(),
    Attempt(from_end=True),
    Attempt(live="gt"),
    Attempt(live="ne"),
    Attempt(prefer_earliest=True),
)
