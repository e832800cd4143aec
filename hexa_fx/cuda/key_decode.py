"""Which kernel of decode_gemm a product of few tokens takes: what is static in a launch, and the tile that follows from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hexa_fx.codegen.family_decode import EXPERTS, GEMM, DecodeTile, candidates, choose_tile, room, slots_of
from hexa_fx.codegen.spec import Glu, KernelSpec, Layout
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.operands import DTYPES


class DecodeKey(NamedTuple):
    """Everything that decides the kernel of one product but its tile; as `hexa_fx.cuda.product.GemmKey`.

    Args:
        experts, slots: that tables have to hold.
        inner, columns: K, and columns of the weight.
        ids: C++ type of routing ids.
        first: of a layer's launches. The second one may begin early.
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
    accumulate: bool = False

    def problem(self) -> Problem:
        """What tuning knows of it."""
        return Problem(GEMM, "esmm", DTYPES[self.dtype].name, self.first, self.bucket, self.inner, self.columns)

    def tile(self, fields: Any) -> DecodeTile:
        """The tile with these fields."""
        return DecodeTile(**fields)

    def rule(self) -> DecodeTile:
        """The tile that nobody measured. There is one, or the product is not planned (`hexa_fx.cuda.decode`)."""
        found = choose_tile(self.card.arch, self.bucket, self.experts, self.slots, self.layout == "nk")
        assert found is not None, "asked before"
        return found

    def candidates(self) -> list[DecodeTile]:
        """Tiles worth measuring."""
        return candidates()

    def at(self, bucket: int) -> DecodeKey:
        """The same with another number of rows an expert."""
        return self._replace(bucket=bucket)

    def spec(self, tile: DecodeTile) -> KernelSpec:
        """The kernel with this tile."""
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
            slots=slots_of(tile, self.slots),
            id=self.ids,
            first=self.first,
        )
