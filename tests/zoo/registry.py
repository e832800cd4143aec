"""Every model of the zoo, in one tuple."""

from tests.zoo import (
    bodies,
    by_sorting,
    capacity,
    dense,
    library_styles,
    loops,
    met,
    one_token,
    refusals,
    routers,
    truncated,
    tutorials,
    unjustified,
)
from tests.zoo.variant import Variant

VARIANTS: tuple[Variant, ...] = (
    *loops.VARIANTS,
    *by_sorting.VARIANTS,
    *dense.VARIANTS,
    *capacity.VARIANTS,
    *routers.VARIANTS,
    *bodies.VARIANTS,
    *library_styles.VARIANTS,
    *tutorials.VARIANTS,
    *met.VARIANTS,
    *one_token.VARIANTS,
    *truncated.VARIANTS,
    *unjustified.VARIANTS,
    *refusals.VARIANTS,
)


def by_name(name: str) -> Variant:
    """The variant of that name."""
    return next(v for v in VARIANTS if v.name == name)
