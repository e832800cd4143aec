"""Row products with packed weights and what is fused with them: a low-rank addition, an activation, an activation's gradient.

``hexa::esmm_packed_low_rank``, ``hexa::esmm_act_packed`` and ``hexa::esmm_act_backward_packed`` are the operators of
`hexa_fx.ops.low_rank`, or the dense ones, with a weight that is packed as `hexa_fx.ops.esmm_packed` has it. Of
`hexa::moe_ffn_sources`, which has the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.esmm_act import check as check_act
from hexa_fx.ops.esmm_act import fake as fake_act
from hexa_fx.ops.esmm_act_backward import check as check_act_backward
from hexa_fx.ops.esmm_act_backward import fake as fake_act_backward
from hexa_fx.ops.esmm_packed import EsmmPacked, check_packed, shaped_as
from hexa_fx.ops.esmm_packed import check as check_esmm
from hexa_fx.ops.low_rank import check_added
from hexa_fx.ops.operands import EsmmAct, EsmmActBackward

_OPS = torch.ops.hexa
_WEIGHT = "Tensor packed, Tensor[] scales, str format"
_ROWS = "SymInt top_k, str layout"
_STEPS = "str activation, str glu, float[] params"

library.define(
    f"esmm_packed_low_rank(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? v, Tensor offs, {_ROWS}, Tensor u, Tensor c) -> Tensor"
)
library.define(
    f"esmm_act_packed(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? v, Tensor offs, {_ROWS}, {_STEPS}, bool keep_h, Tensor? u, "
    "Tensor? c) -> (Tensor h, Tensor a)"
)
library.define(
    f"esmm_act_backward_packed(Tensor dy, {_WEIGHT}, Tensor h, Tensor? top_k_weights, Tensor v, Tensor offs, {_ROWS}, {_STEPS}, "
    "Tensor? u, Tensor? c) -> (Tensor dh, Tensor a_scaled, Tensor dweights)"
)


class EsmmPackedLowRank(NamedTuple):
    """Of `esmm_packed_low_rank`: the first product, and what is added to it."""

    base: EsmmPacked
    u: Tensor
    c: Tensor

    @classmethod
    def of(cls, *args: Any) -> EsmmPackedLowRank:
        """The operator's arguments."""
        return cls(EsmmPacked._make(args[:-2]), *args[-2:])


class EsmmActPacked(NamedTuple):
    """Of `esmm_act_packed`.

    Args:
        base: the product that is activated.
        u, c: of a second product; both None where there is none.
    """

    base: EsmmPacked
    activation: str
    glu: Any
    params: Sequence[float]
    keep_h: bool
    u: Tensor | None
    c: Tensor | None

    @property
    def inner(self) -> int:
        """Columns of a."""
        return inner_width(self.base.columns, self.glu)

    @classmethod
    def of(cls, *args: Any) -> EsmmActPacked:
        """The operator's arguments."""
        return cls(EsmmPacked._make(args[:9]), *args[9:])

    def with_weight(self, weight: Tensor) -> EsmmAct:
        """The dense operator's record."""
        p, steps = self.base, (self.activation, self.glu, tuple(self.params))
        static: Any = (p.top_k, p.layout, *steps, self.keep_h)
        return EsmmAct(p.x, weight, p.bias, None, None, p.v, p.offs, *static)


class EsmmActBackwardPacked(NamedTuple):
    """Of `esmm_act_backward_packed`; u and c as there."""

    dy: Tensor
    packed: Tensor
    scales: Sequence[Tensor]
    format: str
    h: Tensor
    top_k_weights: Tensor | None
    v: Tensor
    offs: Tensor
    top_k: int
    layout: Any
    activation: str
    glu: Any
    params: Sequence[float]
    u: Tensor | None
    c: Tensor | None

    @property
    def product(self) -> EsmmPacked:
        """What gives the activation's gradient."""
        weight = self.packed, self.scales, self.format
        return EsmmPacked(self.dy, *weight, None, self.v, self.offs, self.top_k, self.layout)

    def with_weight(self, weight: Tensor) -> EsmmActBackward:
        """The dense operator's record."""
        return EsmmActBackward(self.dy, weight, *self[4:12], tuple(self.params))


def _shaped(o: EsmmPacked) -> Tensor:
    return shaped_as(o.x, o.packed, o.format)


def _check_second(op: str, o: EsmmPacked, u: Tensor | None, c: Tensor | None) -> None:
    if u is not None:
        check_added(op, o.x, o.rows, _shaped(o), o.layout, u, c)


def _check_low_rank(*args: Any) -> None:
    o = EsmmPackedLowRank.of(*args)
    check_esmm(*o.base)
    _check_second("esmm_packed_low_rank", *o)


def _check_act(*args: Any) -> None:
    o = EsmmActPacked.of(*args)
    check_packed("esmm_act_packed", "packed", *o.base[:4])
    check_act(*o.with_weight(_shaped(o.base)))
    _check_second("esmm_act_packed", o.base, o.u, o.c)


def _check_act_backward(*args: Any) -> None:
    o = EsmmActBackwardPacked(*args)
    check_packed("esmm_act_backward_packed", "packed", *o[:4])
    check_act_backward(*o.with_weight(_shaped(o.product)))
    _check_second("esmm_act_backward_packed", o.product, o.u, o.c)


def product_with(o: EsmmPacked, u: Tensor | None, c: Tensor | None) -> Tensor:
    """The product, and what is added to it, in an operator of their own each."""
    y: Tensor = _OPS.esmm_packed(*o)
    return y if u is None else y.add_(_OPS.esmm(u, c, None, None, o.offs, 1, o.layout))


def low_rank_composed(*args: Any) -> Tensor:
    """Kernel for any device: two products."""
    return product_with(*EsmmPackedLowRank.of(*args))


def act_composed(*args: Any) -> tuple[Tensor, Tensor]:
    """Kernel for any device: the product, then the activation."""
    o = EsmmActPacked.of(*args)
    h = product_with(o.base, o.u, o.c)
    a = _OPS.activate(h, o.activation, o.glu, o.params)
    return (h if o.keep_h else h.new_empty((0, h.shape[1]))), a


def act_backward_composed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device: the product, then the activation's gradient."""
    o = EsmmActBackwardPacked(*args)
    da = product_with(o.product, o.u, o.c)
    out: tuple[Tensor, Tensor, Tensor] = _OPS.activate_backward(
        da, o.h, o.top_k_weights, o.v, o.offs, o.activation, o.glu, o.params
    )
    return out


def _fake_low_rank(*args: Any) -> Tensor:
    o = EsmmPackedLowRank.of(*args).base
    return o.x.new_empty((o.rows, o.columns))


def _fake_act(*args: Any) -> tuple[Tensor, ...]:
    o = EsmmActPacked.of(*args)
    found: tuple[Tensor, ...] = fake_act(*o.with_weight(_shaped(o.base)))
    return found


def _fake_act_backward(*args: Any) -> tuple[Tensor, ...]:
    o = EsmmActBackwardPacked(*args)
    found: tuple[Tensor, ...] = fake_act_backward(*o.with_weight(_shaped(o.product)))
    return found


for _name, _fake, _check, _composed in (
    ("esmm_packed_low_rank", _fake_low_rank, _check_low_rank, low_rank_composed),
    ("esmm_act_packed", _fake_act, _check_act, act_composed),
    ("esmm_act_backward_packed", _fake_act_backward, _check_act_backward, act_backward_composed),
):
    library.register_fake(_name, _fake, _check)
    library.register_kernel(_name, "any", _composed)
    library.refuse_double_backward(_name)
