"""Runs a product with its measured tile, else its rule's; while that kernel is not built, with the nearest bucket's that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family import validate
from hexa_fx.codegen.spec import KernelSpec, SpecError
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.launch import NotBuilt, is_built, say_provisional
from hexa_fx.cuda.tune import autotuning, tune, tuned_tile
from hexa_fx.ops.fixed_order import is_fixed

_BUCKETS = 20
"""More than there are buckets of rows per expert with rules of their own."""

FIXED_BUCKET = 6
"""The bucket whose tile every number of rows takes in a fixed order. A tile sums over K in one order at all of its rows."""


class ProductKey(Protocol):
    """All that decides the kernel of a product but its tile. A family's tiles have a class of their own; `Any` is one of them."""

    @property
    def card(self) -> Card:
        """What the kernel is for."""

    @property
    def accumulate(self) -> bool:
        """Whether the result is added to."""

    def problem(self) -> Problem:
        """What tuning knows of it."""

    def tile(self, fields: Any) -> Any:
        """The tile with these fields. Raises TypeError for those of another version."""

    def rule(self) -> Any:
        """The tile that nobody measured."""

    def candidates(self) -> Sequence[Any]:
        """Tiles worth measuring."""

    def at(self, bucket: int) -> ProductKey:
        """The same with as many rows an expert as `hexa_fx.codegen.heuristics.row_bucket` calls by this number."""

    def spec(self, tile: Any) -> KernelSpec:
        """The kernel with this tile."""


@cached_choice
def chosen_tile(key: ProductKey) -> Any:
    """The measured tile where a table has one that this kernel can take, else the rule's."""
    found = tuned_tile(key.problem(), key.card.name)
    if found is not None:
        with suppress(SpecError, TypeError):  # measured by another version, or with fewer experts
            tile = key.tile(found)
            spec = key.spec(tile)
            validate(get_family(spec.family), spec)
            return tile
    return key.rule()


def run_with_tile(key: ProductKey, device: int, run: Callable[[Any], None], tile: Any = None) -> None:
    """Runs with the given tile, else the chosen one, or while its kernel is not built the nearest bucket's that is.

    In a fixed order (`hexa_fx.ops.fixed_order`) it is always the tile that is chosen for one bucket.

    Measures first if HEXA_FX_AUTOTUNE asks for it. A kernel that adds is not measured, since every timed run would add. It takes
    the tile of the kernel that stores.

    Args:
        key: of the product.
        device: current device.
        run: launches with a tile, or with `chosen_tile` if it gets None.
        tile: a tile to take.

    Raises:
        NotBuilt: no kernel is built.
    """
    if tile is None and is_fixed():
        tile = chosen_tile(key.at(FIXED_BUCKET))
    if tile is not None:
        run(tile)
        return
    if autotuning() and not key.accumulate:
        tiles = [asdict(each) for each in key.candidates()]
        tune(key.problem(), device, tiles, lambda t: key.spec(key.tile(t)), lambda t: run(key.tile(t)))
    try:
        run(None)
    except NotBuilt as reason:
        near = _built_tile(key)
        if near is None:
            raise
        say_provisional(key.problem().op, "another tile", reason)
        run(near)


def _built_tile(key: ProductKey) -> Any:
    """The tile of the nearest bucket whose kernel is built, or None."""
    here = key.problem().rows
    for bucket in sorted(range(_BUCKETS), key=lambda bucket: abs(bucket - here)):
        tile = chosen_tile(key.at(bucket))
        if is_built(key.spec(tile)):
            return tile
    return None
