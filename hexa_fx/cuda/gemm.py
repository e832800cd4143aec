"""The products on CUDA: the Hopper family where it takes the operands, gemm_sm80 everywhere else.

The choice looks at shapes, strides and types only. Arguments and results are those of the operators' own docstrings.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.codegen.tiles_sm90 import swaps
from hexa_fx.cuda import gemm_sm80 as sm80
from hexa_fx.cuda import gemm_sm90 as sm90
from hexa_fx.cuda import low_rank_sm90
from hexa_fx.cuda.calls import cuda_kernel, product
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.operands import Into, Segment, aligned, as_stored, contiguous
from hexa_fx.cuda.planning import planning_of
from hexa_fx.cuda.rows import activate, activate_backward, ess, ess_add, scaled_transpose, settle, substitute
from hexa_fx.ir import Glu, Layout
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.low_rank import composed
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table import (
    Activate,
    ActivateBackward,
    Esfk,
    EsfkAdd,
    Esmm,
    EsmmAct,
    EsmmActBackward,
    EsmmActBackwardLowRank,
    EsmmActLowRank,
    EsmmLowRank,
    Estmm,
    EstmmAdd,
    LowRankGradients,
)

DECODE_BUCKET = 4
"""Up to 2^4 rows an expert a product only streams weights. The 16-row tiles of gemm_sm80 waste least there, but for projections
that the Hopper family computes in swapped tiles, which go by 16 rows, too.
"""

SM80_ONLY = ("tanh",)
"""Activations without a Hopper epilogue."""


@cuda_kernel("esmm")
def esmm(o: Esmm) -> Tensor:
    """See hexa_fx.ops.esmm."""
    y = low_rank_sm90.esmm(o)
    if y is not None:
        return y
    return esmm_segment(o, into=Segment(o.x.new_empty((o.rows, o.columns)), o.rows, True))


@product
def esmm_segment(o: Esmm, into: Segment) -> Tensor:
    """The same of some experts: ``offs`` is a part of those of all, and all rows are in ``x`` and ``v``."""
    weight, layout = as_stored(o.weight, o.layout)
    o = o._replace(weight=weight, layout=layout)
    takes = _hopper(o.offs, (o.columns,), o.x, weight, *_stored(o.bias))
    return sm90.esmm(o, into=into) if takes else sm80.esmm(o, into=into)


@product
def fused_segment(o: Esmm | EsmmAct | EsmmActBackward, into: Segment) -> Tensor:
    """A product with a second one, an activation or its gradient, of some experts.

    Raises:
        Unsupported: the Hopper family does not take these operands.
    """
    if isinstance(o, Esmm):
        takes = _hopper(o.offs, (o.columns,), o.x, o.weight, *_second_of(o), *_stored(o.bias))
        run: Any = sm90.esmm
    elif isinstance(o, EsmmAct):
        takes, run = _hopper_activates(o), sm90.esmm_act
    else:
        takes, run = _hopper_differentiates(o), sm90.esmm_act_backward
    if not takes:
        raise Unsupported("unpacked matrices, or the rows that they are multiplied with, that only gemm_sm80 takes")
    run(o, into=into)
    return into.out


def _second_of(o: Esmm | EsmmAct | EsmmActBackward) -> tuple[Tensor | None, ...]:
    """The operands of a second product; none without one."""
    if isinstance(o, EsmmActLowRank):
        return o.u, o.c, o.c3
    return (o.u, o.c) if isinstance(o, EsmmLowRank | EsmmActBackwardLowRank) else ()


@cuda_kernel("esmm_act")
def esmm_act(o: EsmmAct) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.esmm_act."""
    o = _both_biases(o)
    return sm90.esmm_act(o) if _hopper_activates(o) else sm80.esmm_act(o)


@cuda_kernel("esmm_act_backward")
def esmm_act_backward(o: EsmmActBackward) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.esmm_act_backward. One launch on Hopper, two elsewhere."""
    weight, layout = as_stored(o.weight, o.layout)
    o = o._replace(weight=weight, layout=layout)
    if _hopper_differentiates(o):
        return _by_slot(o, *sm90.esmm_act_backward(o))
    return activate_backward(*o.to(ActivateBackward, da=sm80.esmm(o.to(Esmm, x=o.dy))))


@cuda_kernel("esmm_low_rank")
def esmm_low_rank(o: EsmmLowRank) -> Tensor:
    """See hexa_fx.ops.low_rank. One launch on Hopper, two and an addition elsewhere."""
    o = _stored_alike(o)
    if not _hopper(o.offs, (o.columns,), o.x, o.weight, o.u, o.c, *_stored(o.bias)):
        return with_second(esmm(*o.to(Esmm)), o.u, o.c, o.offs, o.layout)
    return sm90.esmm(o)


@cuda_kernel("esmm_act_low_rank")
def esmm_act_low_rank(given: EsmmActLowRank) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.low_rank. One launch on Hopper."""
    o = _both_biases(given._replace(c=given.c.contiguous(), c3=contiguous(given.c3)))
    if _hopper_activates(o):
        return sm90.esmm_act(o)
    h = esmm_low_rank(*given.to(EsmmLowRank, weight=given.w1, bias=given.b1))
    if given.w3 is not None:
        up = esmm_low_rank(*given.to(EsmmLowRank, weight=given.w3, bias=given.b3, c=given.c3))
        h = torch.cat((h, up), 1)
    a = activate(*given.to(Activate, h=h))
    return (h if given.keep_h else h.new_empty((0, given.width))), a


@cuda_kernel("esmm_act_backward_low_rank")
def esmm_act_backward_low_rank(o: EsmmActBackwardLowRank) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.low_rank. One launch on Hopper."""
    o = _stored_alike(o)
    if _hopper_differentiates(o):
        return _by_slot(o, *sm90.esmm_act_backward(o))
    da = esmm_low_rank(*o.to(EsmmLowRank, x=o.dy))
    return activate_backward(*o.to(ActivateBackward, da=da))


First = TypeVar("First", bound=EsmmAct)
Added = TypeVar("Added", EsmmLowRank, EsmmActBackwardLowRank)


def _stored_alike(o: Added) -> Added:
    """With a view of the weight whose contiguous dimension is the last one, and C lying likewise."""
    weight, layout = as_stored(o.weight, o.layout)
    c = (o.c if layout == o.layout else o.c.transpose(1, 2)).contiguous()
    return o._replace(weight=weight, layout=layout, c=c)


def with_second(y: Tensor, u: Tensor, c: Tensor | None, offs: Tensor, layout: str) -> Tensor:
    """y with a second product added."""
    planning_of(y).run(Tensor.add_, y, esmm(u, c, None, None, offs, 1, layout))
    return y


@cuda_kernel("estmm")
def estmm(o: Estmm) -> Tensor:
    """See hexa_fx.ops.estmm."""
    dw = low_rank_sm90.estmm(o)
    if dw is not None:
        return dw
    return sm90.estmm(o) if _hopper_adds(o) else sm80.estmm(o)


@cuda_kernel("esfk")
def esfk(o: Esfk) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.esfk. One launch, except where a Hopper tile says to split it, and on gemm_sm80 for few rows per expert,
    where dX wants lower tiles than dW.
    """
    fused = _fused(o)
    if fused is not None:
        dx, dw, db = fused.esfk(o)
        return dx, dw, o.g.new_empty((0,)) if db is None else db
    dx = _input_gradient(o)
    dw = sm80.estmm(o.to(Estmm))
    return dx, dw, ess(o.g, None, o.offs, 1, None) if o.has_bias else o.g.new_empty((0,))


@cuda_kernel("estmm_add")
def estmm_add(o: EstmmAdd) -> None:
    """See hexa_fx.ops.weight_gradients. The epilogue of the weight tiles adds."""
    hopper = _hopper_adds(o)
    held, layout = _held(o.into, o.layout, hopper)
    (sm90 if hopper else sm80).estmm(o.to(Estmm, layout=layout), into=held)
    settle(o.into, held)


@cuda_kernel("esfk_add")
def esfk_add(given: EsfkAdd) -> Tensor:
    """See hexa_fx.ops.weight_gradients. Launches as `esfk` does."""
    into, into_bias, o = given.into, given.into_bias, given.to(Esfk, has_bias=given.into_bias is not None)
    fused = _fused(o)
    if fused is None:
        rows = _input_gradient(o)
        estmm_add(*given.to(EstmmAdd))
        if into_bias is not None:
            ess_add(into_bias, o.g, None, o.offs, 1, None)
        return rows
    held, layout = _held(into, o.layout, fused is sm90)
    bias = _held_bias(into_bias)
    dx, *_ = fused.esfk(o, into=Into(held, layout, bias))
    settle(into, held)
    settle(into_bias, bias)
    return dx  # type: ignore[no-any-return]


def _fused(o: Esfk) -> ModuleType | None:
    """The family that computes both gradients in one launch; None where two are better."""
    if not o.g.shape[0] or not o.weight.numel():
        return None
    if _hopper(o.offs, (o.x.shape[1], o.g.shape[1]), o.x, o.g, o.weight):
        return sm90
    return None if _few_rows(o.g.shape[0], o.offs) else sm80


def _hopper_adds(o: Estmm) -> bool:
    """Whether the Hopper family computes this gradient of a weight."""
    both = o.x_index is not None and o.g_index is not None
    return not both and _hopper(o.offs, (o.x.shape[1], o.g.shape[1]), o.x, o.g)


def _input_gradient(o: Esfk) -> Tensor:
    """The rows of dX, by a launch of their own."""
    weight, layout = as_stored(o.weight, flip(o.layout))
    return sm80.esmm(Esmm(o.g, weight, None, None, o.offs, 1, layout))


def _held(into: Tensor, layout: Layout, on_hopper: bool) -> tuple[Tensor, Layout]:
    """What a kernel adds to, with its layout: `into` as it lies, or zeros to add to it later if no kernel supports its strides."""
    stored, as_layout = as_stored(into, layout)
    by_expert, by_row, step = stored.stride()
    _, rows, columns = stored.shape
    nested = step == 1 and by_row >= columns and by_expert >= rows * by_row
    if nested and (aligned(stored) or not on_hopper):
        return stored, as_layout
    return substitute(into), layout


def _held_bias(into: Tensor | None) -> Tensor | None:
    return into if into is None or (into.is_contiguous() and aligned(into)) else substitute(into)


def _both_biases(o: First) -> First:
    """Kernels take both biases of gate and up or none."""
    if o.w3 is None or (o.b1 is None) == (o.b3 is None):
        return o
    b1, b3 = (o.w1.new_zeros((o.w1.shape[0], o.inner)) if b is None else b for b in (o.b1, o.b3))
    return o._replace(b1=b1, b3=b3)


def _hopper_activates(o: EsmmAct) -> bool:
    """Whether the Hopper family computes this projection and its activation."""
    swapped = swaps("esmm_act", o.glu, o.layout)
    if _only_sm80(o.activation, o.glu) or (not swapped and _few_rows(o.rows, o.offs)):
        return False
    return _hopper(o.offs, (o.inner,), o.x, o.w1, o.w3, *_stored(o.b1, o.b3), *_second_of(o))


def _hopper_differentiates(o: EsmmActBackward) -> bool:
    """Whether the Hopper family computes this gradient of an activation."""
    if _only_sm80(o.activation, o.glu) or _few_rows(o.v.shape[0], o.offs):
        return False
    return _hopper(o.offs, (o.inner,), o.dy, o.weight, o.h, *_second_of(o))


def _by_slot(o: EsmmActBackward, dh: Tensor, a_scaled: Tensor, dots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The routing weights' gradients in their shape and type, or nothing if there are none."""
    gates = o.top_k_weights
    if gates is None:
        return dh, a_scaled, o.h.new_empty((0,))
    return dh, a_scaled, dots.view(gates.shape).to(gates.dtype)


def _few_rows(rows: int, offs: Tensor) -> bool:
    return not is_fixed() and row_bucket(rows, offs.shape[0] - 1) <= DECODE_BUCKET


def _hopper(offs: Tensor, widths: tuple[int, ...], *operands: Tensor | None) -> bool:
    """Whether the Hopper family takes these operands and stores results of these widths."""
    if not planning_of(offs).card.is_hopper or any(width % 8 for width in widths):
        return False
    return not sm90.unsupported(*operands, experts=offs.shape[0] - 1)


def _only_sm80(activation: str, glu: Glu) -> bool:
    """Whether no Hopper epilogue computes this activation."""
    return activation in SM80_ONLY or (activation, glu) == ("none", "none")


def _stored(*biases: Tensor | None) -> list[Tensor]:
    """The biases that kernels read where they lie. Others are copied first, as those in a slot of the shared cache are."""
    return [b for b in biases if b is not None and b.is_contiguous()]


_OTHERS = SimpleNamespace(esfk=esfk, esmm=esmm, estmm=estmm, scaled_transpose=scaled_transpose)


@cuda_kernel("low_rank_gradients")
def low_rank_gradients(o: LowRankGradients) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.low_rank_gradients."""
    return low_rank_sm90.gradients(o) or composed(o, by=_OTHERS)
