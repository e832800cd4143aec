"""Row products with packed weights and what is fused with them: a low-rank addition, an activation, an activation's gradient.

``hexa::esmm_packed_low_rank``, ``hexa::esmm_act_packed`` and ``hexa::esmm_act_backward_packed`` are the operators of
`hexa_fx.ops.low_rank`, or the dense ones, with a weight that is packed as `hexa_fx.ops.esmm_packed` has it. Of
`hexa::moe_ffn_sources`, which has the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.esmm import check as check_esmm
from hexa_fx.ops.esmm import fake as fake_esmm
from hexa_fx.ops.esmm_act import check as check_act
from hexa_fx.ops.esmm_act import fake as fake_act
from hexa_fx.ops.esmm_act_backward import check as check_act_backward
from hexa_fx.ops.esmm_act_backward import fake as fake_act_backward
from hexa_fx.ops.esmm_packed import EsmmPacked, check_packed, shaped_as
from hexa_fx.ops.library import Check, Kernel
from hexa_fx.ops.low_rank import check_added
from hexa_fx.ops.operands import Esmm, EsmmAct, EsmmActBackward

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

    @property
    def product(self) -> EsmmPacked:
        """The product with the packed weight."""
        return self.base

    def with_weight(self, weight: Tensor) -> Esmm:
        """The dense operator's record, without what is added."""
        p = self.base
        return Esmm(p.x, weight, p.bias, p.v, p.offs, p.top_k, p.layout)  # type: ignore[arg-type]


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
    def product(self) -> EsmmPacked:
        """What gives the pre-activation."""
        return self.base

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


def _register(name: str, of: Callable[..., Any], check_dense: Check, fake_dense: Kernel, composed: Kernel) -> None:
    """An operator that is a dense one, or one with a second product, but for its weight."""

    def check(*args: Any) -> None:
        o = of(*args)
        product = o.product
        check_packed(name, "packed", *product[:4])
        weight = shaped_as(product.x, product.packed, product.format)
        check_dense(*o.with_weight(weight))
        if o.u is not None:
            check_added(name, product.x, product.rows, weight, product.layout, o.u, o.c)

    def fake(*args: Any) -> Any:
        o = of(*args)
        return fake_dense(*o.with_weight(shaped_as(o.product.x, o.product.packed, o.product.format)))

    library.register_fake(name, fake, check)
    library.register_kernel(name, "any", composed)
    library.refuse_double_backward(name)


_register("esmm_packed_low_rank", EsmmPackedLowRank.of, check_esmm, fake_esmm, low_rank_composed)
_register("esmm_act_packed", EsmmActPacked.of, check_act, fake_act, act_composed)
_register(
    "esmm_act_backward_packed", EsmmActBackwardPacked, check_act_backward, fake_act_backward, act_backward_composed
)
