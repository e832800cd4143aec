"""The operators that quantise for FP8 block compute: rows, columns of routed rows, and weights.

Sizes, layouts and what kernels may assume are those of `hexa_fx.ops.fp8`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count, padded
from hexa_fx.ops import library
from hexa_fx.ops.rows import row_count

library.define("quantize_rows_fp8(Tensor x, bool binary) -> (Tensor q, Tensor s)")
library.define("quantize_columns_fp8(Tensor x, Tensor? v, Tensor offs, SymInt top_k) -> (Tensor q, Tensor s)")
library.define("group_rows_fp8(Tensor x, Tensor xs, Tensor? v, Tensor offs, SymInt top_k) -> (Tensor q, Tensor s)")
library.define(
    "quantize_weight_fp8(Tensor(a!) q, Tensor(b!) s, Tensor(c!)? q_t, Tensor(d!)? s_t, Tensor w, Tensor? w3, str layout, str glu) "
    "-> ()"
)


def rows_and_scales(like: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Empty elements (rows, width) and scales (rows, width / 128)."""
    return like.new_empty((rows, width), dtype=ELEMENT), like.new_empty((rows, width // BLOCK), dtype=torch.float32)


def groups_and_scales(like: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Empty elements (groups, width, 128) and scales (groups, width)."""
    return like.new_empty((groups, width, BLOCK), dtype=ELEMENT), like.new_empty((groups, width), dtype=torch.float32)


class QuantizeRowsFp8(NamedTuple):
    """Rows in blocks of 1 x 128.

    Args:
        x: (R, C) in a floating dtype but float64, any strides.
        binary: scales are powers of two, as `GroupRowsFp8` asks for.

    Results:
        q: (R, C') e4m3.
        s: (R, C' / 128) float32.
    """

    x: Tensor
    binary: bool

    def results(self) -> tuple[Tensor, Tensor]:
        return rows_and_scales(self.x, self.x.shape[0], padded(self.x.shape[1]))


class QuantizeColumnsFp8(NamedTuple):
    """Rows gathered into expert order and transposed in groups of 128 rows, each column of a group with its scale.

    Args:
        x: (T, C), row p is ``x[v[p] // top_k]``, or (n, C) in expert order without v; in a floating dtype but float64.
        v: (n,) int32 of `reindex`, or None.
        offs: (E+1,) int32 of `reindex`.
        top_k: slots a token; 1 without v.

    Results:
        q: (G, C', 128) e4m3, G = n // 128 + min(E, n). ``q[F(e) + j, c, r]`` is of row ``offs[e] + 128 j + r`` and column c, where
            F(e) is the sum of ``ceil(rows / 128)`` over the experts before e; zero where the expert has no such row.
        s: (G, C') float32, of the 128 rows of a group in a column.
    """

    x: Tensor
    v: Tensor | None
    offs: Tensor
    top_k: int

    def results(self) -> tuple[Tensor, Tensor]:
        groups = group_count(row_count(self.x, self.v), self.offs.shape[0] - 1)
        return groups_and_scales(self.x, groups, padded(self.x.shape[1]))


class GroupRowsFp8(NamedTuple):
    """Quantised rows as `QuantizeColumnsFp8` lays rows out, of whose columns 128 share a scale in a group.

    It is the largest of the 128 rows' scales. All are powers of two, so that elements stay the numbers that they are but for
    those that become denormal; as activations in section 3.3.3 of the DeepSeek-V3 report (arXiv 2412.19437).

    Args:
        x, xs: (T, C') e4m3 and (T, C' / 128) of `QuantizeRowsFp8` with binary scales; or (n, C') in expert order without v.
        v, offs, top_k: as there.

    Results:
        q: (G, C', 128) e4m3.
        s: (G, C').
    """

    x: Tensor
    xs: Tensor
    v: Tensor | None
    offs: Tensor
    top_k: int

    def results(self) -> tuple[Tensor, Tensor]:
        groups = group_count(row_count(self.x, self.v), self.offs.shape[0] - 1)
        return groups_and_scales(self.x, groups, self.x.shape[1])


class QuantizeWeightFp8(NamedTuple):
    """Quantises a projection's weight in blocks of 128 x 128 into buffers, in either orientation.

    Gate and up become the first and the second half of the rows. Every element of the buffers is written.

    Args:
        q: (E, N', K') e4m3, where N' is 2 I' for a gated weight.
        s: (E, N' / 128, K' / 128) float32.
        q_t, s_t: (E, K', N') and (E, K' / 128, N' / 128): the same elements and scales, transposed; or None.
        w: (E, N, K) for layout ``nk``, (E, K, N) for ``kn``, in a floating dtype but float64, any strides.
        w3: the up projection, shaped as w, for glu ``split``.
        glu: how gate and up lie in w, as in `FfnSpec`; ``none`` for the second projection.
    """

    q: Tensor
    s: Tensor
    q_t: Tensor | None
    s_t: Tensor | None
    w: Tensor
    w3: Tensor | None
    layout: str
    glu: str
