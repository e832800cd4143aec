"""The table of operators on rows: what each is given, what comes out, and what must hold; gradients at its end.

`table_variants` has those with low-rank additions and packed weights, `table_layers` whole layers, and `table_fp8` the operators of
FP8 block compute.

T tokens, k slots a token, n rows in expert order (T k with sentinels), E experts; K and N are columns of rows and of their product,
I those of an activation, r a few. An operand ``gathered by`` an index has a row a token, of which row p is ``x[v[p] // top_k]``;
without the index its rows are in expert order. A weight lies as its ``layout`` says: ``nk`` (E, N, K), ``kn`` (E, K, N).

Sums accumulate in float32 (float64 for float64), results have the operands' dtype, and rows at and after ``offs[E]``, which no
expert has, are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from hexa_fx.ir import Glu, Layout
from hexa_fx.ops.activations import check_activation, inner_width
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import FLOATING, Count, Derived, Operands, added_to, floating, index, integers, numbers, shape
from hexa_fx.ops.rows import columns_of, row_count

V: TypeAlias = Annotated[Tensor | None, index("n")]
Offs: TypeAlias = Annotated[Tensor, index("E+1")]
TopK: TypeAlias = Count
Rows: TypeAlias = Annotated[Tensor, floating("n K", by="v")]
Weight: TypeAlias = Annotated[Tensor, floating("E N K", layout="layout")]
Bias: TypeAlias = Annotated[Tensor | None, floating("E N")]
BySlot: TypeAlias = Annotated[Tensor | None, numbers("n", flat=True)]
Params: TypeAlias = Sequence[float]


@operator("reindex")
class Reindex(Operands):
    """The routed rows sorted by expert, stable; sentinels last (paper, Algorithm 1).

    Args:
        top_k_index: expert of every slot ``t*k + s``. Any other number than 0 to E-1, such as E or -1, is a sentinel: that slot
            contributes nothing. With HEXA_FX_CHECKED=1 one below 0 or above E is refused.
        num_experts: E.

    Returns:
        v: (n,) int32, slot of every row.
        inv: (n,) int32, row of every slot.
        offs: (E+1,) int32, rows of expert e are ``offs[e] .. offs[e+1]``.
    """

    top_k_index: Annotated[Tensor, integers("T k")]
    num_experts: Count
    returns = "(Tensor v, Tensor inv, Tensor offs)"

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return routing_of(self.top_k_index, self.num_experts)


def routing_of(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """v, inv and offs, empty."""
    n = top_k_index.shape[0] * top_k_index.shape[1]
    v, inv, offs = (top_k_index.new_empty((size,), dtype=torch.int32) for size in (n, n, experts + 1))
    return v, inv, offs


class XRows(Operands):
    x: Rows

    rows = Derived(lambda o: row_count(o.x, o.v))
    """n."""


class OfExperts(Operands):
    """What sums over the rows of each expert."""

    experts = Derived(lambda o: o.offs.shape[0] - 1)
    """E."""


class _Weight(Operands):
    weight: Weight


class RowsOfProduct(Operands):
    bias: Bias
    v: V
    offs: Offs
    top_k: TopK
    layout: Layout

    columns = Derived(lambda o: columns_of(o.weight, o.layout))
    """N."""


@operator("esmm", autocast=True)
class Esmm(RowsOfProduct, _Weight, XRows):
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]`` for every row p in expert order (paper, Algorithm 2). Returns (n, N)."""

    @property
    def plain(self) -> EsmmAct:
        """The same as a product whose activation does nothing."""
        return self.to(EsmmAct, w1=self.weight, b1=self.bias, activation="none", glu="none", params=(), keep_h=True)

    def results(self) -> Tensor:
        return self.x.new_empty((self.rows, self.columns))


class Activated(Operands):
    """What an activation is told: a name of `ACTIVATIONS`, how gate and up lie in h, constants (none: the activation's own)."""

    activation: str
    glu: Glu
    params: Params

    def faults(self) -> str:
        check_activation(self.activation, self.glu, self.params)
        return ""


class _FirstProjection(XRows):
    w1: Weight
    b1: Bias
    w3: Annotated[Tensor | None, floating("E N K", layout="layout")]
    b3: Bias
    v: V
    offs: Offs
    top_k: TopK
    layout: Layout


@operator("esmm_act", autocast=True)
class EsmmAct(Activated, _FirstProjection):
    """``h = esmm(x, W1, b1)`` and ``a = act(h)`` in one operator.

    Args:
        w1: N = I, or 2I for glu ``concat`` and ``interleaved``.
        w3, b3: the up projection, for glu ``split``.
        keep_h: False returns h with zero rows, where nothing will need it (inference).

    Returns:
        h: (n, I), or (n, 2I) for a gated expert: gate and up in the order of the weight, gate then up for ``split``.
        a: (n, I).
    """

    keep_h: bool
    returns = "(Tensor h, Tensor a)"
    defaults: ClassVar[dict[str, object]] = {"keep_h": True}

    width = Derived(lambda o: width_of(o.w1, o.layout, o.glu))
    """Columns of h."""
    inner = Derived(lambda o: inner_width(columns_of(o.w1, o.layout), o.glu))
    """Columns of a, and of one half of a gated h."""

    def faults(self) -> str:
        return super().faults() or gate_and_up_faults(self, self.layout)

    def results(self) -> tuple[Tensor, Tensor]:
        h = self.x.new_empty((self.rows if self.keep_h else 0, self.width))
        return h, self.x.new_empty((self.rows, self.inner))


def width_of(w1: Tensor, layout: str, glu: str) -> int:
    """Columns of a pre-activation."""
    return columns_of(w1, layout) * (2 if glu == "split" else 1)


def gate_and_up_faults(o: Any, layout: str) -> str:
    """Whether w1, w3 and b3 of a first projection go with its glu."""
    if (o.w3 is None) == (o.glu == "split"):
        said = "missing; glu is" if o.w3 is None else "given; it belongs to glu"
        return f"w3 is {said} 'split', and glu is {o.glu!r}"
    if o.b3 is not None and o.w3 is None:
        return f"b3 is given; it belongs to glu 'split', not to {o.glu!r}"
    odd = o.glu in ("concat", "interleaved") and columns_of(o.w1, layout) % 2
    return f"w1 is {shape(o.w1)}: gate and up need an even width" if odd else ""


class DyRows(Operands):
    dy: Annotated[Tensor, floating("n K", by="v")]


class RowsOfH(Operands):
    h: Annotated[Tensor, floating("n .width")]
    top_k_weights: BySlot
    v: Annotated[Tensor, index("n")]
    offs: Offs
    top_k: TopK
    layout: Layout


@operator("esmm_act_backward", differentiable=False)
class EsmmActBackward(Activated, RowsOfH, _Weight, DyRows):
    """``activate_backward(esmm(dy, weight, None, v, offs, top_k, layout), h, ...)``; the gradient of a is not stored.

    Args:
        dy: gradient of the layer's output.
        weight: the second projection as the product reads it: ``layout`` is the opposite of its forward one.
        h: pre-activation.
        top_k_weights: (T, k), or None, which means 1.
    """

    returns = "(Tensor dh, Tensor a_scaled, Tensor dweights)"

    inner = Derived(lambda o: columns_of(o.weight, o.layout))
    """Columns of a."""
    width = Derived(lambda o: o.inner if o.glu == "none" else 2 * o.inner)
    """Columns of h."""

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return activation_gradients(self.h, self.inner, self.top_k_weights)


def activation_gradients(h: Tensor, inner: int, gates: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dh, a_scaled and dweights, empty."""
    dweights = h.new_empty((0,)) if gates is None else gates.new_empty(gates.shape)
    return h.new_empty(h.shape), h.new_empty((h.shape[0], inner)), dweights


@operator("activate")
class Activate(Activated, leading=True):
    """``a = act(h)`` row by row, computed in float32 (float64 for float64). h is (n, I), or gated (n, 2I). Returns (n, I)."""

    h: Annotated[Tensor, floating("n H")]

    def faults(self) -> str:
        odd = self.glu != "none" and self.h.shape[1] % 2
        return super().faults() or (f"h is {shape(self.h)}: gate and up need an even width" if odd else "")

    def results(self) -> Tensor:
        n, width = self.h.shape
        return self.h.new_empty((n, width if self.glu == "none" else width // 2))


@operator("activate_backward", differentiable=False)
class ActivateBackward(Activated, leading=True):
    """Backward of the activation together with the routing weight's.

    Args:
        da: gradient of a before the routing weight is applied.
        h: the pre-activation, (n, I) or (n, 2I).
        top_k_weights: (T, k), or None, which means 1.
        v, offs: of `reindex`; needed with top_k_weights.

    Returns:
        dh: shaped as h, ``act'(h) (w da)``.
        a_scaled: (n, I), ``w act(h)``.
        dweights: shaped as top_k_weights and in its dtype, ``<da[p], a[p]>`` at slot ``v[p]``, zero at sentinel slots; shape (0,)
            without weights.
    """

    da: Annotated[Tensor, floating("n I")]
    h: Annotated[Tensor, floating("n .width")]
    top_k_weights: BySlot
    v: V
    offs: Annotated[Tensor | None, index("E+1")]
    returns = "(Tensor dh, Tensor a_scaled, Tensor dweights)"

    width = Derived(lambda o: o.da.shape[1] * (1 if o.glu == "none" else 2))
    """Columns of h."""

    def faults(self) -> str:
        lost = self.top_k_weights is not None and (self.v is None or self.offs is None)
        return super().faults() or ("top_k_weights needs v and offs" if lost else "")

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return activation_gradients(self.h, self.da.shape[1], self.top_k_weights)


@operator("combine")
class Combine(Operands):
    """``out[t] = sum over s of w[t, s] * y[inv[t*k + s]]``: gather and sum, in a fixed order, so deterministic.

    Args:
        top_k_weights: None means 1.
        inv: of `reindex`.
        offs: slots whose row is at or after ``offs[E]`` are skipped.

    Returns:
        (T, D) in y's dtype, summed in float32 (float64 for float64).
    """

    y: Annotated[Tensor, floating("n D")]
    top_k_weights: Annotated[Tensor | None, numbers(".tokens .top_k")]
    inv: Annotated[Tensor, index("n")]
    offs: Offs
    top_k: TopK

    tokens = Derived(lambda o: o.inv.shape[0] // o.top_k)
    """T."""

    def results(self) -> Tensor:
        return self.y.new_empty((self.tokens, self.y.shape[1]))


@operator("ess")
class Ess(Operands):
    """Sum of the rows of each expert: the gradient of its bias (paper, Algorithm 3).

    Args:
        scale: by slot: row p counts ``scale[v[p]]`` times. Needs v.

    Returns:
        (E, C); zero for an expert without rows.
    """

    g: Annotated[Tensor, floating("n C", by="v")]
    v: V
    offs: Offs
    top_k: TopK
    scale: BySlot

    def faults(self) -> str:
        return "scale is by slot, so it needs v" if self.scale is not None and self.v is None else ""

    def results(self) -> Any:
        return self.g.new_empty((self.offs.shape[0] - 1, self.g.shape[1]))


@operator("estmm", autocast=True)
class Estmm(OfExperts):
    """``dW[e]``, the sum of ``x[row]^T g[row]`` over the rows of expert e: a weight's gradient (paper, Algorithm 4).

    Args:
        layout: of the result, that of the weight.

    Returns:
        (E, N, K) for ``nk``, (E, K, N) for ``kn``, contiguous; zero for an expert without rows.
    """

    x: Annotated[Tensor, floating("n K", by="x_index")]
    g: Annotated[Tensor, floating("n N", by="g_index")]
    x_index: V
    g_index: V
    offs: Offs
    top_k: TopK
    layout: Layout

    rows = Derived(lambda o: row_count(o.x, o.x_index))
    """n."""

    def results(self) -> Any:
        n, k = self.g.shape[1], self.x.shape[1]
        return self.x.new_empty((self.experts, n, k) if self.layout == "nk" else (self.experts, k, n))


class _Esfk(OfExperts):
    x: Annotated[Tensor, floating("n K", by="x_index")]
    g: Annotated[Tensor, floating("n N")]
    weight: Weight
    x_index: V
    offs: Offs
    top_k: TopK
    layout: Layout


@operator("esfk", autocast=True, differentiable=False)
class Esfk(_Esfk):
    """The three gradients of ``y = esmm(x, W, b)`` from g = dy, in one launch (paper, "Fused Kernel in Backward").

    Args:
        has_bias: compute db.

    Returns:
        dx: (n, K) in expert order, not yet summed over slots.
        dW: shaped as weight, contiguous.
        db: (E, N), or shape (0,) without bias.
    """

    has_bias: bool
    returns = "(Tensor dx, Tensor dw, Tensor db)"

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        dx, db = (self.g.shape[0], self.x.shape[1]), (self.experts, self.g.shape[1]) if self.has_bias else (0,)
        return self.g.new_empty(dx), self.weight.new_empty(self.weight.shape), self.g.new_empty(db)


@operator("low_rank_gradients", autocast=True, differentiable=False)
class LowRankGradients(OfExperts):
    """``du[p] = rows[row(p)] @ F[e(p)]``, and ``dF[e] = scale * sum over its rows p of rows[row(p)]^T w_p u[p]``, of one reading.

    The gradients of ``y = u F^T``, F a factor of a few columns: `esfk` of such a weight, with rows that may be gathered, and with
    the factor's gradient as the factor is stored.

    Args:
        u: rows in expert order, of r few columns.
        factor: F, (E, N, r) for layout ``kn``, (E, r, N) for ``nk``; None where du is not wanted.
        top_k_weights: w by slot, (T, k), that u's rows are multiplied by, and rounded; None for 1. Goes with v.
        layout: of the factor and its gradient.
        dtype: of the gradient.
        scale: what the gradient is multiplied by.
        experts_last: the gradient of layout ``kn`` lies as (N, r, E), which is how PEFT stores some factors.

    Returns:
        du: (n, r). Shape (0,) without a factor.
        dF: as its layout says, or (N, r, E); contiguous.
    """

    rows: Annotated[Tensor, floating("n N", by="v")]
    u: Annotated[Tensor, floating("n r")]
    factor: Annotated[Tensor | None, floating("E r N", layout="layout")]
    top_k_weights: BySlot
    v: V
    offs: Offs
    top_k: TopK
    layout: Layout
    dtype: torch.dtype
    scale: float
    experts_last: bool
    returns = "(Tensor du, Tensor dfactor)"

    def faults(self) -> str:
        if self.top_k_weights is not None and self.v is None:
            return "top_k_weights are by slot, so they need v"
        if self.dtype in FLOATING and (self.layout == "kn" or not self.experts_last):
            return ""
        return f"a gradient {self.layout} of {self.dtype}; expected one of {FLOATING}, and kn to have experts last"

    def results(self) -> tuple[Tensor, Tensor]:
        experts, columns, rank = self.experts, self.rows.shape[1], self.u.shape[1]
        matrix = (columns, rank) if self.layout == "kn" else (rank, columns)
        du = self.u.new_empty((0,) if self.factor is None else self.u.shape)
        shape = (*matrix, experts) if self.experts_last else (experts, *matrix)
        return du, self.rows.new_empty(shape, dtype=self.dtype)


class _Adding(Operands):
    """Adds to buffers in the accumulators' type, any strides; the part of an expert without rows stays as it is. No gradient."""

    def faults(self) -> str:
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in self):
            return "it has no gradient; call it under torch.no_grad()"
        return super().faults()

    def results(self) -> Any:
        """It only writes."""


@operator("estmm_add")
class EstmmAdd(_Adding, Estmm, leading=True):
    """``into += estmm(x, g, ...)``: into in float32 (float64 for float64), the product added before it is rounded, or in the
    operands' type; any strides.
    """

    into: Annotated[Tensor, added_to("E N K", layout="layout")]
    returns = "()"


@operator("ess_add")
class EssAdd(_Adding, Ess, leading=True):
    """``into += ess(g, ...)``, as `estmm_add`."""

    into: Annotated[Tensor, added_to("E C")]
    returns = "()"


@operator("esfk_add")
class EsfkAdd(_Adding, _Esfk, leading=True):
    """Returns dx of `esfk`, adds dW to into, and adds db to into_bias (E, N) unless that is None; as `estmm_add`."""

    into: Annotated[Tensor, added_to("E N K", layout="layout")]
    into_bias: Annotated[Tensor | None, added_to("E N")]
    returns = "Tensor dx"

    def results(self) -> Tensor:
        return self.g.new_empty((self.g.shape[0], self.x.shape[1]))
