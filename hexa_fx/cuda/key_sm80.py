"""Which kernel of gemm_sm80 or esfk_sm80 a product takes: what is static in a launch, and the tile that follows from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hexa_fx.codegen.cutlass import MathOperation
from hexa_fx.codegen.heuristics import Tile, candidates, choose_tile
from hexa_fx.codegen.spec import Glu, KernelSpec, Layout, Option
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.launch import Kernel, kernel_of
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.cuda.tile_choice import chosen_tile


class GemmKey(NamedTuple):
    """Everything that decides the kernel of one product but its tile.

    Args:
        op: ``esmm``, ``estmm`` or ``esfk``.
        math: ``tensor``, ``fast_f32`` or ``simt``.
        bucket: `row_bucket` of the launch.
        inner: depth of the contraction; for a weight's gradient its rows, for esfk the columns of X.
        columns: of the result; for esfk those of dY.
        layout: of the weight as it is multiplied: for esfk in dX = dY W^T.
        gather: the first operand is gathered; the second by option ``gather_b``.
        fit: addresses and strides are multiples of 16 bytes.
        accumulate: weight gradients are added to what is there.
        options: of the kernel, besides its warps.
    """

    op: str
    card: Card
    dtype: torch.dtype
    math: str
    bucket: int
    inner: int
    columns: int
    layout: Layout = "nk"
    gather: bool = False
    fit: bool = True
    activation: str = "none"
    glu: Glu = "none"
    bias: bool = False
    accumulate: bool = False
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def family(self) -> str:
        """esfk has a template of its own."""
        return "esfk_sm80" if self.op == "esfk" else "gemm_sm80"

    def problem(self) -> Problem:
        """What tuning knows of it."""
        math, gather = f"{DTYPES[self.dtype].name} {self.math}", self.gather or ("gather_b", True) in self.options
        return Problem(self.family, self.op, math, gather, self.bucket, self.inner, self.columns)

    def tile(self, fields: Any) -> Tile:
        """The tile with these fields."""
        return Tile(**fields)

    def rule(self) -> Tile:
        """The tile that nobody measured. Both results of esfk have to be worth its width."""
        columns = min(self.inner, self.columns) if self.op == "esfk" else self.columns
        return choose_tile(self.op, self.card.family_arch, DTYPES[self.dtype], self.math, self.bucket, columns)

    def candidates(self) -> list[Tile]:
        """Tiles worth measuring."""
        return candidates(self.op, DTYPES[self.dtype], self.math, self.bucket)

    def at(self, bucket: int) -> GemmKey:
        """The same with another number of rows an expert."""
        return self._replace(bucket=bucket)

    def spec(self, tile: Tile) -> KernelSpec:
        """The kernel with this tile."""
        if self.card.arch < 80:
            raise Unsupported(f"sm_{self.card.arch}; the kernels need sm_80 or newer")
        exact = self.math == "fast_f32"
        spec = KernelSpec(
            family=self.family,
            op=self.op,
            arch=self.card.arch,
            dtype=DTYPES[self.dtype],
            math=MathOperation.multiply_add_fast_f32 if exact else MathOperation.multiply_add,
            bm=tile.bm,
            bn=tile.bn,
            bk=tile.bk,
            stages=tile.stages,
            layout=self.layout,
            gather=self.gather,
            activation=self.activation,
            glu=self.glu,
            bias=self.bias,
            aligned=self.fit,
        )
        simt = {"simt": True} if self.math == "simt" else {}
        spec = spec.with_options(warps_m=tile.warps_m, warps_n=tile.warps_n, **simt, **dict(self.options))
        return spec.adding() if self.accumulate else spec


@cached_choice
def kernel_for(key: GemmKey, tile: Tile | None) -> tuple[Kernel, int, int]:
    """The kernel with a tile, or the chosen one; its tile's rows, and the columns (of one glu half) that a tile covers."""
    spec = key.spec(tile or chosen_tile(key))
    return kernel_of(spec), spec.bm, spec.bn if spec.glu == "none" else spec.bn // 2
