"""The table of the operators of FP8 block compute: what `hexa::moe_ffn_fp8` is made of, one grouped kernel each, and the layer.

Elements are e4m3, scales float32, as `hexa_fx.formats.fp8_scaling` says. T tokens, k experts per token, n = T*k rows in expert
order, E experts, D model size, I intermediate size. D', I', C' and so on are those sizes, rounded up to multiples of 128; H' is the
width of the pre-activation h, I' or, gated, 2 I': first the gate's I' columns, then up's, however the parameters store them.
G = n // 128 + min(E, n) groups of 128 rows of an expert.

What kernels may assume of operands: quantised ones and their scales are contiguous unless said otherwise, their widths are
multiples of 128, and the columns past the real size are zeros, or meet zeros in the other operand. Products accumulate in float32,
and what 128 of the summed dimension add up to is scaled and added in float32. Rows at and after ``offs[E]`` have no
expert: what results hold there is unspecified, and nothing reads it. Results that are not wanted have no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count, padded
from hexa_fx.ir import Glu, Layout
from hexa_fx.ops.activations import check_activation
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import FLOATING, Derived, Form, Operands, exactly, index, numbers, shape
from hexa_fx.ops.rows import columns_of, flip, row_count
from hexa_fx.ops.table import Offs, TopK, V, routing_of
from hexa_fx.ops.table_layers import OPERANDS, Backward, Layer, MoeFfn, Static, Weights, gradients_of

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)
_SLOTS: TypeAlias = Annotated[Tensor, index("n")]
_BY_SLOT: TypeAlias = Annotated[Tensor | None, numbers("n", flat=True)]


def elements(dims: str, by: str = "", written: bool = False) -> Form:
    return exactly(ELEMENT, dims, by, written)


def scales(dims: str, by: str = "", written: bool = False) -> Form:
    return exactly(torch.float32, dims, by, written)


def glu_of(gated: bool) -> Glu:
    """How gate and up lie in h."""
    return "concat" if gated else "none"


def rows_and_scales(like: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Empty elements (rows, width) and scales (rows, width / 128)."""
    return like.new_empty((rows, width), dtype=ELEMENT), like.new_empty((rows, width // BLOCK), dtype=torch.float32)


def groups_and_scales(like: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Empty elements (groups, width, 128) and scales (groups, width)."""
    return like.new_empty((groups, width, BLOCK), dtype=ELEMENT), like.new_empty((groups, width), dtype=torch.float32)


def is_whole(w1: Tensor, w2: Tensor, glu: str, layout1: str, layout2: str) -> bool:
    """Whether weights in blocks of 128 x 128 lie as products read them."""
    halves = {"none": 1, "concat": 2}.get(glu, 0)
    sizes = (*w1.shape[1:], *w2.shape[1:])
    blocks = halves and not any(size % BLOCK for size in sizes) and w1.shape[1] % (halves * BLOCK) == 0
    return bool(blocks) and (layout1, layout2) == ("nk", "nk")


def scale_faults(q: Tensor, s: Tensor | None) -> str:
    """Whether scales are those of a quantised weight (E, N, K)."""
    expected = (q.shape[0], q.shape[1] // BLOCK, q.shape[2] // BLOCK)
    fits = s is None or (s.dtype == torch.float32 and tuple(s.shape) == expected)
    return "" if s is None or fits else f"scales are {shape(s)}; expected torch.float32 {expected}"


class Grouped(Operands):
    v: V
    offs: Offs
    top_k: TopK

    def groups(self, x: Tensor) -> int:
        """G."""
        return group_count(row_count(x, self.v), self.offs.shape[0] - 1)


class QuantizedRows(Operands):
    x: Annotated[Tensor, elements("n C", by="v")]
    xs: Annotated[Tensor, scales("n C/128", by="v")]


class _QuantizedWeight(Operands):
    w: Annotated[Tensor, elements("E N C")]
    ws: Annotated[Tensor, scales("E N/128 C/128")]


class _Bias(Operands):
    bias: Annotated[Tensor | None, exactly(torch.float32, "E N")]


class _GatheredSlots(Operands):
    v: _SLOTS
    offs: Offs
    top_k: TopK
    activation: str
    gated: bool
    params: Sequence[float]

    def faults(self) -> str:
        check_activation(self.activation, glu_of(self.gated), self.params)
        return ""


@operator("esmm_act_fp8")
class EsmmActFp8(_GatheredSlots, _Bias, _QuantizedWeight, QuantizedRows):
    """``h[p] = x[v[p] // top_k] @ W[e(p)]^T + bias[e(p)]`` and ``a = act(h)``, both quantised from float32 in blocks of 1 x 128.

    Args:
        gated: as for glu ``concat``.
        keep_h: whether h is wanted.

    Results:
        h, hs: (n, H') e4m3 and (n, H' / 128).
        a, a_scales: (n, I') e4m3 and (n, I' / 128).
    """

    keep_h: bool
    returns = "(Tensor h, Tensor hs, Tensor a, Tensor a_scales)"

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n, width = self.v.shape[0], self.w.shape[1]
        h, hs = rows_and_scales(self.x, n if self.keep_h else 0, width)
        return h, hs, *rows_and_scales(self.x, n, width // 2 if self.gated else width)


class _OwnRows(Operands):
    x: Annotated[Tensor, elements("n C")]
    xs: Annotated[Tensor, scales("n C/128")]


@operator("esmm_fp8")
class EsmmFp8(_Bias, _QuantizedWeight, _OwnRows):
    """``y[p] = x[p] @ W[e(p)]^T + bias[e(p)]``: the second projection, and the first one's gradient of x, for `CombineFp8`.

    Results:
        y, ys: (n, N') uint8 and (n, N' / 128) float32, of `hexa_fx.formats.fp8_scaling.rows_as_bytes`.
    """

    offs: Offs
    returns = "(Tensor y, Tensor ys)"

    def results(self) -> tuple[Tensor, Tensor]:
        n, width = self.x.shape[0], self.w.shape[1]
        return self.x.new_empty((n, width), dtype=torch.uint8), self.ws.new_empty((n, width // BLOCK))


@operator("combine_fp8")
class CombineFp8(Operands):
    """`combine` of the rows of `EsmmFp8`, added up in float32. ``columns``: D, the first columns that are wanted. Gives (T, D)."""

    y: Annotated[Tensor, exactly(torch.uint8, "n .padded")]
    ys: Annotated[Tensor, scales("n .padded/128")]
    top_k_weights: _BY_SLOT
    inv: _SLOTS
    offs: Offs
    top_k: TopK
    columns: int
    dtype: torch.dtype

    padded = Derived(lambda o: padded(o.columns))
    """D'."""

    def results(self) -> Tensor:
        return self.y.new_empty((self.inv.shape[0] // self.top_k, self.columns), dtype=self.dtype)


class _GradientRows(Operands):
    dy: Annotated[Tensor, elements("n C", by="v")]
    dys: Annotated[Tensor, scales("n C/128", by="v")]


class _Kept(Operands):
    h: Annotated[Tensor, elements("n .width")]
    hs: Annotated[Tensor, scales("n .width/128")]
    top_k_weights: _BY_SLOT


@operator("esmm_act_backward_fp8")
class EsmmActBackwardFp8(_GatheredSlots, _Kept, _QuantizedWeight, _GradientRows):
    """``da[p] = dy[v[p] // top_k] @ W[e(p)]^T``, and from it and h, in float32, all that gradients are made of.

    With w(p) the routing weight of slot ``v[p]``: ``dh = act'(h) (w(p) da)`` and ``a_s = w(p) act(h)``. All are quantised from
    float32.

    Args:
        w, ws: the second projection transposed.
        h, hs: of `EsmmActFp8`.
        top_k_weights: contiguous; or None, which means 1.
        needs: whether dh, dh_t, a_t and dots are wanted.

    Results:
        dh, dhs: (n, H') e4m3 and (n, H' / 128), in blocks of 1 x 128.
        dh_t, dhs_t: (G, H', 128) e4m3 and (G, H'): dh as `QuantizeColumnsFp8` lays rows out.
        a_t, at_scales: (G, I', 128) e4m3 and (G, I'): a_s, likewise, of which 128 columns share a scale.
        dots: (n, I' / 128) float32, whose sum over a row is ``<da[p], act(h[p])>``, the routing weight's gradient. Zero in rows
            that have no expert.
    """

    needs: Sequence[bool]
    returns = "(Tensor dh, Tensor dhs, Tensor dh_t, Tensor dhs_t, Tensor a_t, Tensor at_scales, Tensor dots)"

    width = Derived(lambda o: o.w.shape[1] * (2 if o.gated else 1))
    """H'."""

    def faults(self) -> str:
        return super().faults() or ("" if len(self.needs) == 4 else f"needs has {len(self.needs)} of 4 marks")

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


@operator("estmm_fp8")
class EstmmFp8(Operands):
    """``out[e] = sum over the expert's rows of x[p]^T g[p]``: a weight's gradient. Zero for an expert without rows.

    Args:
        out: (E, A, B), any strides: rounded once. The first A and B columns of x and g count. One of the last two strides is 1,
            unless gate and up alternate in the last dimension.
        x, xs: as `QuantizeColumnsFp8` lays rows out. A part of the columns will do: strides of the first dimension are free.
        g, gs: likewise.
        offs: which says where an expert's groups lie.
        shared: 128 columns of g share a scale in each group.
        add: add to out, which is float32 then.
    """

    out: Annotated[Tensor, Form("E * *", QUANTIZABLE, "of 16 or 32 bits ", written=True)]
    x: Annotated[Tensor, elements("G A 128")]
    xs: Annotated[Tensor, scales("G A")]
    g: Annotated[Tensor, elements("G B 128")]
    gs: Annotated[Tensor, scales("G B")]
    offs: Offs
    shared: bool
    add: bool
    returns = "()"

    def faults(self) -> str:
        if tuple(map(padded, self.out.shape[1:])) != (self.x.shape[1], self.g.shape[1]):
            return f"{shape(self.out)} is no product of {shape(self.x)} and {shape(self.g)}"
        added = self.add and self.out.dtype != torch.float32
        return f"out is {self.out.dtype}; sums are added in torch.float32" if added else ""


@operator("ess_fp8")
class EssFp8(Operands):
    """Sums over every expert's rows, the gradient of a bias, (E, C') float32. g lies as `QuantizeColumnsFp8` lays rows out."""

    g: Annotated[Tensor, elements("G C 128")]
    gs: Annotated[Tensor, scales("G C")]
    offs: Offs

    def results(self) -> Tensor:
        return self.gs.new_empty((self.offs.shape[0] - 1, self.g.shape[1]))


def _quantizable(dims: str, by: str = "") -> Form:
    return Form(dims, QUANTIZABLE, "of 16 or 32 bits ", by=by)


def weight_sizes(w: Any, layout: str, glu: str) -> tuple[int, int, int]:
    """E, and the rows and columns of what `quantize_weight_fp8` makes of a weight."""
    n, k = columns_of(w, layout), columns_of(w, flip(layout))
    if glu == "none":
        return w.shape[0], padded(n), padded(k)
    return w.shape[0], 2 * padded(n if glu == "split" else n // 2), padded(k)


@operator("quantize_rows_fp8")
class QuantizeRowsFp8(Operands):
    """Rows in blocks of 1 x 128.

    Args:
        x: any strides.
        binary: scales are powers of two, as `GroupRowsFp8` asks for.

    Results:
        q: (R, C') e4m3.
        s: (R, C' / 128) float32.
    """

    x: Annotated[Tensor, _quantizable("R C")]
    binary: bool
    returns = "(Tensor q, Tensor s)"

    def results(self) -> tuple[Tensor, Tensor]:
        return rows_and_scales(self.x, self.x.shape[0], padded(self.x.shape[1]))


@operator("quantize_columns_fp8")
class QuantizeColumnsFp8(Grouped, leading=True):
    """Rows gathered into expert order and transposed in groups of 128 rows, each column of a group with its scale.

    Results:
        q: (G, C', 128) e4m3. ``q[F(e) + j, c, r]`` is of row ``offs[e] + 128 j + r`` and column c, where F(e) is the sum of
            ``ceil(rows / 128)`` over the experts before e; zero where the expert has no such row.
        s: (G, C') float32, of the 128 rows of a group in a column.
    """

    x: Annotated[Tensor, _quantizable("n C", by="v")]
    returns = "(Tensor q, Tensor s)"

    def results(self) -> tuple[Tensor, Tensor]:
        return groups_and_scales(self.x, self.groups(self.x), padded(self.x.shape[1]))


@operator("group_rows_fp8")
class GroupRowsFp8(Grouped, QuantizedRows):
    """Quantised rows as `QuantizeColumnsFp8` lays rows out, of whose columns 128 share a scale in a group.

    It is the largest of the 128 rows' scales. All are powers of two (`QuantizeRowsFp8` with ``binary``), so that elements stay the
    numbers that they are but for those that become denormal; as activations in section 3.3.3 of the DeepSeek-V3 report
    (arXiv 2412.19437).

    Results:
        q: (G, C', 128) e4m3.
        s: (G, C').
    """

    returns = "(Tensor q, Tensor s)"

    def results(self) -> tuple[Tensor, Tensor]:
        return groups_and_scales(self.x, self.groups(self.x), self.x.shape[1])


@operator("quantize_weight_fp8")
class QuantizeWeightFp8(Operands):
    """Quantises a projection's weight in blocks of 128 x 128 into buffers, in either orientation.

    Gate and up become the first and the second half of the rows. Every element of the buffers is written.

    Args:
        q, s: of N' rows, where N' is 2 I' for a gated weight, and K' columns.
        q_t, s_t: the same elements and scales, transposed; or None.
        w: (E, N, K) for layout ``nk``, (E, K, N) for ``kn``, any strides.
        w3: the up projection, shaped as w, for glu ``split``.
        glu: how gate and up lie in w, as in `FfnSpec`; ``none`` for the second projection.
    """

    q: Annotated[Tensor, elements("E R C", written=True)]
    s: Annotated[Tensor, scales("E R/128 C/128", written=True)]
    q_t: Annotated[Tensor | None, elements("E C R", written=True)]
    s_t: Annotated[Tensor | None, scales("E C/128 R/128", written=True)]
    w: Annotated[Tensor, _quantizable("E P Q")]
    w3: Annotated[Tensor | None, _quantizable("E P Q")]
    layout: Layout
    glu: Glu
    returns = "()"

    def faults(self) -> str:
        if (self.w3 is not None) != (self.glu == "split") or (self.w3 is not None and self.w3.dtype != self.w.dtype):
            return f"w3 is {None if self.w3 is None else shape(self.w3)}; only 'split' has one, like w"
        expected = weight_sizes(self.w, self.layout, self.glu)
        return "" if tuple(self.q.shape) == expected else f"q is {shape(self.q)}; expected {expected}"


class _Cached(Operands):
    cached: bool


@operator("moe_ffn_fp8_forward")
class MoeFfnFp8Forward(_Cached, MoeFfn):
    """`MoeFfn` whose products multiply e4m3 with block scales: y and what backward needs. All dtypes are floating, in any mixture.

    Args:
        cached: whether quantised weights are kept; not where other weights take turns in the same memory.
    """

    mixed = (*FLOATING, ELEMENT)
    returns = "(Tensor y, Tensor xq, Tensor xs, Tensor h, Tensor hs, Tensor v, Tensor inv, Tensor offs)"

    def results(self) -> tuple[Tensor, ...]:
        x = rows_and_scales(self.x, self.x.shape[0], padded(self.input_size))
        halves = 1 if self.glu == "none" else 2
        h = rows_and_scales(self.x, 0 if self.recompute_h else self.rows, padded(self.inner) * halves)
        return MoeFfn.results(self), *x, *h, *routing_of(self.top_k_index, self.experts)


@operator("moe_ffn_fp8", autocast=True)
class MoeFfnFp8(MoeFfnFp8Forward):
    """The same without gradients, or differentiable.

    Args:
        s1, s2: scales of w1 and w2, which are quantised already, and frozen: (E, H', D') and (E, D', I') e4m3 as
            `quantize_weight_fp8` makes them. Nothing in such a call needs a gradient.
    """

    s1: Tensor | None
    s2: Tensor | None
    returns = "Tensor"
    defaults: ClassVar[dict[str, object]] = {"s1": None, "s2": None}

    def faults(self) -> str:
        quantised = [w is not None and w.dtype == ELEMENT for w in (self.x, self.w1, self.w3, self.w2)]
        if quantised != [False, self.s1 is not None, False, self.s2 is not None] or quantised[1] != quantised[3]:
            return "w1 and w2 are quantised, and have scales, or neither is"
        if quantised[1] and not is_whole(self.w1, self.w2, self.glu, self.layout1, self.layout2):
            return "quantised weights have layout nk, whole blocks, and gate and up as halves if any"
        return super().faults() or scale_faults(self.w1, self.s1) or scale_faults(self.w2, self.s2)

    def results(self) -> Any:
        return MoeFfn.results(self)


class _SavedInFp8(Operands):
    dy: Tensor
    xq: Tensor | None
    xs: Tensor | None
    h: Tensor | None
    hs: Tensor | None
    v: Tensor
    inv: Tensor
    offs: Tensor


@operator("moe_ffn_fp8_backward", differentiable=False)
class MoeFfnFp8Backward(Backward, _Cached, Static, Weights, _SavedInFp8, Layer):
    """Of `MoeFfnFp8`, from dy and what forward kept."""

    top_k: int
    needs: Sequence[bool]

    def results(self) -> list[Tensor]:
        return gradients_of(self, OPERANDS)


class Replaced(NamedTuple):
    """What is left of a weight whose quantised copy is read in its place."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Any) -> Replaced | None:
        return None if weight is None else cls(weight.shape, weight.dtype)

    def element_size(self) -> int:
        """Bytes of an element of the rows that its copy multiplies."""
        return ELEMENT.itemsize


class QuantizedFfn(MoeFfnFp8Forward):
    """What forward of `MoeFfnFp8` computes on: weights are `Replaced`, biases no lists.

    Args:
        q1, s1, q2, s2: the first projection, gate and up in one, and the second: `quantize_weight_fp8`'s q and s.
    """

    q1: Tensor
    s1: Tensor
    q2: Tensor
    s2: Tensor


class QuantizedFfnBackward(MoeFfnFp8Backward):
    """What backward of `MoeFfnFp8` computes on, likewise.

    Args:
        q1, s1: the first projection, where h is computed again.
        q1_t, s1_t: the same transposed, where x needs a gradient.
        q2_t, s2_t: the second projection transposed.
    """

    q1: Tensor | None
    s1: Tensor | None
    q1_t: Tensor | None
    s1_t: Tensor | None
    q2_t: Tensor
    s2_t: Tensor
