"""Row products with a second one in the same accumulator: ``x @ W^T + u @ C^T``, plain, before an activation, before its gradient.

``hexa::esmm_low_rank``, ``hexa::esmm_act_low_rank`` and ``hexa::esmm_act_backward_low_rank`` are `hexa_fx.ops.esmm`,
`hexa_fx.ops.esmm_act` and `hexa_fx.ops.esmm_act_backward` with more operands at the end:

* u: (n, r), rows in expert order, r few;
* c: as the weight with r in place of K, (E, N, r) for ``nk`` and (E, r, N) for ``kn``, any strides;
* c3: the same of w3, for glu ``split``.

Of `hexa::moe_ffn_sources`, which has the gradients: a low-rank addition to a weight is such a product with ``u = x A^T``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ir import Glu, Layout
from hexa_fx.ops import checks, library
from hexa_fx.ops.esmm import check as check_esmm
from hexa_fx.ops.esmm import fake as fake_esmm
from hexa_fx.ops.esmm_act import check as check_act
from hexa_fx.ops.esmm_act import fake as fake_act
from hexa_fx.ops.esmm_act_backward import check as check_act_backward
from hexa_fx.ops.esmm_act_backward import fake as fake_act_backward
from hexa_fx.ops.library import Check, Kernel
from hexa_fx.ops.operands import Esmm, EsmmAct, EsmmActBackward

_OPS = torch.ops.hexa

library.define(
    "esmm_low_rank(Tensor x, Tensor weight, Tensor? bias, Tensor? v, Tensor offs, SymInt top_k, str layout, Tensor u, "
    "Tensor c) -> Tensor"
)
library.define(
    "esmm_act_low_rank(Tensor x, Tensor w1, Tensor? b1, Tensor? w3, Tensor? b3, Tensor? v, Tensor offs, SymInt top_k, "
    "str layout, str activation, str glu, float[] params, bool keep_h, Tensor u, Tensor c, Tensor? c3) "
    "-> (Tensor h, Tensor a)"
)
library.define(
    "esmm_act_backward_low_rank(Tensor dy, Tensor weight, Tensor h, Tensor? top_k_weights, Tensor v, Tensor offs, "
    "SymInt top_k, str layout, str activation, str glu, float[] params, Tensor u, Tensor c) "
    "-> (Tensor dh, Tensor a_scaled, Tensor dweights)"
)


class EsmmLowRank(NamedTuple):
    """Of `esmm_low_rank`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout
    u: Tensor
    c: Tensor

    @property
    def base(self) -> Esmm:
        """The first product."""
        return Esmm._make(self[:-2])


class EsmmActLowRank(NamedTuple):
    """Of `esmm_act_low_rank`."""

    x: Tensor
    w1: Tensor
    b1: Tensor | None
    w3: Tensor | None
    b3: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout
    activation: str
    glu: Glu
    params: tuple[float, ...]
    keep_h: bool
    u: Tensor
    c: Tensor
    c3: Tensor | None

    @property
    def base(self) -> EsmmAct:
        """The first product."""
        return EsmmAct._make(self[:-3])


class EsmmActBackwardLowRank(NamedTuple):
    """Of `esmm_act_backward_low_rank`."""

    dy: Tensor
    weight: Tensor
    h: Tensor
    top_k_weights: Tensor | None
    v: Tensor
    offs: Tensor
    top_k: int
    layout: Layout
    activation: str
    glu: Glu
    params: tuple[float, ...]
    u: Tensor
    c: Tensor

    @property
    def base(self) -> EsmmActBackward:
        """The first product."""
        return EsmmActBackward._make(self[:-2])


def _check_added(op: str, x: Tensor, rows: int, weight: Tensor, layout: str, u: Tensor, c: Tensor | None) -> None:
    checks.check_floating(op, ("x", "u", "c"), (x, u, c))
    experts, _, n = checks.check_weight(op, "weight", weight, layout)
    rank = u.shape[-1]
    expected = (experts, n, rank) if layout == "nk" else (experts, rank, n)
    if tuple(u.shape) != (rows, rank) or c is None or tuple(c.shape) != expected:
        given = "missing" if c is None else checks.shape(c)
        raise InputError(f"hexa::{op}: u is {checks.shape(u)} and C {given}; expected ({rows}, r) and {expected}")


def _check_esmm(*args: Any) -> None:
    o = EsmmLowRank(*args)
    check_esmm(*o.base)
    _check_added("esmm_low_rank", o.x, o.base.rows, o.weight, o.layout, o.u, o.c)


def _check_act(*args: Any) -> None:
    o = EsmmActLowRank(*args)
    check_act(*o.base)
    _check_added("esmm_act_low_rank", o.x, o.base.rows, o.w1, o.layout, o.u, o.c)
    if o.w3 is not None:
        _check_added("esmm_act_low_rank", o.x, o.base.rows, o.w3, o.layout, o.u, o.c3)


def _check_backward(*args: Any) -> None:
    o = EsmmActBackwardLowRank(*args)
    check_act_backward(*o.base)
    _check_added("esmm_act_backward_low_rank", o.dy, o.v.shape[0], o.weight, o.layout, o.u, o.c)


def esmm_composed(*args: Any) -> Tensor:
    """Kernel for any device: two products."""
    o = EsmmLowRank(*args)
    y: Tensor = _OPS.esmm(*o.base)
    return y.add_(_OPS.esmm(o.u, o.c, None, None, o.offs, 1, o.layout))


def esmm_act_composed(*args: Any) -> tuple[Tensor, Tensor]:
    """Kernel for any device: the products, then the activation."""
    o = EsmmActLowRank(*args)
    rows = (o.v, o.offs, o.top_k, o.layout)
    h = esmm_composed(o.x, o.w1, o.b1, *rows, o.u, o.c)
    if o.w3 is not None:
        h = torch.cat((h, esmm_composed(o.x, o.w3, o.b3, *rows, o.u, o.c3)), dim=1)
    a = _OPS.activate(h, o.activation, o.glu, o.params)
    return (h if o.keep_h else h.new_empty((0, o.base.width))), a


def esmm_act_backward_composed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device: the products, then the activation's gradient."""
    o = EsmmActBackwardLowRank(*args)
    da = esmm_composed(o.dy, o.weight, None, o.v, o.offs, o.top_k, o.layout, o.u, o.c)
    out: tuple[Tensor, Tensor, Tensor] = _OPS.activate_backward(
        da, o.h, o.top_k_weights, o.v, o.offs, o.activation, o.glu, o.params
    )
    return out


def _register(name: str, like: Kernel, added: int, check: Check, composed: Kernel) -> None:
    """An operator with the results of another one, of which it has ``added`` more operands."""
    library.register_fake(name, lambda *args: like(*args[:-added]), check)
    library.register_kernel(name, "any", composed)
    library.refuse_double_backward(name)


_register("esmm_low_rank", fake_esmm, 2, _check_esmm, esmm_composed)
_register("esmm_act_low_rank", fake_act, 3, _check_act, esmm_act_composed)
_register("esmm_act_backward_low_rank", fake_act_backward, 2, _check_backward, esmm_act_backward_composed)
