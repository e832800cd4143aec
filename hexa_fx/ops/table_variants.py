"""The table of products with low-rank additions and with packed weights.

The former have a second product in the same accumulators, ``u @ C^T``: u has few columns, c lies as the weight does. Of the latter,
``packed`` and ``scales`` are as ``format`` (a name of `hexa_fx.formats.FORMATS`) stores a weight, which is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.formats import format_of
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import FLOATING, Derived, Operands, floating
from hexa_fx.ops.table import Activated, DyRows, Esmm, EsmmAct, EsmmActBackward, RowsOfH, RowsOfProduct, XRows


@operator("scaled_transpose")
class ScaledTranspose(Operands):
    """``scale * x^T`` of a contiguous x, multiplied in float32 (float64 if either dtype is) and rounded once to ``dtype``."""

    x: Annotated[Tensor, floating("R C")]
    dtype: torch.dtype
    scale: float

    def faults(self) -> str:
        if self.x.is_contiguous() and self.dtype in FLOATING:
            return ""
        strides = f"x has strides {tuple(self.x.stride())} and becomes {self.dtype}"
        return f"{strides}; expected contiguous rows, and one of {FLOATING}"

    def results(self) -> Tensor:
        return self.x.new_empty((self.x.shape[1], self.x.shape[0]), dtype=self.dtype)


U: TypeAlias = Annotated[Tensor, floating("n r")]


C: TypeAlias = Annotated[Tensor, floating("E N r", layout="layout")]


@operator("esmm_low_rank", differentiable=False)
class EsmmLowRank(Esmm):
    """`esmm` with ``esmm(u, c, None, None, offs, 1, layout)`` added."""

    u: U
    c: C


@operator("esmm_act_low_rank", differentiable=False)
class EsmmActLowRank(EsmmAct):
    """`esmm_act` with such a product added to h; c3 is that of w3."""

    u: U
    c: C
    c3: Annotated[Tensor | None, floating("E N r", layout="layout")]
    defaults: ClassVar[dict[str, object]] = {}

    def faults(self) -> str:
        return super().faults() or ("c3 is missing; it goes with w3" if (self.c3 is None) != (self.w3 is None) else "")


@operator("esmm_act_backward_low_rank", differentiable=False)
class EsmmActBackwardLowRank(EsmmActBackward):
    """`esmm_act_backward` with such a product added to the gradient of a."""

    u: U
    c: Annotated[Tensor, floating("E N r", layout="layout")]


WithSecond = EsmmLowRank | EsmmActLowRank | EsmmActBackwardLowRank
"""Records of products with a second one in the same accumulators."""


class Packed(Operands):
    """An operand record with a packed weight."""

    packed: Tensor
    scales: Sequence[Tensor]
    format: str

    @property
    def weight(self) -> Tensor:
        """A stand-in for the weight that is packed, in its shape and the rows' dtype, without memory."""
        return shaped_as(self[0], self.packed, self.format)

    def dense(self, weight: Tensor) -> Operands:
        """The record of the operator on a dense weight."""
        raise NotImplementedError

    def check(self, op: str) -> None:
        check_packed(op, "packed", self[0], self.packed, self.scales, self.format)
        self.dense(self.weight).check(op)

    def results(self) -> Any:
        return self.dense(self.weight).results()


def shaped_as(x: Tensor, packed: Tensor, format: str) -> Tensor:
    """A stand-in for the weight that is packed, of its shape and x's dtype, without memory."""
    return x.new_empty(()).expand(format_of(format).shape_of(packed))


def check_packed(op: str, name: str, x: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str) -> None:
    """Checks that a packed weight is as its format says, frozen, and on x's device."""
    format_of(format).check(op, name, packed, scales)
    if packed.device != x.device:
        raise InputError(f"hexa::{op}: x is on {x.device} but {name} is on {packed.device}")
    if packed.requires_grad or any(scale.requires_grad for scale in scales):
        raise InputError(f"hexa::{op}: {name} is {format}, which has no gradient; freeze it (requires_grad_(False))")


@operator("esmm_packed", autocast=True)
class EsmmPacked(RowsOfProduct, Packed, XRows):
    """`esmm` with such a weight."""

    def dense(self, weight: Tensor) -> Esmm:
        return self.to(Esmm, weight=weight)


@operator("esmm_packed_low_rank", differentiable=False)
class EsmmPackedLowRank(EsmmPacked):
    """`esmm_low_rank` with such a weight."""

    u: U
    c: C

    def dense(self, weight: Tensor) -> EsmmLowRank:
        return self.to(EsmmLowRank, weight=weight)


@operator("esmm_act_packed", differentiable=False)
class EsmmActPacked(Activated, EsmmPacked):
    """`esmm_act`, or `esmm_act_low_rank` where u and c are given, with such a weight."""

    keep_h: bool
    u: Annotated[Tensor | None, floating("n r")]
    c: Annotated[Tensor | None, floating("E N r", layout="layout")]
    returns = EsmmAct.returns

    inner = Derived(lambda o: inner_width(o.columns, o.glu))
    """Columns of a."""

    def dense(self, weight: Tensor) -> EsmmAct:  # type: ignore[override]
        return self.to(EsmmAct if self.u is None else EsmmActLowRank, w1=weight, b1=self.bias)


@operator("esmm_act_backward_packed", differentiable=False)
class EsmmActBackwardPacked(Activated, RowsOfH, Packed, DyRows):
    """`esmm_act_backward`, or `esmm_act_backward_low_rank` where u and c are given, with such a weight."""

    u: Annotated[Tensor | None, floating("n r")]
    c: Annotated[Tensor | None, floating("E N r", layout="layout")]
    returns = EsmmActBackward.returns

    @property
    def product(self) -> EsmmPacked:
        """What gives the activation's gradient."""
        return self.to(EsmmPacked, x=self.dy)

    def dense(self, weight: Tensor) -> EsmmActBackward:
        return self.to(EsmmActBackward if self.u is None else EsmmActBackwardLowRank, weight=weight)
