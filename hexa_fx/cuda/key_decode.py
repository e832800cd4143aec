"""Which kernel of decode_gemm a product of few tokens takes: what is static in a launch, and the tile that follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hexa_fx.codegen.family_decode import (
    DOWN,
    EXPERTS,
    GEMM,
    ROWS,
    SUMMED_SLOTS,
    DecodeTile,
    DownTile,
    candidates,
    choose_summed,
    choose_tile,
    room,
    slots_of,
)
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.ir import Glu, Layout


class DecodeKey(NamedTuple):
    """Everything that decides the kernel of one product but its tile; as `hexa_fx.cuda.product.GemmKey`.

    Args:
        experts, slots: that tables have to hold.
        inner, columns: K, and columns of the weight.
        ids: C++ type of routing ids.
        first: of a layer's launches. The next one may begin early.
        weights: type of the weights of slots, where rows are summed.
        summed: columns that a block gives of all tokens, which it sums; 0 where rows are not summed.
        beside: a block of the second product has a place beside one of this product on each multiprocessor.
    """

    card: Card
    dtype: torch.dtype
    bucket: int
    experts: int
    slots: int
    inner: int
    columns: int
    layout: Layout
    ids: str
    first: bool
    activation: str
    glu: Glu
    bias: bool
    weights: str = "f32"
    summed: int = 0
    beside: bool = False

    def problem(self) -> Problem:
        """What tuning knows of it."""
        op = "combine" if self.summed else "esmm"
        return Problem(GEMM, op, DTYPES[self.dtype].name, self.first, self.bucket, self.inner, self.columns)

    def tile(self, fields: Any) -> Any:
        """The tile with these fields."""
        return DownTile(**fields) if "tiles" in fields else DecodeTile(**fields)

    def rule(self) -> DecodeTile | DownTile:
        """The tile that nobody measured. There is one, or the product is not planned (`hexa_fx.cuda.decode`)."""
        sizes = (self.card.arch, self.bucket, self.experts, self.slots)
        if self.summed:
            summed = choose_summed(self.card.name, *sizes, self.summed, self.inner)
            assert summed is not None, "asked before"
            return summed
        found = choose_tile(*sizes, self.layout == "nk")
        assert found is not None, "asked before"
        return replace(found, blocks=1) if self.beside and found.rows == ROWS[0] else found

    def candidates(self) -> list[DecodeTile]:
        """Tiles worth measuring."""
        return candidates()

    def at(self, bucket: int) -> DecodeKey:
        """The same with another number of rows an expert."""
        return self._replace(bucket=bucket)

    def spec(self, tile: DecodeTile | DownTile) -> KernelSpec:
        """The kernel with this tile."""
        if isinstance(tile, DownTile):
            return self._down(tile)
        return KernelSpec(
            family=GEMM,
            op="esmm",
            arch=self.card.arch,
            dtype=DTYPES[self.dtype],
            stages=tile.stages,
            layout=self.layout,
            activation=self.activation,
            glu=self.glu,
            bias=self.bias,
        ).with_options(
            rows=tile.rows,
            warps_m=tile.warps_m,
            dependent=tile.dependent and not self.first,
            experts=room(EXPERTS, self.experts),
            slots=slots_of(tile, self.slots, self.summed > 0),
            id=self.ids,
            first=self.first,
            weights=self.weights,
            summed=self.summed > 0,
        )

    def _down(self, tile: DownTile) -> KernelSpec:
        spec = KernelSpec(DOWN, "combine", self.card.arch, dtype=DTYPES[self.dtype], stages=tile.stages)
        return replace(spec, layout=self.layout, bias=self.bias).with_options(
            tiles=tile.tiles,
            dependent=True,
            experts=room(EXPERTS, self.experts),
            slots=room(SUMMED_SLOTS, self.slots),
            id=self.ids,
            weights=self.weights,
        )
