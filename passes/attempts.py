"""The ways in which a block is probed, one after the other, until what was found equals the block."""

from __future__ import annotations

from dataclasses import dataclass

from hexa_fx.passes.rewrite.region import Live


@dataclass(frozen=True)
class Attempt:
    """One way to probe a block. The first one nearly always works; the others are tried if its result differs.

    Args:
        scale: factor on the float inputs. A probe can be degenerate, e.g. give routing weights of exactly 1.
        overflow: use many tokens that are nearly alike, so that an expert's capacity is exceeded.
        live: see `hexa_fx.passes.rewrite.region.RegionEmitter`; matters where experts give NaN.
        from_end: see there; matters where the block is given ids.
        prefer_earliest: see `hexa_fx.passes.detect.detect`.
    """

    scale: float = 1.0
    overflow: bool = False
    live: Live | None = None
    from_end: bool = False
    prefer_earliest: bool = False


ATTEMPTS = (
    Attempt(),
    Attempt(from_end=True),
    # first what leaves out less: a NaN weight is not 0, and code that keeps it gives NaN for its token
    Attempt(live="ne"),
    Attempt(live="gt"),
    Attempt(overflow=True),
    Attempt(prefer_earliest=True),
    Attempt(scale=0.1),
    Attempt(scale=10.0),
)
