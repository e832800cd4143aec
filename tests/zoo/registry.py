"""Every model of the zoo, in one tuple."""

from __future__ import annotations

from tests.zoo import loops
from tests.zoo.variant import Variant

VARIANTS: tuple[Variant, ...] = loops.VARIANTS


def by_name(name: str) -> Variant:
    """The variant of that name."""
    return next(v for v in VARIANTS if v.name == name)
