"""Which kernel of packed_gemm a product takes: what is static in a launch, and the tile that follows from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from hexa_fx.codegen.family_packed import DEPTH, FAMILY, LANE, PackedTile, candidates, choose_tile, columns_of_tile
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.formats.format import ceil_div
from hexa_fx.ir import Glu


class Codes(NamedTuple):
    """What a packed weight is made of, beside the element type of its scales.

    Args:
        element: one of `hexa_fx.codegen.family_packed.ELEMENTS`.
        block, scale_rows: values along K, and lines, that share a scale.
        high_first: the first of a byte's two codes is its high half.
    """

    element: str
    block: int
    scale_rows: int
    high_first: bool

    @property
    def per_byte(self) -> int:
        """Values in a byte."""
        return 2 if self.element == "code4" else 1

    @property
    def together(self) -> int:
        """What K is a multiple of."""
        return self.block if self.element == "code4" else LANE

    def scales(self, lines: int, depth: int) -> int:
        """Of an expert."""
        return ceil_div(lines, self.scale_rows) * ceil_div(depth, self.block)


class PackedKey(NamedTuple):
    """Everything that decides the kernel of one product but its tile; as `hexa_fx.cuda.product.GemmKey`.

    Args:
        scale: element type of scales, one of `hexa_fx.codegen.family_packed.SCALES`.
        codes: what the weight is made of.
    """

    card: Card
    dtype: torch.dtype
    bucket: int
    inner: int
    columns: int
    scale: str
    codes: Codes
    gather: bool
    activation: str
    glu: Glu
    bias: bool
    keep_h: bool

    def problem(self) -> Problem:
        """What tuning knows of it."""
        return Problem(FAMILY, "esmm", DTYPES[self.dtype].name, self.gather, self.bucket, self.inner, self.columns)

    def tile(self, fields: Any) -> Any:
        """The tile with these fields."""
        return PackedTile(**fields)

    def rule(self) -> PackedTile:
        """The tile that nobody measured."""
        return choose_tile(self.inner, self.codes.block, self.bucket)

    def candidates(self) -> list[PackedTile]:
        """Tiles worth measuring."""
        return candidates(self.inner, self.codes.block)

    def at(self, bucket: int) -> PackedKey:
        """The same with another number of rows an expert."""
        return self._replace(bucket=bucket)

    def spec(self, tile: PackedTile) -> KernelSpec:
        """The kernel with this tile."""
        spec = KernelSpec(
            family=FAMILY,
            op="esmm",
            arch=self.card.arch,
            dtype=DTYPES[self.dtype],
            bk=DEPTH,
            gather=self.gather,
            activation=self.activation,
            glu=self.glu,
            bias=self.bias,
        )
        packed: dict[str, Option] = {"scale": self.scale, **self.codes._asdict()}
        keep: dict[str, Option] = {} if (self.activation, self.glu) == ("none", "none") else {"keep_h": self.keep_h}
        spec = spec.with_options(**packed, **keep, **asdict(tile), passes=tile.passes(self.inner))
        lines = self.columns // 2 if self.glu in ("concat", "interleaved") else self.columns
        return spec.with_options(full=lines % columns_of_tile(spec) == 0)
