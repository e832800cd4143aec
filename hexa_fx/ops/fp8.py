"""The operators of FP8 block compute: what `hexa::moe_ffn_fp8` is made of, one grouped kernel each.

Those that quantise are in `hexa_fx.ops.fp8_quantizing`.

Elements are e4m3, scales float32, as `hexa_fx.formats.fp8_scaling` says. T tokens, k experts per token, n = T*k rows in expert
order, E experts, D model size, I intermediate size. D', I', C' and so on are those sizes, rounded up to multiples of 128; H' is the
width of the pre-activation h, I' or, gated, 2 I': first the gate's I' columns, then up's, however the parameters store them.

What kernels may assume of operands: quantised ones and their scales are contiguous unless said otherwise, their widths are
multiples of 128, and the columns past the real size are zeros, or meet zeros in the other operand. Products accumulate in float32,
and what 128 of the summed dimension add up to is scaled and added in float32. Rows at and after ``offs[E]`` have no
expert: what results hold there is unspecified, and nothing reads it.

An operator's operands are a frozen record with the fields of its schema in order, which also makes the operator's results, empty.
Those that are not wanted have size 0 in their first dimension. Checks are in `hexa_fx.ops.fp8_checks`, kernels in
`hexa_fx.ops.fp8_reference` and `hexa_fx.cuda.fp8`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK, group_count
from hexa_fx.ir import Glu
from hexa_fx.ops import library
from hexa_fx.ops.fp8_quantizing import groups_and_scales, rows_and_scales

library.define(
    "esmm_act_fp8(Tensor x, Tensor xs, Tensor w, Tensor ws, Tensor? bias, Tensor v, Tensor offs, SymInt top_k, str activation, "
    "bool gated, float[] params, bool keep_h) -> (Tensor h, Tensor hs, Tensor a, Tensor a_scales)"
)
library.define("esmm_fp8(Tensor x, Tensor xs, Tensor w, Tensor ws, Tensor? bias, Tensor offs) -> (Tensor y, Tensor ys)")
library.define(
    "combine_fp8(Tensor y, Tensor ys, Tensor? top_k_weights, Tensor inv, Tensor offs, SymInt top_k, SymInt columns, "
    "ScalarType dtype) -> Tensor"
)
library.define(
    "esmm_act_backward_fp8(Tensor dy, Tensor dys, Tensor w, Tensor ws, Tensor h, Tensor hs, Tensor? top_k_weights, Tensor v, "
    "Tensor offs, SymInt top_k, str activation, bool gated, float[] params, bool[] needs) "
    "-> (Tensor dh, Tensor dhs, Tensor dh_t, Tensor dhs_t, Tensor a_t, Tensor at_scales, Tensor dots)"
)
library.define(
    "estmm_fp8(Tensor(a!) out, Tensor x, Tensor xs, Tensor g, Tensor gs, Tensor offs, bool shared, bool add) -> ()"
)
library.define("ess_fp8(Tensor g, Tensor gs, Tensor offs) -> Tensor")


def glu_of(gated: bool) -> Glu:
    """How gate and up lie in h."""
    return "concat" if gated else "none"


class EsmmActFp8(NamedTuple):
    """``h[p] = x[v[p] // top_k] @ W[e(p)]^T + bias[e(p)]`` and ``a = act(h)``, both quantised from float32 in blocks of 1 x 128.

    Args:
        x, xs: (T, D') e4m3 and (T, D' / 128), of `QuantizeRowsFp8`.
        w, ws: (E, H', D') e4m3 and (E, H' / 128, D' / 128), of `QuantizeWeightFp8`.
        bias: (E, H') float32, or None.
        v, offs: of `reindex`.
        activation, params: as in `activate`; gated: as for glu ``concat``.
        keep_h: whether h is wanted.

    Results:
        h, hs: (n, H') e4m3 and (n, H' / 128).
        a, a_scales: (n, I') e4m3 and (n, I' / 128).
    """

    x: Tensor
    xs: Tensor
    w: Tensor
    ws: Tensor
    bias: Tensor | None
    v: Tensor
    offs: Tensor
    top_k: int
    activation: str
    gated: bool
    params: tuple[float, ...]
    keep_h: bool

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n, width = self.v.shape[0], self.w.shape[1]
        h, hs = rows_and_scales(self.x, n if self.keep_h else 0, width)
        return h, hs, *rows_and_scales(self.x, n, width // 2 if self.gated else width)


class EsmmFp8(NamedTuple):
    """``y[p] = x[p] @ W[e(p)]^T + bias[e(p)]``: the second projection, and the first one's gradient of x, for `CombineFp8`.

    Args:
        x, xs: (n, K') e4m3 in expert order and (n, K' / 128).
        w, ws: (E, N', K') e4m3 and (E, N' / 128, K' / 128).
        bias: (E, N') float32, or None.

    Results:
        y, ys: (n, N') uint8 and (n, N' / 128) float32, of `hexa_fx.formats.fp8_scaling.rows_as_bytes`.
    """

    x: Tensor
    xs: Tensor
    w: Tensor
    ws: Tensor
    bias: Tensor | None
    offs: Tensor

    def results(self) -> tuple[Tensor, Tensor]:
        n, width = self.x.shape[0], self.w.shape[1]
        return self.x.new_empty((n, width), dtype=torch.uint8), self.ws.new_empty((n, width // BLOCK))


class CombineFp8(NamedTuple):
    """`combine` of the rows of `EsmmFp8`, added up in float32.

    Args:
        y, ys: of `EsmmFp8`.
        top_k_weights, inv, offs, top_k: as in `combine`.
        columns: D, the first columns that are wanted.
        dtype: of the result.

    Results:
        out: (T, D).
    """

    y: Tensor
    ys: Tensor
    top_k_weights: Tensor | None
    inv: Tensor
    offs: Tensor
    top_k: int
    columns: int
    dtype: torch.dtype

    def results(self) -> Tensor:
        return self.y.new_empty((self.inv.shape[0] // self.top_k, self.columns), dtype=self.dtype)


class EsmmActBackwardFp8(NamedTuple):
    """``da[p] = dy[v[p] // top_k] @ W[e(p)]^T``, and from it and h, in float32, all that gradients are made of.

    With w(p) the routing weight of slot ``v[p]``: ``dh = act'(h) (w(p) da)`` and ``a_s = w(p) act(h)``. All are quantised from
    float32.

    Args:
        dy, dys: (T, D') e4m3 and (T, D' / 128).
        w, ws: the second projection transposed, (E, I', D') e4m3 and (E, I' / 128, D' / 128).
        h, hs: of `EsmmActFp8`.
        top_k_weights: (T, k) in any floating dtype, contiguous; or None, which means 1.
        v, offs: of `reindex`.
        activation, gated, params: as for `EsmmActFp8`.
        needs: whether dh, dh_t, a_t and dots are wanted.

    Results:
        dh, dhs: (n, H') e4m3 and (n, H' / 128), in blocks of 1 x 128.
        dh_t, dhs_t: (G, H', 128) e4m3 and (G, H'): dh as `QuantizeColumnsFp8` lays rows out.
        a_t, at_scales: (G, I', 128) e4m3 and (G, I'): a_s, likewise, of which 128 columns share a scale.
        dots: (n, I' / 128) float32, whose sum over a row is ``<da[p], act(h[p])>``, the routing weight's gradient.
    """

    dy: Tensor
    dys: Tensor
    w: Tensor
    ws: Tensor
    h: Tensor
    hs: Tensor
    top_k_weights: Tensor | None
    v: Tensor
    offs: Tensor
    top_k: int
    activation: str
    gated: bool
    params: tuple[float, ...]
    needs: tuple[bool, bool, bool, bool]

    def results(self) -> tuple[Tensor, ...]:
        n, width, inner = self.v.shape[0], self.h.shape[1], self.w.shape[1]
        groups = group_count(n, self.offs.shape[0] - 1)
        rows, columns, activations, dots = self.needs
        return (
            *rows_and_scales(self.h, n if rows else 0, width),
            *groups_and_scales(self.h, groups if columns else 0, width),
            *groups_and_scales(self.h, groups if activations else 0, inner),
            self.h.new_empty((n if dots else 0, inner // BLOCK), dtype=torch.float32),
        )


class EstmmFp8(NamedTuple):
    """``out[e] = sum over the expert's rows of x[p]^T g[p]``: a weight's gradient. Zero for an expert without rows.

    Args:
        out: (E, A, B) in bfloat16, float16 or float32, any strides: rounded once. The first A and B columns of x and g count.
            One of the last two strides is 1, unless gate and up alternate in the last dimension.
        x, xs: (G, A', 128) e4m3 and (G, A'), as `QuantizeColumnsFp8` lays rows out. A part of the columns of such a tensor will
            do: strides of the first dimension are free.
        g, gs: (G, B', 128) and (G, B'), likewise.
        offs: (E+1,) int32, which says where an expert's groups lie.
        shared: 128 columns of g share a scale in each group.
        add: add to out, which is float32 then.
    """

    out: Tensor
    x: Tensor
    xs: Tensor
    g: Tensor
    gs: Tensor
    offs: Tensor
    shared: bool
    add: bool


class EssFp8(NamedTuple):
    """Sums over every expert's rows: the gradient of a bias.

    Args:
        g, gs: (G, C', 128) e4m3 and (G, C'), as `QuantizeColumnsFp8` lays rows out.

    Results:
        y: (E, C') float32, zero for an expert without rows.
    """

    g: Tensor
    gs: Tensor
    offs: Tensor

    def results(self) -> Tensor:
        return self.gs.new_empty((self.offs.shape[0] - 1, self.g.shape[1]))
