"""esmm, esmm_act, estmm and esfk through the families gemm_sm80 and esfk_sm80: every element type, every stride, sm_80 and newer.

Arguments and results are those of the operators' own docstrings (hexa_fx.ops).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hexa_fx.codegen import family_gemm_sm80
from hexa_fx.codegen.cutlass import MathOperation
from hexa_fx.codegen.family_gemm_sm80 import GEMM, TileSm80, row_bucket
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import cached_choice
from hexa_fx.cuda.kernel import Kernel, kernel_of
from hexa_fx.cuda.operands import (
    DTYPES,
    Into,
    Segment,
    aligned,
    constants_of,
    contiguous,
    dense_rows,
    division,
    has_few_rows,
)
from hexa_fx.cuda.places import listed, places_of
from hexa_fx.cuda.planning import Piece, planning_of
from hexa_fx.cuda.product import ProductKey, Tiles
from hexa_fx.formats.format import ceil_div
from hexa_fx.ir import Layout
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, Estmm
from hexa_fx.ops.table_variants import EsmmActLowRank, EsmmLowRank

FAMILY = "gemm_sm80"
ADDS_ALIGNED = False
"""Buffers that gradients are added to may lie anywhere."""


def takes(o: Any) -> bool:
    """Whether this family computes a product of `hexa_fx.ops.table` in one launch. For few rows dX wants lower tiles than dW."""
    if isinstance(o, Esfk):
        return bool(o.g.shape[0] and o.weight.numel()) and not has_few_rows(o.g.shape[0], o.offs)
    return isinstance(o, Esmm | EsmmAct | Estmm) and not isinstance(o, EsmmLowRank | EsmmActLowRank)


class Sm80Tiles(Tiles):
    """Of gemm_sm80 and esfk_sm80."""

    kind = TileSm80

    def rule(self, key: ProductKey) -> TileSm80:
        # Of esfk both results have to be worth it.
        op, columns = key.kernel.op, min(key.inner, key.columns) if key.kernel.op == "esfk" else key.columns
        kind = key.card.family_arch, key.kernel.dtype, family_gemm_sm80.math_of(key.kernel)
        return family_gemm_sm80.choose_tile(op, *kind, key.bucket, columns)

    def candidates(self, key: ProductKey) -> Sequence[TileSm80]:
        spec = key.kernel
        return family_gemm_sm80.candidates(spec.op, spec.dtype, family_gemm_sm80.math_of(spec), key.bucket)

    def complete(self, key: ProductKey, tile: TileSm80) -> KernelSpec:
        spec = replace(key.kernel, bm=tile.bm, bn=tile.bn, bk=tile.bk, stages=tile.stages)
        return spec.with_options(warps_m=tile.warps_m, warps_n=tile.warps_n)

    def measured_as(self, key: ProductKey, problem: Problem) -> Problem:
        return replace(problem, dtype=f"{problem.dtype} {family_gemm_sm80.math_of(key.kernel)}")


TILES = Sm80Tiles()

_GROUP = 8
"""Row tiles that share the column tiles of a weight while they are in L2; as in gemm_sm80.cuh."""


def esmm(o: Esmm, into: Segment | None = None) -> Tensor:
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    into = into or Segment(o.x.new_empty((o.rows, o.columns)), o.rows, True)
    _rows(o.plain, into.out, None, into.rows, into.last)
    return into.out


def esmm_act(o: EsmmAct) -> tuple[Tensor, Tensor]:
    """``h = esmm`` and ``a = act(h)`` from one launch: (n, I) or (n, 2I), and (n, I)."""
    n, (h, a) = o.rows, o.results()
    if o.glu == "none" and o.activation == "none":
        _rows(o, a, None, n)
        return (a.clone() if o.keep_h else h), a
    _rows(o, h if o.keep_h else None, a, n)
    return h, a


def estmm(o: Estmm, into: Tensor | None = None) -> Tensor:
    """``dW[e]``, the sum of ``x[row]^T g[row]``: (E, N, K) for ``nk``, (E, K, N) for ``kn``.

    Args:
        into: what the result is added to, in its shape and the accumulators' type; it is returned.
    """
    o = _by_rows(o)
    x, g, experts = o.x, o.g, o.experts
    m, n = x.shape[1], g.shape[1]
    d = x.new_empty((experts, m, n)) if into is None else into
    if not (experts and m and n):
        return d
    static: dict[str, Any] = {"gather": o.x_index is not None, "aligned": aligned(x, g), "adds": into is not None}
    gathers = (("gather_b", o.g_index is not None),)
    kernel, bm, bn = _kernel("estmm", x, (o.rows, experts, m, n), gathers, **static)
    grid = (experts * ceil_div(m, bm) * ceil_div(n, bn), 1, 1)
    planning_of(x).launch(kernel, grid, (_weight_piece(o, d),))
    return d


def esfk(o: Esfk, into: Into | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """dX, dW and db of one projection in one launch. No width may be zero.

    Args:
        into: what dW, and db if there is a bias, are added to; it is returned instead.
    """
    x, g, layout = dense_rows(o.x), dense_rows(o.g), o.layout if into is None else into.layout
    stored, stored_layout = _lines(o.weight, flip(o.layout))
    n, columns, k, experts = g.shape[0], g.shape[1], x.shape[1], o.experts
    dx = g.new_empty((n, k))
    if into is not None:
        dw, db = into.weight, into.bias
    else:
        dw, db = o.weight.new_empty(o.weight.shape), g.new_empty((experts, columns)) if o.has_bias else None
    static: dict[str, Any] = {"layout": stored_layout, "gather": o.x_index is not None, "bias": o.has_bias}
    static |= {"aligned": aligned(x, g, stored), "adds": into is not None}
    options = ("transpose", layout == "nk"), *listed(stored)
    kernel, bm, bn = _kernel("esfk", g, (n, experts, k, columns), options, **static)
    given = {"a": g, "b": stored, "d": dx, "offs": o.offs, "rows": n, "n": k, "k": columns, "experts": experts}
    strides = {"a_stride": g.stride()[0], "b_stride": stored.stride()[1], "b_expert": stored.stride()[0], "d_stride": k}
    rows = GEMM.piece(**given, **strides, top_k=divisor(1))
    of_weight = _by_rows(o.to(Estmm, x=x, g=g, layout=layout))
    weight_tiles = experts * ceil_div(dw.shape[1], bm) * ceil_div(dw.shape[2], bn)
    row_tiles = (n // bm + min(experts, n)) * ceil_div(k, bn)
    pieces = (rows, *places_of(stored), _weight_piece(of_weight, dw), ((db,), b""))
    planning_of(x).launch(kernel, (row_tiles + weight_tiles, 1, 1), pieces)
    return dx, dw, db


def _rows(o: EsmmAct, d: Tensor | None, act: Tensor | None, rows: int, last: bool = True) -> None:
    """One launch of esmm: h to d and a to act, each if it is given. `rows` and `last` are of a `Segment`."""
    x, v, offs = dense_rows(o.x), o.v, o.offs
    first, second, layout = _weights(o.w1, o.w3, o.layout)
    bias, bias_up = contiguous(o.b1), contiguous(o.b3)
    result = d if act is None else act
    assert result is not None
    (n, inner), k, experts = result.shape, x.shape[1], offs.shape[0] - 1
    if n == 0 or inner == 0:
        return
    activation, glu, params = (o.activation, o.glu, o.params) if act is not None else ("none", "none", ())
    halves_fit = glu != "concat" or layout != "kn" or not inner * x.element_size() & 15
    fits = halves_fit and aligned(x, first, second)
    static: dict[str, Any] = {"layout": layout, "gather": v is not None, "aligned": fits}
    static |= {"activation": activation, "glu": glu, "bias": bias is not None}
    options = (*(() if act is None else (("keep_h", d is not None),)), *listed(first))
    kernel, bm, bn = _kernel("esmm", x, (rows, experts, k, inner if glu == "none" else 2 * inner), options, **static)
    grid = (ceil_div(n // bm + min(experts, n), _GROUP) * _GROUP * ceil_div(inner, bn), 1, 1)
    pointers = {"a": x, "b": first, "b2": second, "bias": bias, "bias2": bias_up, "d": d, "act": act, "a_index": v}
    strides = {"a_stride": x.stride()[0], "b_stride": first.stride()[1], "b_expert": first.stride()[0]}
    strides |= {"d_stride": 0 if d is None else d.shape[1], "act_stride": inner}
    sizes = {"rows": n if last else 0, "n": inner, "k": k, "experts": experts, "top_k": divisor(o.top_k)}
    piece = GEMM.piece(**pointers, **strides, **sizes, offs=offs, act_params=constants_of(activation, params))
    planning_of(x).launch(kernel, grid, (piece, *places_of(first, second)))


def _kernel(
    op: str,
    x: Tensor,
    sizes: tuple[int, int, int, int],
    options: Sequence[tuple[str, Option]] = (),
    adds: bool = False,
    **static: Any,
) -> tuple[Kernel, int, int]:
    """The kernel of a product; its tile's rows, and the columns (of one glu half) that a tile covers.

    Args:
        op: of the family.
        x: an operand.
        sizes: rows, experts, inner and columns of `ProductKey`.
        adds: the result is added to what is there.
        options: of the kernel, besides those that follow from types and tile.
        static: other fields of it.
    """
    planning, (rows, experts, inner, columns) = planning_of(x), sizes
    family, math = "esfk_sm80" if op == "esfk" else FAMILY, planning.math_of(x.dtype)
    spec = KernelSpec(family, op, planning.card.arch, DTYPES[x.dtype], **static)
    if math == "fast_f32":
        spec = replace(spec, math=MathOperation.multiply_add_fast_f32)
    spec = spec.with_options(**dict(options), **({"simt": True} if math == "simt" else {}))
    spec = spec.adding() if adds else spec
    rows = (experts or 1) << row_bucket(rows, experts)  # which is all that tiles go by
    key = ProductKey(TILES, spec, planning.card, rows, experts, inner, columns)
    tile = planning.tile_of(key)
    return kernel_of(key.spec(tile)), tile.bm, tile.bn if spec.glu == "none" else tile.bn // 2


def _by_rows(o: Estmm) -> Estmm:
    """The same gradient with the operand first that gives the rows of dW, both with contiguous rows."""
    if o.layout == "nk":
        o = o._replace(x=o.g, g=o.x, x_index=o.g_index, g_index=o.x_index)
    return o._replace(x=dense_rows(o.x), g=dense_rows(o.g), layout="kn")


def _weight_piece(o: Estmm, d: Tensor) -> Piece:
    """hexa::GemmParams of ``d[e]``, the sum of ``x[row]^T g[row]``."""
    experts, m, n = d.shape
    given = {"a": o.x, "b": o.g, "d": d, "a_index": o.x_index, "b_index": o.g_index, "offs": o.offs}
    strides = {"a_stride": o.x.stride()[0], "b_stride": o.g.stride()[0]}
    strides |= {"d_stride": d.stride()[1], "d_expert": d.stride()[0]}
    return GEMM.piece(**given, **strides, rows=o.rows, m=m, n=n, experts=experts, top_k=divisor(o.top_k))


def _weights(first: Tensor, second: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None, Layout]:
    """Both weights in one layout and with the same strides, without a copy wherever the strides allow."""
    one, stored = _lines(first, layout)
    if second is None:
        return one, None, stored
    other, as_layout = _lines(second, layout)
    if (stored, one.stride()[:2]) != (as_layout, other.stride()[:2]):
        return first.contiguous(), second.contiguous(), layout
    return one, other, stored


def _lines(weight: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """A view whose last dimension is contiguous, copied only where none is, and its layout."""
    _, row, column = weight.stride()
    if column == 1 or weight.shape[2] == 1:
        return weight, layout
    if row == 1 or weight.shape[1] == 1:  # stored transposed: the other layout, as it lies
        return weight.transpose(1, 2), flip(layout)
    return weight.contiguous(), layout


@cached_choice
def divisor(value: int) -> tuple[int, int, int]:
    """hexa::Divisor of a number from 1 to 2^31 - 1: (value, magic, shift)."""
    magic, shift = division(value)
    return (value, magic, shift - 1) if value > 1 else (1, 0, 0)
