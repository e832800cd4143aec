"""The products on CUDA, by families of kernels. Each says what it takes; they are asked in order of architecture, the newest first.

What is asked are shapes, strides and types only. Arguments and results are those of the operators' own docstrings. What no family
fuses is composed of operators.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor

from hexa_fx.codegen.family import get_family
from hexa_fx.cuda import gemm_sm80, gemm_sm90, low_rank_sm90
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.operands import Into, Segment, aligned, as_stored, contiguous
from hexa_fx.cuda.planning import planning_of
from hexa_fx.cuda.rows import activate_backward, ess, ess_add, settle, substitute
from hexa_fx.ir import Layout
from hexa_fx.ops import library, table
from hexa_fx.ops.products import activated, composed, differentiated, summed
from hexa_fx.ops.rows import accumulate_dtype, flip
from hexa_fx.ops.table_variants import EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank

CUDA = library.Kernels("cuda")
FAMILIES = (gemm_sm90, gemm_sm80)
"""Those of products with matrices. Each has functions of the names of `_KINDS`, and ``takes``, of an operator's record."""
_KINDS = {
    table.Esmm: "esmm",
    table.EsmmAct: "esmm_act",
    table.EsmmActBackward: "esmm_act_backward",
    table.Estmm: "estmm",
    table.Esfk: "esfk",
}


def family_of(o: Any) -> ModuleType | None:
    """The family that computes a product; None if none does in one launch."""
    return next((family for family in FAMILIES if family.takes(o)), None)


def _launched(family: ModuleType | None, o: Any, **into: Any) -> Any:
    """The product by a family."""
    return getattr(family, next(name for record, name in _KINDS.items() if isinstance(o, record)))(o, **into)


@cuda_kernel("esmm", "esmm_low_rank")
def esmm(o: table.Esmm) -> Tensor:
    """One launch, with a second product on Hopper; elsewhere that takes another launch, and an addition."""
    y = None if isinstance(o, EsmmLowRank) else low_rank_sm90.esmm(o)
    if y is not None:
        return y
    o = _stored(o)
    return summed(o, by=CUDA) if family_of(o) is None else _launched(family_of(o), o)  # type: ignore


def esmm_segment(o: table.Esmm, into: Segment) -> Tensor:
    """The same of some experts: ``offs`` is a part of those of all, and all rows are in ``x`` and ``v``."""
    o = _stored(o)
    return _launched(family_of(o), o, into=into)  # type: ignore[no-any-return]


def fused_segment(o: table.Esmm | table.EsmmAct | table.EsmmActBackward, into: Segment) -> Tensor:
    """A product with a second one, an activation or its gradient, of some experts.

    Raises:
        Unsupported: the Hopper family does not take these operands.
    """
    if not gemm_sm90.takes(o):
        raise Unsupported("unpacked matrices, or the rows that they are multiplied with, that only gemm_sm80 takes")
    _launched(gemm_sm90, o, into=into)
    return into.out


@cuda_kernel("esmm_act", "esmm_act_low_rank")
def esmm_act(given: table.EsmmAct) -> tuple[Tensor, Tensor]:
    """One launch, with second products on Hopper."""
    o = given._replace(c=given.c.contiguous(), c3=contiguous(given.c3)) if isinstance(given, EsmmActLowRank) else given
    o = _both_biases(o)
    return activated(given, by=CUDA) if family_of(o) is None else _launched(family_of(o), o)  # type: ignore


@cuda_kernel("esmm_act_backward", "esmm_act_backward_low_rank")
def esmm_act_backward(o: table.EsmmActBackward) -> tuple[Tensor, Tensor, Tensor]:
    """One launch on Hopper, two or more elsewhere."""
    o = _stored(o)
    if (family := family_of(o)) is not None:
        return _by_slot(o, *_launched(family, o))
    if isinstance(o, EsmmActBackwardLowRank):
        return differentiated(o, by=CUDA)
    return activate_backward(*o.to(table.ActivateBackward, da=gemm_sm80.esmm(o.to(table.Esmm, x=o.dy))))


Stored = TypeVar("Stored", table.Esmm, table.EsmmActBackward)


def _stored(o: Stored) -> Stored:
    """With a view of the weight whose contiguous dimension is the last one, and C, if there is one, lying likewise."""
    weight, layout = as_stored(o.weight, o.layout)
    found = o._replace(weight=weight, layout=layout)
    if not isinstance(o, EsmmLowRank | EsmmActBackwardLowRank):
        return found
    return found._replace(c=(o.c if layout == o.layout else o.c.transpose(1, 2)).contiguous())


@cuda_kernel("estmm")
def estmm(o: table.Estmm) -> Tensor:
    dw = low_rank_sm90.estmm(o)
    if dw is not None:
        return dw
    return _launched(family_of(o), o)  # type: ignore[no-any-return]


@cuda_kernel("esfk")
def esfk(o: table.Esfk) -> tuple[Tensor, Tensor, Tensor]:
    """One launch, except where a Hopper tile says to split it, and on gemm_sm80 for few rows per expert,
    where dX wants lower tiles than dW.
    """
    family = family_of(o)
    if family is not None:
        dx, dw, db = _launched(family, o)
        return dx, dw, o.g.new_empty((0,)) if db is None else db
    dx = _input_gradient(o)
    dw = gemm_sm80.estmm(o.to(table.Estmm))
    return dx, dw, ess(o.g, None, o.offs, 1, None) if o.has_bias else o.g.new_empty((0,))


@cuda_kernel("estmm_add")
def estmm_add(o: table.EstmmAdd) -> None:
    """The epilogue of the weight tiles adds."""
    family = family_of(o)
    if not _adds(family, o.into):
        planning_of(o.into).run(Tensor.add_, o.into, estmm(*o.to(table.Estmm)))
        return
    held, layout = _held(o.into, o.layout, family)
    _launched(family, o.to(table.Estmm, layout=layout), into=held)
    settle(o.into, held)


@cuda_kernel("esfk_add")
def esfk_add(given: table.EsfkAdd) -> Tensor:
    """Launches as `esfk` does."""
    into, into_bias, o = given.into, given.into_bias, given.to(table.Esfk, has_bias=given.into_bias is not None)
    family = family_of(o)
    alike = into_bias is None or into_bias.dtype == into.dtype
    if family is None or not alike or not _adds(family, into):
        rows = _input_gradient(o)
        estmm_add(*given.to(table.EstmmAdd))
        if into_bias is not None:
            ess_add(into_bias, o.g, None, o.offs, 1, None)
        return rows
    held, layout = _held(into, o.layout, family)
    bias = into_bias
    if bias is not None and not (bias.is_contiguous() and aligned(bias)):
        bias = substitute(bias)
    dx, *_ = _launched(family, o, into=Into(held, layout, bias))
    settle(into, held)
    settle(into_bias, bias)
    return dx  # type: ignore[no-any-return]


def _input_gradient(o: table.Esfk) -> Tensor:
    """The rows of dX, by a launch of their own."""
    weight, layout = as_stored(o.weight, flip(o.layout))
    return gemm_sm80.esmm(table.Esmm(o.g, weight, None, None, o.offs, 1, layout))


def _adds(family: Any, into: Tensor) -> bool:
    """Whether a family's kernels add to a tensor of such a type: of the accumulators', some also of 16 bits."""
    return get_family(family.FAMILY).adds_narrow or into.dtype == accumulate_dtype(into.dtype)


def _held(into: Tensor, layout: Layout, family: Any) -> tuple[Tensor, Layout]:
    """What a kernel adds to, with its layout: `into` as it lies, or zeros to add to it later if no kernel supports its strides."""
    stored, as_layout = as_stored(into, layout)
    by_expert, by_row, step = stored.stride()
    _, rows, columns = stored.shape
    nested = step == 1 and by_row >= columns and by_expert >= rows * by_row
    if nested and (aligned(stored) or not family.ADDS_ALIGNED):
        return stored, as_layout
    return substitute(into), layout


def _both_biases(o: table.EsmmAct) -> table.EsmmAct:
    """Kernels take both biases of gate and up or none."""
    if o.w3 is None or (o.b1 is None) == (o.b3 is None):
        return o
    b1, b3 = (o.w1.new_zeros((o.w1.shape[0], o.inner)) if b is None else b for b in (o.b1, o.b3))
    return o._replace(b1=b1, b3=b3)


def _by_slot(o: table.EsmmActBackward, dh: Tensor, a_scaled: Tensor, dots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The routing weights' gradients in their shape and type, or nothing if there are none."""
    gates = o.top_k_weights
    if gates is None:
        return dh, a_scaled, o.h.new_empty((0,))
    return dh, a_scaled, dots.view(gates.shape).to(gates.dtype)


@cuda_kernel("low_rank_gradients")
def low_rank_gradients(o: table.LowRankGradients) -> tuple[Tensor, Tensor]:
    return low_rank_sm90.gradients(o) or composed(o, by=CUDA)
