"""Which kernel of gemm_sm80 or esfk_sm80 a product takes: what is static in a launch, and the tile that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from hexa_fx.codegen.cutlass import MathOperation
from hexa_fx.codegen.heuristics import Tile, candidates, choose_tile
from hexa_fx.codegen.spec import Glu, KernelSpec, Layout
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.launch import Kernel, NotBuilt, is_built, kernel_of, say_provisional
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.cuda.tune import tune, tuned_tile


class EsmmKey(NamedTuple):
    """Everything that decides the kernel of one esmm.

    Args:
        math: ``tensor``, ``fast_f32`` or ``simt``.
        bucket: `row_bucket` of the launch.
        depth: K.
        inner: columns of one glu half.
        fit: addresses and strides are multiples of 16 bytes.
    """

    card: Card
    dtype: torch.dtype
    math: str
    bucket: int
    depth: int
    inner: int
    layout: Layout
    gather: bool
    fit: bool
    activation: str
    glu: Glu
    bias: bool
    keep_h: bool

    def spec(self, tile: Tile | None = None) -> KernelSpec:
        """The kernel with this tile, or with the one its bucket has."""
        spec = _spec("esmm", self, tile or _tile(self))
        spec = replace(spec, layout=self.layout, gather=self.gather, activation=self.activation, glu=self.glu)
        spec = replace(spec, bias=self.bias)
        return spec.with_options(keep_h=self.keep_h) if (self.activation, self.glu) != ("none", "none") else spec

    def problem(self) -> Problem:
        """What tuning knows of it."""
        columns = self.inner if self.glu == "none" else 2 * self.inner
        return Problem("gemm_sm80", "esmm", _math_name(self), self.gather, self.bucket, self.depth, columns)


class EstmmKey(NamedTuple):
    """Everything that decides the kernel of one estmm: D (m, n), operands gathered or not, D stored or added to."""

    card: Card
    dtype: torch.dtype
    math: str
    bucket: int
    m: int
    n: int
    gather_a: bool
    gather_b: bool
    fit: bool
    accumulate: bool = False

    def spec(self, tile: Tile | None = None) -> KernelSpec:
        """The kernel with this tile, or with the one its bucket has."""
        spec = _spec("estmm", self, tile or _tile(self))
        spec = replace(spec, gather=self.gather_a).with_options(gather_b=self.gather_b)
        return spec.adding() if self.accumulate else spec

    def problem(self) -> Problem:
        """What tuning knows of it."""
        gather = self.gather_a or self.gather_b
        return Problem("gemm_sm80", "estmm", _math_name(self), gather, self.bucket, self.m, self.n)


class EsfkKey(NamedTuple):
    """Everything that decides the kernel of one esfk: dX (n, k) of a weight with this layout in dX = dY W^T, and dW (k, n).

    Args:
        k, n: columns of X and of dY.
        transpose: dW is stored (n, k).
        accumulate: dW and db are added to what is there.
    """

    card: Card
    dtype: torch.dtype
    math: str
    bucket: int
    k: int
    n: int
    layout: Layout
    gather: bool
    transpose: bool
    bias: bool
    fit: bool
    accumulate: bool = False

    def spec(self, tile: Tile | None = None) -> KernelSpec:
        """The kernel with this tile, or with the one its bucket has."""
        spec = _spec("esfk", self, tile or _tile(self), "esfk_sm80")
        spec = replace(spec, layout=self.layout, gather=self.gather, bias=self.bias)
        spec = spec.with_options(transpose=self.transpose)
        return spec.adding() if self.accumulate else spec

    def problem(self) -> Problem:
        """What tuning knows of it."""
        return Problem("esfk_sm80", "esfk", _math_name(self), self.gather, self.bucket, self.k, self.n)


Key = EsmmKey | EstmmKey | EsfkKey
_BUCKETS = 20
"""More than there are buckets of rows per expert with rules of their own."""


@cached_choice
def kernel_for(key: Key, tile: Tile | None) -> tuple[Kernel, int, int]:
    """The kernel, its tile's rows, and the columns (of one glu half) that a tile covers."""
    spec = key.spec(tile)
    return kernel_of(spec), spec.bm, spec.bn if spec.glu == "none" else spec.bn // 2


def run_built(key: Key, run: Callable[[Tile | None], None]) -> None:
    """Runs with the tile of the key's bucket (None). While its kernel is not built: with the nearest bucket's whose kernel is.

    Raises:
        NotBuilt: none is.
    """
    try:
        run(None)
    except NotBuilt as reason:
        tile = _built_tile(key)
        if tile is None:
            raise
        say_provisional(key.problem().op, "another tile", reason)
        run(tile)


def _built_tile(key: Key) -> Tile | None:
    for bucket in sorted(range(_BUCKETS), key=lambda bucket: abs(bucket - key.bucket)):
        near = key._replace(bucket=bucket)
        tile = _tile(near)
        if is_built(key.spec(tile)):
            return tile
    return None


def _columns(key: Key) -> int:
    """Columns that a rule goes by."""
    if isinstance(key, EsmmKey):
        return key.problem().columns
    return key.n if isinstance(key, EstmmKey) else min(key.k, key.n)


def tune_key(key: Key, device: int, run: Callable[[Tile], None]) -> None:
    """Measures a bucket that this machine's table lacks. `run` launches a candidate on the caller's operands."""
    problem = key.problem()
    tiles = [asdict(tile) for tile in candidates(problem.op, DTYPES[key.dtype], key.math, key.bucket)]
    tune(problem, device, tiles, lambda tile: key.spec(Tile(**tile)), lambda tile: run(Tile(**tile)))


def _tile(key: Key) -> Tile:
    """The measured tile where a table has one, else the rule's."""
    problem = key.problem()
    found = tuned_tile(problem, key.card.name)
    if found is not None:
        return Tile(**found)
    return choose_tile(problem.op, key.card.family_arch, DTYPES[key.dtype], key.math, key.bucket, _columns(key))


def _spec(op: str, key: Key, tile: Tile, family: str = "gemm_sm80") -> KernelSpec:
    if key.card.arch < 80:
        raise Unsupported(f"sm_{key.card.arch}; the kernels need sm_80 or newer")
    exact = key.math == "fast_f32"
    spec = KernelSpec(
        family=family,
        op=op,
        arch=key.card.arch,
        dtype=DTYPES[key.dtype],
        math=MathOperation.multiply_add_fast_f32 if exact else MathOperation.multiply_add,
        bm=tile.bm,
        bn=tile.bn,
        bk=tile.bk,
        stages=tile.stages,
        aligned=key.fit,
    )
    simt = {"simt": True} if key.math == "simt" else {}
    return spec.with_options(warps_m=tile.warps_m, warps_n=tile.warps_n, **simt)


def _math_name(key: Key) -> str:
    return f"{DTYPES[key.dtype].name} {key.math}"
