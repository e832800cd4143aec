"""``hexa::activate`` and ``hexa::activate_backward``: the activation between the two projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.activations import activation_backward, activation_forward
from hexa_fx.ops.rows import accumulate_dtype, invert, routed_rows
from hexa_fx.ops.table import Activate, ActivateBackward

activate = library.wrapper("activate", params=())
activate_backward = library.wrapper("activate_backward", params=())


@library.kernel("activate", "cpu", "any")
def activate_generic(o: Activate) -> Tensor:
    """Kernel for any device, made of torch's own operators."""
    wide = o.h.to(accumulate_dtype(o.h.dtype))
    return activation_forward(wide, o.activation, o.glu, o.params).to(o.h.dtype)


@library.kernel("activate_backward", "cpu", "any")
def activate_backward_generic(o: ActivateBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device, made of torch's own operators."""
    da, h, top_k_weights, v, offs, activation, glu, params = o
    wide, da_wide = h.to(accumulate_dtype(h.dtype)), da.to(accumulate_dtype(h.dtype))
    a = activation_forward(wide, activation, glu, params)
    if top_k_weights is None:
        dh = activation_backward(da_wide, wide, activation, glu, params)
        return dh.to(h.dtype), a.to(h.dtype), h.new_empty(0)
    assert v is not None
    assert offs is not None
    routed = routed_rows(offs, h.shape[0])
    w = top_k_weights.reshape(-1).index_select(0, v).to(a.dtype).unsqueeze(1)
    w = torch.where(routed, w, 0)
    dots = (da_wide * a).sum(1, keepdim=True)
    dweights = torch.where(routed, dots, 0).index_select(0, invert(v)).view(top_k_weights.shape)
    dh = activation_backward(da_wide * w, wide, activation, glu, params)
    return dh.to(h.dtype), (a * w).to(h.dtype), dweights.to(top_k_weights.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, *ctx.static = inputs
    ctx.save_for_backward(h)


def _backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
    (h,) = ctx.saved_tensors
    dh, _, _ = torch.ops.hexa.activate_backward(da, h, None, None, None, *ctx.static)
    return Activate.by_argument(h=dh)


library.register_autograd("activate", _backward, _setup_context)
