"""A dense layer of few tokens in two launches, which sort slots themselves: the first product, and the second one with the sum over
experts; or in three, where blocks of the second cannot have equal numbers of columns.

With few rows an expert a layer only streams the weights of the experts that are reached, and each launch may cost a tenth of
that. All but the first launch begin while the one before still runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen import family_decode as family
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.family_packed import columns_of_tile
from hexa_fx.codegen.spec import KernelSpec, Option
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.choosing import Card, cached_choice
from hexa_fx.cuda.gemm_sm80 import divisor
from hexa_fx.cuda.operands import DTYPES, aligned, as_stored, constants_of, contiguous
from hexa_fx.cuda.places import listed, parts_of, places_of
from hexa_fx.cuda.planning import launch, planning_of
from hexa_fx.cuda.product import ProductKey, Tiles
from hexa_fx.cuda.rows import ID_TYPES, ids_are_checked, rows_spec
from hexa_fx.formats.format import ceil_div
from hexa_fx.jit.env import JitSettings
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.rows import columns_of, flip
from hexa_fx.ops.table import Esmm, EsmmAct
from hexa_fx.ops.table_layers import MoeFfn


@dataclass(frozen=True)
class DecodeTiles(Tiles):
    """Of decode_gemm and decode_down. There is one for each product that is planned (`few_tokens`).

    Args:
        slots: that tables have to hold.
        first: of a layer's launches. The next one may begin early.
        summed: columns that a block gives of all tokens, which it sums; 0 where rows are not summed.
        beside: a block of the second product has a place beside one of this product on each multiprocessor.
    """

    slots: int
    first: bool = False
    summed: int = 0
    beside: bool = False

    @staticmethod
    def kind(**fields: Any) -> family.DecodeTile | family.DownTile:
        return family.DownTile(**fields) if "tiles" in fields else family.DecodeTile(**fields)

    def rule(self, key: ProductKey) -> family.DecodeTile | family.DownTile:
        sizes = (key.card.arch, key.bucket, key.experts, self.slots)
        if self.summed:
            summed = family.choose_summed(key.card.name, *sizes, self.summed, key.inner)
            assert summed is not None, "asked before"
            return summed
        found = family.choose_tile(*sizes, key.kernel.layout == "nk")
        assert found is not None, "asked before"
        return replace(found, blocks=1) if self.beside and found.rows == family.ROWS[0] else found

    def candidates(self, key: ProductKey) -> list[family.DecodeTile]:
        return family.candidates()

    def measured_as(self, key: ProductKey, problem: Problem) -> Problem:
        return replace(problem, op="combine" if self.summed else problem.op, gather=self.first)

    def complete(self, key: ProductKey, tile: family.DecodeTile | family.DownTile) -> KernelSpec:
        spec = replace(key.kernel, stages=tile.stages)
        if isinstance(tile, family.DownTile):
            spec = replace(spec, family=family.DOWN, op="combine")
            return spec.with_options(
                tiles=tile.tiles, dependent=True, slots=family.room(family.SUMMED_SLOTS, self.slots)
            )
        summed, dependent = self.summed > 0, tile.dependent and not self.first
        shape: dict[str, Option] = {"rows": tile.rows, "warps_m": tile.warps_m, "dependent": dependent}
        return spec.with_options(
            **shape, slots=family.slots_of(tile, self.slots, summed), first=self.first, summed=summed
        )


MOST_TOKENS = 256
BUSY = 0.8
"""Part of the multiprocessors that a product which sums has to keep busy."""
MOST_COLUMNS = 1 << 18
"""Units of work are dealt out in 32 bits."""
UNITS = 4
"""Units of work that a multiprocessor has for each of its blocks, where rows are summed by a launch of their own."""
FIRST_ARCH = 90
"""Cards before it keep one launch for each operator."""


class DecodeSlots(NamedTuple):
    """A routing as it is given: ids (T, k), of E experts."""

    ids: Tensor
    experts: int

    @property
    def rows(self) -> int:
        """n."""
        return self.ids.numel()

    @property
    def bucket(self) -> int:
        """`row_bucket` of the layer."""
        return row_bucket(self.rows, self.experts)


def few_tokens(o: MoeFfn) -> Tensor | None:
    """``hexa::moe_ffn`` on operands, (T, D); None where another way has to compute it, or is faster."""
    card, ids = planning_of(o.x).card, o.top_k_index
    if not is_few(card, ids, o.experts) or is_fixed() or ids_are_checked():
        return None
    slots = DecodeSlots(ids.contiguous(), o.experts)
    first = _as_stored(o.to(EsmmAct, layout=o.layout1, params=tuple(o.params)))
    second = _as_stored(o.to(Esmm, weight=o.w2, bias=o.b2, top_k=1, layout=o.layout2).plain)
    if not (_takes(card, first, slots) and _takes(card, second, slots)) or ids.dtype not in ID_TYPES:
        return None
    columns = _summed_columns(card, second, slots)
    if not columns and not family.very_few(slots.rows, slots.experts):
        return None
    second = second._replace(x=_up(first, slots, columns > 0))
    if columns:
        return _down(second, slots, columns, o.top_k_weights)
    return _combine(_down(second, slots), o.top_k_weights, slots)


def is_few(card: Card, top_k_index: Tensor, experts: int) -> bool:
    """Whether a call has so few tokens that its layer only streams weights, and these launches are wanted for it on the card."""
    tokens, top_k = top_k_index.shape
    few = 0 < tokens <= MOST_TOKENS and 0 < tokens * top_k <= family.SLOTS[-1] and 0 < experts <= family.EXPERTS[-1]
    fits = few and card.family_arch >= FIRST_ARCH and row_bucket(tokens * top_k, experts) <= family.MOST_SHORT_BUCKET
    return fits and are_wanted()


@cached_choice
def are_wanted() -> bool:
    """Whether HEXA_FX_FEW_TOKENS asks for these launches."""
    return JitSettings.from_env().few_tokens


def _as_stored(o: EsmmAct) -> EsmmAct:
    """With views of the weights whose contiguous dimension is the last one."""
    w1, layout = as_stored(o.w1, o.layout)
    return o._replace(w1=w1, w3=None if o.w3 is None else as_stored(o.w3, o.layout)[0], layout=layout)


def _takes(card: Card, o: EsmmAct, slots: DecodeSlots) -> bool:
    """Whether the kernel can read these operands."""
    x, weights = o.x, [w for w in (o.w1, o.w3) if w is not None]
    if x.dtype not in (torch.bfloat16, torch.float16) or any(w.dtype != x.dtype for w in weights):
        return False
    if not aligned(x, *weights) or any(t.stride()[-1] != 1 for t in (x, *weights)):
        return False
    alike = all((w.stride(), w.shape) == (o.w1.stride(), o.w1.shape) for w in weights)
    if parts_of(o.w1) > 1 and (o.glu, o.layout) != ("concat", "nk"):
        return False  # halves of a tile are of one matrix each
    both = o.w3 is None or (o.b1 is None) == (o.b3 is None)
    pieces = all(0 < size < MOST_COLUMNS and size % 8 == 0 for size in (*o.w1.shape[1:], o.inner))
    tile = family.choose_tile(card.arch, slots.bucket, slots.experts, slots.rows, o.layout == "nk")
    return alike and both and pieces and tile is not None


def _summed_columns(card: Card, o: EsmmAct, slots: DecodeSlots) -> int:
    """Columns that each block of the second product gives of all tokens, and sums; 0 where that does not serve.

    All multiprocessors need some; and lines that run across columns would be read in short pieces.
    """
    _, n, k = o.w1.shape
    if o.layout != "nk":
        return 0
    columns = ceil_div(n, 8 * card.multiprocessors) * 8
    tile = family.choose_summed(card.name, card.arch, slots.bucket, slots.experts, slots.rows, columns, k)
    return columns if tile is not None and ceil_div(n, columns) >= BUSY * card.multiprocessors else 0


def _up(o: EsmmAct, slots: DecodeSlots, summed: bool) -> Tensor:
    """(n, I) by slot, of rows of tokens; rows without an expert are not written. summed: the product behind sums its rows."""
    d = o.x.new_empty((slots.rows, o.inner))
    tiles = DecodeTiles(slots.rows, first=True, beside=summed and o.inner >= family.LONG_LINES)
    _product(tiles, o._replace(top_k=slots.ids.shape[1]), slots, d, units=1 if summed else UNITS)
    return d


def _down(o: EsmmAct, slots: DecodeSlots, summed: int = 0, weights: Tensor | None = None) -> Tensor:
    """(n, D) by slot; summed, if blocks give so many columns of all tokens: (T, D)."""
    d = o.x.new_empty((slots.ids.shape[0] if summed else slots.rows, o.inner))
    _product(DecodeTiles(slots.rows, summed=summed), o, slots, d, contiguous(weights))
    return d


def _product(
    tiles: DecodeTiles, o: EsmmAct, slots: DecodeSlots, d: Tensor, weights: Tensor | None = None, units: int = UNITS
) -> None:
    """Launches one product.

    Args:
        o: of which ``top_k`` slots share a row of x.
        d: where it goes.
        weights: of slots, where their rows are summed.
        units: of work that a multiprocessor has for each of its blocks, at least.
    """
    planning, n, inner, experts = planning_of(o.x), o.inner, columns_of(o.w1, flip(o.layout)), slots.experts
    static: dict[str, Any] = {"activation": o.activation, "glu": o.glu, "bias": o.b1 is not None}
    spec = KernelSpec(family.GEMM, "esmm", planning.card.arch, DTYPES[o.x.dtype], layout=o.layout, **static)
    name = "f32" if weights is None else DTYPES[weights.dtype].name
    types = {"id": ID_TYPES[slots.ids.dtype], "weights": name, **dict(listed(o.w1))}
    spec = spec.with_options(experts=family.room(family.EXPERTS, experts), **types)
    rows = experts << slots.bucket  # which is all that tiles go by
    key = ProductKey(tiles, spec, planning.card, rows, experts, inner, columns_of(o.w1, o.layout))
    tile: family.DecodeTile | family.DownTile = planning.tile_of(key)
    spec = key.spec(tile)
    by_expert, by_line, _ = o.w1.stride()
    pointers = {"x": o.x, "w": o.w1, "w2": o.w3, "bias": contiguous(o.b1), "bias2": contiguous(o.b3), "d": d}
    pointers |= {"ids": slots.ids, "weights": weights}
    strides = {"x_stride": o.x.stride()[0], "w_line": by_line, "w_expert": by_expert}
    sizes = {"slots": slots.rows, "n": n, "k": inner, "experts": experts, "top_k": divisor(o.top_k)}
    sizes |= {"together": slots.ids.shape[1] if tiles.summed else 1, "columns": tiles.summed}
    places = planning.card.multiprocessors
    if tiles.summed or isinstance(tile, family.DownTile):
        blocks = ceil_div(n, tiles.summed)
    else:
        most = min(slots.rows, slots.rows // tile.rows + experts) * ceil_div(n, columns_of_tile(spec))
        blocks = min(most, places * min(tile.blocks, max(1, most // (units * places))))
    constants = constants_of(o.activation, o.params)
    launch(o.x, spec, (blocks, 1, 1), *places_of(o.w1, o.w3), **pointers, **strides, **sizes, act_params=constants)


def _combine(y: Tensor, top_k_weights: Tensor | None, slots: DecodeSlots) -> Tensor:
    """(T, D): rows by slot, times their weights, added up in the order of slots."""
    width, weights, (tokens, top_k) = y.shape[1], contiguous(top_k_weights), slots.ids.shape
    parts = ceil_div(width, 8 * family.COMBINE_THREADS)
    out = y.new_empty((tokens, width))
    spec = rows_spec(family.COMBINE, "combine", y, weights, id=ID_TYPES[slots.ids.dtype], dependent=True)
    fields = {"y": y, "weights": weights, "ids": slots.ids, "out": out}
    sizes = {"width": width, "top_k": top_k, "experts": slots.experts, "parts": parts}
    launch(y, spec, (tokens * parts, 1, 1), **fields, **sizes)
    return out
