"""Which kernel a product takes: what is static in it, and the tile that follows from that, a measured one or the family's rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hexa_fx.codegen.family import get_family, validate
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.spec import KernelSpec, SpecError
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.kernel import NotBuilt, is_built
from hexa_fx.cuda.tune import tuned_tile

FIXED_BUCKET = 9
"""The bucket whose tile every number of rows takes in a fixed order: of many rows, where the tile matters most. A tile sums over K
in one order at all of its rows."""

_BUCKETS = 20
"""More than there are buckets of rows per expert with rules of their own."""

AnyTile = Any
"""A family's tiles have a class of their own."""


class ProductKey(NamedTuple):
    """Everything that decides the kernel of a product but its tile.

    Args:
        tiles: of the kernel's family.
        kernel: all that is static in it. The tile fills in the rest.
        card: that it is for.
        rows, experts: n and E. Only gather_gemm_sm90 knows more of n than its bucket.
        inner, columns: contraction and columns of the weight; of a weight's gradient its rows and columns; for esfk the columns
            of X and of dY.
    """

    tiles: Tiles
    kernel: KernelSpec
    card: Card
    rows: int
    experts: int
    inner: int
    columns: int

    @property
    def bucket(self) -> int:
        """`row_bucket` of the launch."""
        return row_bucket(self.rows, self.experts)

    def at(self, bucket: int) -> ProductKey:
        """The same with another number of rows an expert."""
        return self._replace(rows=(self.experts or 1) << bucket)

    def problem(self) -> Problem:
        """What tuning knows of it."""
        gather = self.kernel.gather or bool(self.kernel.option("gather_b"))
        found = Problem(
            self.kernel.family, self.kernel.op, self.kernel.dtype.name, gather, self.bucket, self.inner, self.columns
        )
        return self.tiles.measured_as(self, found)

    def spec(self, tile: AnyTile) -> KernelSpec:
        """The kernel with this tile."""
        return self.tiles.complete(self, tile)


class Tiles(ABC):
    """The tiles of a family's products. An instance holds what nothing but its rule asks of a product."""

    kind: Callable[..., AnyTile]
    """Makes a tile of its fields. Raises TypeError for those of another version."""

    @abstractmethod
    def rule(self, key: ProductKey) -> AnyTile:
        """The tile that nobody measured."""

    @abstractmethod
    def candidates(self, key: ProductKey) -> Sequence[AnyTile]:
        """Tiles worth measuring."""

    @abstractmethod
    def complete(self, key: ProductKey, tile: AnyTile) -> KernelSpec:
        """The product's kernel with a tile."""

    def measured_as(self, key: ProductKey, problem: Problem) -> Problem:
        """What tuning tells apart, where that is more than fields of the kernel and its bucket."""
        return problem


@cached_choice
def chosen_tile(key: ProductKey) -> AnyTile:
    """The measured tile where a table has one that this kernel can take, else the rule's."""
    found = tuned_tile(key.problem(), key.card.name)
    if found is not None:
        with suppress(SpecError, TypeError):  # measured by another version, or with fewer experts
            tile = key.tiles.kind(**found)
            spec = key.spec(tile)
            validate(get_family(spec.family), spec)
            return tile
    return key.tiles.rule(key)


@cached_choice
def fixed_tile(key: ProductKey) -> AnyTile:
    """The tile that every number of rows takes in a fixed order (`hexa_fx.ops.fixed_order`)."""
    return chosen_tile(key.at(FIXED_BUCKET))


def built_tile(key: ProductKey) -> AnyTile:
    """The chosen tile, or while its kernel is not built that of the nearest bucket whose kernel is.

    Raises:
        NotBuilt: there is none.
    """
    tile = chosen_tile(key)
    if is_built(key.spec(tile)):
        return tile
    here = key.problem().rows
    for bucket in sorted(range(_BUCKETS), key=lambda bucket: abs(bucket - here)):
        tile = chosen_tile(key.at(bucket))
        if is_built(key.spec(tile)):
            return tile
    raise NotBuilt(f"its kernel ({key.problem().family}) is being built")
