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
    """Of `esmm_low_rank`: the first product, and what is added to it."""

    base: Esmm
    u: Tensor
    c: Tensor

    @classmethod
    def of(cls, *args: Any) -> EsmmLowRank:
        """The operator's arguments."""
        return cls(Esmm._make(args[:-2]), *args[-2:])


class EsmmActLowRank(NamedTuple):
    """Of `esmm_act_low_rank`; likewise."""

    base: EsmmAct
    u: Tensor
    c: Tensor
    c3: Tensor | None

    @classmethod
    def of(cls, *args: Any) -> EsmmActLowRank:
        """The operator's arguments."""
        return cls(EsmmAct._make(args[:-3]), *args[-3:])


class EsmmActBackwardLowRank(NamedTuple):
    """Of `esmm_act_backward_low_rank`; likewise."""

    base: EsmmActBackward
    u: Tensor
    c: Tensor

    @classmethod
    def of(cls, *args: Any) -> EsmmActBackwardLowRank:
        """The operator's arguments."""
        return cls(EsmmActBackward._make(args[:-2]), *args[-2:])


def check_added(op: str, x: Tensor, rows: int, weight: Tensor, layout: str, u: Tensor, c: Tensor | None) -> None:
    """Checks the operands of a second product."""
    checks.check_floating(op, ("x", "u", "c"), (x, u, c))
    experts, _, n = checks.check_weight(op, "weight", weight, layout)
    rank = u.shape[-1]
    expected = (experts, n, rank) if layout == "nk" else (experts, rank, n)
    if tuple(u.shape) != (rows, rank) or c is None or tuple(c.shape) != expected:
        given = "missing" if c is None else checks.shape(c)
        raise InputError(f"hexa::{op}: u is {checks.shape(u)} and C {given}; expected ({rows}, r) and {expected}")


def _check_esmm(*args: Any) -> None:
    base, u, c = EsmmLowRank.of(*args)
    check_esmm(*base)
    check_added("esmm_low_rank", base.x, base.rows, base.weight, base.layout, u, c)


def _check_act(*args: Any) -> None:
    base, u, c, c3 = EsmmActLowRank.of(*args)
    check_act(*base)
    check_added("esmm_act_low_rank", base.x, base.rows, base.w1, base.layout, u, c)
    if base.w3 is not None:
        check_added("esmm_act_low_rank", base.x, base.rows, base.w3, base.layout, u, c3)


def _check_backward(*args: Any) -> None:
    base, u, c = EsmmActBackwardLowRank.of(*args)
    check_act_backward(*base)
    check_added("esmm_act_backward_low_rank", base.dy, base.v.shape[0], base.weight, base.layout, u, c)


def esmm_composed(*args: Any) -> Tensor:
    """Kernel for any device: two products."""
    base, u, c = EsmmLowRank.of(*args)
    y: Tensor = _OPS.esmm(*base)
    return y.add_(_OPS.esmm(u, c, None, None, base.offs, 1, base.layout))


def esmm_act_composed(*args: Any) -> tuple[Tensor, Tensor]:
    """Kernel for any device: the products, then the activation."""
    base, u, c, c3 = EsmmActLowRank.of(*args)
    rows = (base.v, base.offs, base.top_k, base.layout)
    h = esmm_composed(base.x, base.w1, base.b1, *rows, u, c)
    if base.w3 is not None:
        h = torch.cat((h, esmm_composed(base.x, base.w3, base.b3, *rows, u, c3)), dim=1)
    a = _OPS.activate(h, base.activation, base.glu, base.params)
    return (h if base.keep_h else h.new_empty((0, base.width))), a


def esmm_act_backward_composed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device: the products, then the activation's gradient."""
    base, u, c = EsmmActBackwardLowRank.of(*args)
    da = esmm_composed(base.dy, base.weight, None, base.v, base.offs, base.top_k, base.layout, u, c)
    out: tuple[Tensor, Tensor, Tensor] = _OPS.activate_backward(
        da, base.h, base.top_k_weights, base.v, base.offs, base.activation, base.glu, base.params
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
