"""The table of gradients: of weights and biases, of factors of a few columns, and those that are added to buffers.

Letters and layouts are those of `hexa_fx.ops.table`.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from hexa_fx.ir import Layout
from hexa_fx.ops.forms import FLOATING, added_to, floating
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import Operands
from hexa_fx.ops.rows import row_count
from hexa_fx.ops.table import BySlot, Offs, TopK, V, Weight


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
class Estmm(Operands):
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

    @property
    def rows(self) -> int:
        """n."""
        return row_count(self.x, self.x_index)

    @property
    def experts(self) -> int:
        """E."""
        return self.offs.shape[0] - 1

    def results(self) -> Any:
        n, k = self.g.shape[1], self.x.shape[1]
        return self.x.new_empty((self.experts, n, k) if self.layout == "nk" else (self.experts, k, n))


class _Esfk(Operands):
    x: Annotated[Tensor, floating("n K", by="x_index")]
    g: Annotated[Tensor, floating("n N")]
    weight: Weight
    x_index: V
    offs: Offs
    top_k: TopK
    layout: Layout

    @property
    def experts(self) -> int:
        """E."""
        return self.offs.shape[0] - 1


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
class LowRankGradients(Operands):
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
        experts, columns, rank = self.offs.shape[0] - 1, self.rows.shape[1], self.u.shape[1]
        matrix = (columns, rank) if self.layout == "kn" else (rank, columns)
        du = self.u.new_empty((0,) if self.factor is None else self.u.shape)
        return du, self.rows.new_empty(
            (*matrix, experts) if self.experts_last else (experts, *matrix), dtype=self.dtype
        )


class _IntoWeight(Operands):
    into: Annotated[Tensor, added_to("E N K", layout="layout")]


class _IntoWeightAndBias(_IntoWeight):
    into_bias: Annotated[Tensor | None, added_to("E N")]


class _IntoSums(Operands):
    into: Annotated[Tensor, added_to("E C")]


class _Adding(Operands):
    """Adds to buffers in the accumulators' type, any strides; the part of an expert without rows stays as it is. No gradient."""

    def faults(self) -> str:
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in self):
            return "it has no gradient; call it under torch.no_grad()"
        return super().faults()

    def results(self) -> Any:
        """It only writes."""


@operator("estmm_add")
class EstmmAdd(_Adding, Estmm, _IntoWeight):
    """``into += estmm(x, g, ...)``, the product added before it is rounded; into in float32 (float64 for float64), any strides."""

    returns = "()"


@operator("ess_add")
class EssAdd(_Adding, Ess, _IntoSums):
    """``into += ess(g, ...)``, as `estmm_add`."""

    returns = "()"


@operator("esfk_add")
class EsfkAdd(_Adding, _Esfk, _IntoWeightAndBias):
    """Returns dx of `esfk`, adds dW to into, and adds db to into_bias (E, N) unless that is None; as `estmm_add`."""

    returns = "Tensor dx"

    def results(self) -> Tensor:
        return self.g.new_empty((self.g.shape[0], self.x.shape[1]))
