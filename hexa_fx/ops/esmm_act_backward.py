"""``hexa::esmm_act_backward``: the gradient of the second projection with that of the activation folded into its epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import checks, library
from hexa_fx.ops.activate import check_backward
from hexa_fx.ops.operands import EsmmActBackward

library.define(
    "esmm_act_backward(Tensor dy, Tensor weight, Tensor h, Tensor? top_k_weights, Tensor v, Tensor offs, SymInt top_k, "
    "str layout, str activation, str glu, float[] params) -> (Tensor dh, Tensor a_scaled, Tensor dweights)"
)


def esmm_act_backward(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    top_k_weights: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    layout: str,
    activation: str,
    glu: str,
    params: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """``activate_backward(esmm(dy, weight, None, v, offs, top_k, layout), h, ...)``; the gradient of a is not stored.

    Args:
        dy: (T, D), gradient of the layer's output.
        weight: the second projection as the product reads it: `layout` is the opposite of its forward one.
        h: (n, I) or (n, 2I), the pre-activation.
        top_k_weights: (T, k) or None, which means 1.
        v, offs: of `reindex`.

    Returns:
        dh, a_scaled and dweights, as `activate_backward`.

    Raises:
        InputError: the arguments do not fit together.
    """
    dh, a_scaled, dweights = torch.ops.hexa.esmm_act_backward(
        dy, weight, h, top_k_weights, v, offs, top_k, layout, activation, glu, params
    )
    return dh, a_scaled, dweights


def check(*args: Any) -> None:
    """Checks the arguments of esmm_act_backward."""
    o, op = EsmmActBackward(*args), "esmm_act_backward"
    _, model_size, inner = checks.check_weight(op, "weight", o.weight, o.layout)
    checks.check_rows(op, "dy", o.dy, model_size)
    da = o.h[:, :inner] if o.h.ndim == 2 else o.h
    check_backward(da, o.h, o.top_k_weights, o.v, o.offs, o.activation, o.glu, o.params)


def _composed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel of every device: the two operators it stands for."""
    o = EsmmActBackward(*args)
    device = o.dy.device.type
    da = library.kernel_for("esmm", device)(o.dy, o.weight, None, o.v, o.offs, o.top_k, o.layout)
    out: tuple[Tensor, Tensor, Tensor] = library.kernel_for("activate_backward", device)(
        da, o.h, o.top_k_weights, o.v, o.offs, o.activation, o.glu, o.params
    )
    return out


def fake(*args: Any) -> tuple[Tensor, ...]:
    """Empty results."""
    o = EsmmActBackward(*args)
    dweights = o.h.new_empty(0) if o.top_k_weights is None else torch.empty_like(o.top_k_weights).contiguous()
    return o.h.new_empty(o.h.shape), o.h.new_empty((o.h.shape[0], o.inner)), dweights


library.register_fake("esmm_act_backward", fake, check)
library.register_kernel("esmm_act_backward", "cpu", _composed)
library.register_kernel("esmm_act_backward", "any", _composed)
library.refuse_double_backward("esmm_act_backward")
