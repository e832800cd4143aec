"""``hexa::activate`` and ``hexa::activate_backward``: the activation between the two projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library
from hexa_fx.ops.activations import activation_backward, activation_forward, check_activation
from hexa_fx.ops.operands import ActivateBackward
from hexa_fx.ops.rows import accumulate_dtype, invert, routed_rows

library.define("activate(Tensor h, str activation, str glu, float[] params) -> Tensor")
library.define(
    "activate_backward(Tensor da, Tensor h, Tensor? top_k_weights, Tensor? v, Tensor? offs, str activation, str glu, "
    "float[] params) -> (Tensor dh, Tensor a_scaled, Tensor dweights)"
)


def activate(h: Tensor, activation: str, glu: str, params: tuple[float, ...] = ()) -> Tensor:
    """``a = act(h)`` row by row.

    Args:
        h: (n, I), or (n, 2I) for a gated expert: gate and up as two halves (``concat``, ``split``) or alternating
            (``interleaved``).
        activation: a name of `ACTIVATIONS`.
        glu: ``none``, ``concat``, ``interleaved`` or ``split``.
        params: the activation's constants; empty means its defaults.

    Returns:
        (n, I) in h's dtype, computed in float32 (float64 for float64).

    Raises:
        InputError: the activation or glu is unknown, or the width under a gate is odd.
    """
    a: Tensor = torch.ops.hexa.activate(h, activation, glu, params)
    return a


def activate_backward(
    da: Tensor,
    h: Tensor,
    top_k_weights: Tensor | None,
    v: Tensor | None,
    offs: Tensor | None,
    activation: str,
    glu: str,
    params: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the activation together with the routing weight's.

    Args:
        da: (n, I), gradient of a before the routing weight is applied.
        h: (n, I) or (n, 2I), the pre-activation.
        top_k_weights: (T, k) or None, which means 1.
        v: (n,) int32 of `reindex`; needed with top_k_weights.
        offs: (E+1,) int32 of `reindex`; needed with top_k_weights.

    Returns:
        dh: shaped as h, ``act'(h) (w da)``.
        a_scaled: (n, I), ``w act(h)``.
        dweights: shaped as top_k_weights and in its dtype, ``<da[p], a[p]>`` at slot ``v[p]``, zero at sentinel slots;
            shape (0,) without weights.

    Raises:
        InputError: the arguments do not fit together.
    """
    dh, a_scaled, dweights = torch.ops.hexa.activate_backward(da, h, top_k_weights, v, offs, activation, glu, params)
    return dh, a_scaled, dweights


def check(h: Tensor, activation: str, glu: str, params: Sequence[float]) -> None:
    """Checks the arguments of activate."""
    check_activation(activation, glu, params)
    checks.check_floating("activate", ("h",), (h,))
    checks.check_matrix("activate", "h", h)
    if glu != "none" and h.shape[1] % 2:
        raise InputError(f"hexa::activate: h is {checks.shape(h)}: gate and up need an even width")


def check_backward(*args: Any) -> None:
    """Checks the arguments of activate_backward."""
    o = ActivateBackward(*args)
    check(o.h, o.activation, o.glu, o.params)
    checks.check_floating("activate_backward", ("h", "da"), (o.h, o.da))
    checks.check_index("activate_backward", o.h, ("v", "offs"), (o.v, o.offs))
    width = o.h.shape[1] if o.glu == "none" else o.h.shape[1] // 2
    checks.check_rows("activate_backward", "da", o.da, width)
    if o.top_k_weights is not None and (o.v is None or o.offs is None):
        raise InputError("hexa::activate_backward: top_k_weights needs v and offs")


def activate_generic(h: Tensor, activation: str, glu: str, params: Sequence[float]) -> Tensor:
    """Kernel for any device, made of torch's own operators."""
    wide = h.to(accumulate_dtype(h.dtype))
    return activation_forward(wide, activation, glu, params).to(h.dtype)


def activate_backward_generic(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device, made of torch's own operators."""
    da, h, top_k_weights, v, offs, activation, glu, params = ActivateBackward(*args)
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


def _fake(h: Tensor, activation: str, glu: str, params: Sequence[float]) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] if glu == "none" else h.shape[1] // 2))


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    o = ActivateBackward(*args)
    dweights = o.h.new_empty(0) if o.top_k_weights is None else torch.empty_like(o.top_k_weights).contiguous()
    return o.h.new_empty(o.h.shape), o.da.new_empty(o.da.shape), dweights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.static = inputs[1:]


def _backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
    (h,) = ctx.saved_tensors
    dh, _, _ = torch.ops.hexa.activate_backward(da, h, None, None, None, *ctx.static)
    return dh, None, None, None


library.register_fake("activate", _fake, check)
library.register_kernel("activate", "cpu", activate_generic)
library.register_kernel("activate", "any", activate_generic)
library.register_autograd("activate", _backward, _setup_context)

library.register_fake("activate_backward", _fake_backward, check_backward)
library.register_kernel("activate_backward", "cpu", activate_backward_generic)
library.register_kernel("activate_backward", "any", activate_backward_generic)
library.refuse_double_backward("activate_backward")
