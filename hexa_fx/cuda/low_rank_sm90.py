"""Products with factors of a few columns and these factors' gradients, by the family low_rank: operands in, tensors out.

They only stream their rows: each is read once. Which calls these are says `takes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.codegen import family_low_rank as family
from hexa_fx.codegen.family_decode import room
from hexa_fx.codegen.family_gemm_sm90 import MAX_EXPERTS, TABLES
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.gemm_sm90 import unsupported
from hexa_fx.cuda.kernel import kernel_of
from hexa_fx.cuda.operands import DTYPES, divided_by
from hexa_fx.cuda.planning import Piece, TensorMap, planning_of
from hexa_fx.formats.format import ceil_div
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.records import Derived
from hexa_fx.ops.rows import columns_of, flip, row_count
from hexa_fx.ops.table import Esmm, Estmm, LowRankGradients

MOST_ROWS = 2048
"""Rows an expert on average below which these kernels are the faster ones for dC alone."""

_MOST_LAUNCHES = {
    (family.BOTH, 16): (16, 16),
    (family.BOTH, 32): (2, 1),
    ("esmm", 16): (2, 1),
    ("esmm", 32): (1, 0),
    ("estmm", 16): (3, 0),
    ("estmm", 32): (2, 0),
}
"""Launches in which they are faster than tiles of the family gather_gemm_sm90, by products and padded rank: of rows that are
gathered, and of rows in order. With a rank of 64 those tiles have as many columns, and are the faster ones.
"""

_FEW_ROWS, _FEW_LAUNCHES = 32, 3
"""Rows an expert on average below which more launches than that take longer, whose gradients' parts are larger than their rows."""


class LowRank(LowRankGradients):
    """What the kernels are given. Without u only du is wanted, without a factor only dC; their layout is the factor's."""

    op = Derived(lambda o: "esmm" if o.u is None else "estmm" if o.factor is None else family.BOTH)
    """Which products they give: ``esmm`` du, ``estmm`` dC, ``low_rank_gradients`` both."""
    n = Derived(lambda o: row_count(o.rows, o.v))
    """n."""

    @property
    def rank(self) -> int:
        """r."""
        if self.factor is not None:
            return columns_of(self.factor, self.layout)
        assert self.u is not None
        return self.u.shape[1]

    @property
    def steps(self) -> int:
        """Of a launch; 0 where too many launches would be needed."""
        most = _MOST_LAUNCHES.get((self.op, family.padded_rank(self.rank)), (0, 0))[self.v is None]
        most = min(most, _FEW_LAUNCHES) if self.n < _FEW_ROWS * self.experts else most
        return family.steps_of(self.op, self.rows.shape[1], self.rank, room(TABLES, self.experts), most)


def esmm(o: Esmm) -> Tensor | None:
    """A product without a bias whose weight has a few columns; None if it is another one."""
    given = o.to(LowRank, rows=o.x, factor=o.weight, scale=1.0, experts_last=False)
    return _products(given)[0] if o.bias is None and takes(given) else None


def estmm(o: Estmm) -> Tensor | None:
    """A gradient of such a weight: rows of either side are few columns, which are not gathered. None if it is another one."""
    few_of_x = o.x.shape[1] < o.g.shape[1]
    few, rows, layout = (o.x, o.g, flip(o.layout)) if few_of_x else (o.g, o.x, o.layout)
    few_index, v = (o.x_index, o.g_index) if few_of_x else (o.g_index, o.x_index)
    stored = {"layout": layout, "dtype": rows.dtype, "scale": 1.0, "experts_last": False}
    given = o.to(LowRank, rows=rows, v=v, u=few, **stored)
    return _products(given)[1] if few_index is None and takes(given) else None


def gradients(o: LowRankGradients) -> tuple[Tensor, Tensor] | None:
    """du and dC of one reading; None if the kernels do not take them."""
    given = o.to(LowRank)
    if not takes(given):
        return None
    du, dc = _products(given)
    assert dc is not None
    return o.rows.new_empty((0,)) if du is None else du, dc


def takes(o: LowRank) -> bool:
    """Whether the kernels take it, and should. In a fixed order products do not go by the number of rows."""
    experts, few = o.experts, [t for t in (o.u, o.factor) if t is not None]
    if (
        not planning_of(o.offs).card.is_hopper
        or is_fixed()
        or experts > MAX_EXPERTS
        or o.rows.shape[1] <= family.RANKS[-1]
    ):
        return False
    if not o.n or (o.op == "estmm" and o.n >= MOST_ROWS * experts):
        return False
    if o.dtype not in (None, torch.float32, o.rows.dtype):
        return False
    if o.top_k_weights is not None and (
        DTYPES[o.top_k_weights.dtype].name not in family.WEIGHTS or not o.top_k_weights.is_contiguous()
    ):
        return False
    return o.steps > 0 and all(t.is_contiguous() for t in few) and not unsupported(o.rows, *few, experts=experts)


def _products(o: LowRank) -> tuple[Tensor | None, Tensor | None]:
    """du (n, r) and dC; None for what is not wanted."""
    planning, columns, experts = planning_of(o.rows), o.rows.shape[1], o.experts
    table, wide, steps = room(TABLES, experts), family.padded_rank(o.rank), o.steps
    each = steps * family.STEP_COLUMNS  # columns of a launch
    blocks = min(planning.card.multiprocessors, o.n // family.TILE_ROWS + experts)  # as many as there can be tiles
    du = None if o.factor is None else o.rows.new_empty((o.n, o.rank))
    sums = None if du is None or columns <= each else o.rows.new_empty((o.n, o.rank), dtype=torch.float32)
    dc, parts, axis = None, None, (o.layout == "nk") + (not o.experts_last)  # of dC's columns
    if o.u is not None:
        shape = (o.rank, columns) if o.layout == "nk" else (columns, o.rank)
        dc = o.rows.new_empty((*shape, experts) if o.experts_last else (experts, *shape), dtype=o.dtype)
        parts = o.rows.new_empty((blocks + experts, min(columns, each), o.rank), dtype=torch.float32)

    def piece(begin: int, end: int) -> Piece:
        rows, part = o.rows.narrow(1, begin, end - begin), None if dc is None else dc.narrow(axis, begin, end - begin)
        pointers = {"v": o.v, "offs": o.offs, "rows": rows, "u": o.u, "weights": o.top_k_weights, "du": du, "dc": part}
        pointers |= {"parts": parts, "before": sums if begin else None, "beyond": sums if end < columns else None}
        sizes = {"stride": rows.stride()[0], "n": o.n, "experts": experts, "N": columns, "R": o.rank, "blocks": blocks}
        return family.ARGS.piece(**pointers, **sizes, columns=end - begin, scale=o.scale, **divided_by(o.top_k))

    dtype, arch, stages = DTYPES[o.rows.dtype], planning.card.arch, family.stages_of(o.op, steps, wide, table)
    spec = KernelSpec(family.FAMILY, o.op, arch, dtype=dtype, layout=o.layout, gather=o.v is not None, stages=stages)
    weights = {} if o.top_k_weights is None else {"weights": DTYPES[o.top_k_weights.dtype].name}
    kernel = kernel_of(spec.with_options(rank=wide, steps=steps, experts=table, **weights))
    side, across = (
        (family.PART_SIDE, ceil_div(experts, family.PART_SIDE)) if o.experts_last else (family.PART_NUMBERS, experts)
    )
    finish = None
    if dc is not None:
        adding = KernelSpec(family.FAMILY, family.PARTS, arch, dtype=DTYPES[dc.dtype], layout=o.layout)
        finish = kernel_of(adding.with_options(experts_last=o.experts_last, experts=table))
    for begin in range(0, columns, each):
        end = min(begin + each, columns)
        own = (piece(begin, end),)
        planning.launch(kernel, (blocks, 1, 1), own, (_factor_map(o, begin, end, wide),))
        if finish is not None:  # at once, so that parts of all columns are never there together
            planning.launch(finish, (ceil_div((end - begin) * o.rank, side), across, 1), own)
    return du, dc


def _factor_map(o: LowRank, begin: int, end: int, wide: int) -> TensorMap | None:
    """Of some columns. Boxes of lines of 64, `wide` of them; of (E, N, r), of a step's columns, each a line of `wide` numbers."""
    if o.factor is None:
        return None
    factor = o.factor.narrow(2 if o.layout == "nk" else 1, begin, end - begin)
    experts, rows, inner = factor.shape
    by_expert, by_row, _ = factor.stride()
    box = (family.STEP_COLUMNS // 2, wide, 1) if o.layout == "nk" else (wide, family.STEP_COLUMNS, 1)
    args = (DTYPES[factor.dtype], (inner, rows, experts), (by_row, by_expert), box, box[0] * factor.element_size())
    return TensorMap(factor, args)
