"""Which kernel of the Hopper family a product takes: what is static in a launch, and the tile that follows from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hexa_fx.codegen.family_gemm_sm90 import TABLES, line_elements
from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.codegen.spec import Glu, KernelSpec, Layout, Option
from hexa_fx.codegen.tiles_sm90 import CANDIDATES, TileChoice, choose_tile
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.launch import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.cuda.tile_choice import chosen_tile

FAMILY = "gather_gemm_sm90"


class HopperKey(NamedTuple):
    """Everything that decides the kernel of one product but its tile.

    Args:
        op: of `hexa_fx.codegen.tiles_sm90.CANDIDATES`.
        rows, experts: n and E.
        inner, columns: contraction and columns of the weight; of a weight's gradient its rows and columns.
        gather: a row operand is gathered.
        accumulate: weight gradients are added to what is there.
        options: of the kernel, besides those that follow from tile and experts.
    """

    op: str
    card: Card
    dtype: torch.dtype
    rows: int
    experts: int
    inner: int
    columns: int
    layout: Layout = "nk"
    gather: bool = False
    activation: str = "none"
    glu: Glu = "none"
    bias: bool = False
    accumulate: bool = False
    options: tuple[tuple[str, Option], ...] = ()

    def problem(self) -> Problem:
        """What tuning knows of it."""
        bucket = row_bucket(self.rows, self.experts)
        return Problem(FAMILY, self.op, DTYPES[self.dtype].name, self.gather, bucket, self.inner, self.columns)

    def tile(self, fields: Any) -> TileChoice:
        """The tile with these fields."""
        return TileChoice(**fields)

    def rule(self) -> TileChoice:
        """The tile that nobody measured."""
        return choose_tile(self.op, self.rows, self.experts, self.inner, self.columns, self.gather)

    def candidates(self) -> tuple[TileChoice, ...]:
        """Tiles worth measuring."""
        return CANDIDATES[self.op]

    def at(self, bucket: int) -> HopperKey:
        """The same with another number of rows an expert."""
        return self._replace(rows=self.experts << bucket)

    def spec(self, tile: TileChoice) -> KernelSpec:
        """The kernel with this tile. Its tables in shared memory are the smallest that hold the experts."""
        spec = KernelSpec(
            family=FAMILY,
            op=self.op,
            arch=90,
            dtype=DTYPES[self.dtype],
            bm=tile.bm,
            bn=tile.bn,
            bk=line_elements(DTYPES[self.dtype]),
            stages=tile.stages,
            schedule=tile.kernel_schedule,
            layout=self.layout,
            gather=self.gather,
            activation=self.activation,
            glu=self.glu,
            bias=self.bias,
        )
        tables = next(size for size in TABLES if self.experts <= size)
        swapped = {"swapped": True} if tile.swapped else {}
        spec = spec.with_options(cluster=tile.cluster, experts=tables, **swapped, **dict(self.options))
        return spec.adding() if self.accumulate else spec


class Choice(NamedTuple):
    """What a launch takes from its key: the kernel, its tile, and its grid: one block a multiprocessor, in whole clusters."""

    kernel: Kernel
    tile: TileChoice
    grid: tuple[int, int, int]


@cached_choice
def choice_for(key: HopperKey, tile: TileChoice | None) -> Choice:
    """The kernel with a tile, or the chosen one."""
    tile = tile or chosen_tile(key)
    blocks = key.card.multiprocessors // tile.cluster * tile.cluster
    return Choice(kernel_of(key.spec(tile)), tile, (blocks, 1, 1))
