"""Which kernel a product takes: what is static in it, and the tile that follows from that, a measured one or the family's rule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from hexa_fx.codegen.family import get_family, validate
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.spec import KernelSpec, Option, SpecError
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.kernel import Kernel, NotBuilt, is_built, kernel_of
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.cuda.tune import tuned_tile
from hexa_fx.ir import Glu, Layout

FIXED_BUCKET = 9
"""The bucket whose tile every number of rows takes in a fixed order: of many rows, where the tile matters most. A tile sums over K
in one order at all of its rows."""

_BUCKETS = 20
"""More than there are buckets of rows per expert with rules of their own."""

AnyTile = Any
"""A family's tiles have a class of their own."""


class ProductKey(Protocol):
    """Everything that decides the kernel of a product but its tile."""

    @property
    def card(self) -> Card: ...

    def problem(self) -> Problem:
        """What tuning knows of it."""

    def tile(self, fields: Any) -> AnyTile:
        """The tile with these fields. Raises TypeError for those of another version."""

    def rule(self) -> AnyTile:
        """The tile that nobody measured."""

    def candidates(self) -> Sequence[AnyTile]:
        """Tiles worth measuring."""

    def at(self, bucket: int) -> ProductKey:
        """The same with another number of rows an expert, as `hexa_fx.codegen.family_gemm_sm80.row_bucket` counts them."""

    def spec(self, tile: AnyTile) -> KernelSpec:
        """The kernel with this tile."""


class GemmKey(NamedTuple):
    """What is in a `ProductKey` of the families gemm_sm80, esfk_sm80 and gather_gemm_sm90, which have their own.

    Args:
        family: of these.
        op: of the family.
        math: ``tensor``, ``fast_f32`` or ``simt``.
        rows, experts: n and E. The families of sm_80 know of n only its bucket.
        inner, columns: contraction and columns of the weight; of a weight's gradient its rows and columns; for esfk the columns
            of X and of dY.
        layout: of the weight as it is multiplied: for esfk in dX = dY W^T.
        gather: the first row operand is gathered; the second by option ``gather_b``.
        fit: addresses and strides are multiples of 16 bytes.
        added_to: the type of what weight gradients are added to; None where they are stored.
        options: of the kernel, besides those that follow from tile and experts.
    """

    family: str
    op: str
    card: Card
    dtype: torch.dtype
    math: str
    rows: int
    experts: int
    inner: int
    columns: int
    layout: Layout = "nk"
    gather: bool = False
    fit: bool = True
    activation: str = "none"
    glu: Glu = "none"
    bias: bool = False
    added_to: torch.dtype | None = None
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def bucket(self) -> int:
        """`row_bucket` of the launch."""
        return row_bucket(self.rows, self.experts)

    def at(self, bucket: int) -> GemmKey:
        return self._replace(rows=(self.experts or 1) << bucket)

    def problem(self) -> Problem:
        gather = self.gather or ("gather_b", True) in self.options
        return Problem(self.family, self.op, self.measured_as(), gather, self.bucket, self.inner, self.columns)

    def measured_as(self) -> str:
        """The name of the element type that tuning goes by."""
        return str(DTYPES[self.dtype].name)

    def of_tile(self, tile: AnyTile) -> tuple[dict[str, Any], dict[str, Option]]:
        """Fields and options of the kernel that follow from the tile."""
        raise NotImplementedError

    def spec(self, tile: AnyTile) -> KernelSpec:
        fields, options = self.of_tile(tile)
        spec = KernelSpec(self.family, self.op, self.card.arch, DTYPES[self.dtype], bm=tile.bm, bn=tile.bn, **fields)
        static = {name: getattr(self, name) for name in ("layout", "gather", "activation", "glu", "bias")}
        spec = replace(spec, stages=tile.stages, aligned=self.fit, **static)
        spec = spec.with_options(**options, **dict(self.options))
        return spec if self.added_to is None else spec.adding(DTYPES[self.added_to])


@cached_choice
def kernel_for(key: GemmKey, tile: AnyTile) -> Kernel:
    """The kernel of a product with a tile."""
    return kernel_of(key.spec(tile))


@cached_choice
def chosen_tile(key: ProductKey) -> AnyTile:
    """The measured tile where a table has one that this kernel can take, else the rule's."""
    found = tuned_tile(key.problem(), key.card.name)
    if found is not None:
        with suppress(SpecError, TypeError):  # measured by another version, or with fewer experts
            tile = key.tile(found)
            spec = key.spec(tile)
            validate(get_family(spec.family), spec)
            return tile
    return key.rule()


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
