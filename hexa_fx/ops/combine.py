"""``hexa::combine``: the weighted sum of every token's slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library
from hexa_fx.ops.rows import accumulate_dtype, invert, routed_rows
from hexa_fx.torch_private import _embedding_bag_forward_only

library.define("combine(Tensor y, Tensor? top_k_weights, Tensor inv, Tensor offs, SymInt top_k) -> Tensor")


def combine(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """``out[t] = sum over s of w[t, s] * y[inv[t*k + s]]``: gather and sum, in a fixed order, so deterministic.

    Args:
        y: (n, D) in expert order.
        top_k_weights: (T, k) in any floating dtype, or None, which means 1.
        inv: (n,) int32 of `reindex`.
        offs: (E+1,) int32 of `reindex`. Slots whose row is at or after ``offs[E]`` are skipped.
        top_k: k.

    Returns:
        (T, D) in y's dtype, summed in float32 (float64 for float64).

    Raises:
        InputError: the arguments do not fit together.
    """
    out: Tensor = torch.ops.hexa.combine(y, top_k_weights, inv, offs, top_k)
    return out


def check(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> None:
    """Checks the arguments of combine."""
    checks.check_floating("combine", ("y",), (y,))
    checks.check_index("combine", y, ("inv", "offs"), (inv, offs))
    checks.check_matrix("combine", "y", y)
    checks.check_rows("combine", "y", y, y.shape[1], inv)
    if top_k < 1:
        raise InputError(f"hexa::combine: top_k is {top_k}; expected 1 or more")
    w = top_k_weights
    if w is None:
        return
    if w.ndim != 2 or w.shape[1] != top_k or w.numel() != inv.shape[0] or w.dtype not in checks.FLOATING:
        expected = f"floating ({inv.shape[0] // top_k}, {top_k})"
        raise InputError(f"hexa::combine: top_k_weights is {checks.shape(w)}; expected {expected}")
    if w.device != y.device:
        raise InputError(f"hexa::combine: top_k_weights is on {w.device}, y on {y.device}")


def combine_generic(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """Kernel for any device, made of torch's own operators."""
    wide = accumulate_dtype(y.dtype)
    slots = torch.where(routed_rows(offs, y.shape[0]), y, 0).to(wide).index_select(0, inv)
    if top_k_weights is not None:
        w = top_k_weights.to(wide).reshape(-1, 1)
        slots = torch.where((inv < offs[-1]).unsqueeze(1), slots * w, 0)
    return slots.view(-1, top_k, y.shape[1]).sum(1).to(y.dtype)


def combine_cpu(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """CPU kernel. torch's embedding bag gathers and sums in one pass, accumulating in float32."""
    n = inv.shape[0]
    if n == 0 or y.shape[1] == 0:
        return y.new_zeros((n // top_k, y.shape[1]))
    if top_k_weights is not None:
        if top_k_weights.dtype != y.dtype and y.dtype != torch.float64:
            return combine_cpu(y.float(), top_k_weights.float(), inv, offs, top_k).to(y.dtype)
        top_k_weights = top_k_weights.to(y.dtype).reshape(-1)
    skipped, routed = -1, int(offs[-1])
    if routed < n:
        inv, skipped = inv.clamp(max=routed), routed
    bags = torch.arange(0, n, top_k, dtype=torch.int32, device="cpu")
    return _embedding_bag_forward_only(
        y if y.stride(1) == 1 else y.contiguous(), inv, bags, False, 0, False, top_k_weights, False, skipped
    )[0]


def _fake(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    return y.new_empty((inv.shape[0] // top_k, y.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, top_k_weights, inv, offs, top_k = inputs
    ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, top_k_weights, inv, offs)
    ctx.top_k = top_k


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, inv, offs = ctx.saved_tensors
    return *gradients(grad, y, weights, inv, offs, ctx.top_k, ctx.needs_input_grad[0]), None, None, None


def gradients(
    grad: Tensor, y: Tensor | None, weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int, needs_dy: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dy, dweights): the first if it is needed, the second if y is given."""
    dy = dweights = None
    wide = accumulate_dtype(grad.dtype)
    v = invert(inv)
    routed = routed_rows(offs, v.shape[0])
    rows = grad.index_select(0, v.div(top_k, rounding_mode="floor")).to(wide)
    if needs_dy:
        scaled = rows if weights is None else rows * weights.to(wide).reshape(-1).index_select(0, v).unsqueeze(1)
        dy = torch.where(routed, scaled, 0).to(grad.dtype)
    if y is not None and weights is not None:
        dots = torch.where(routed.squeeze(1), (rows * y.to(wide)).sum(1), 0)
        dweights = dots.index_select(0, inv).view(weights.shape).to(weights.dtype)
    return dy, dweights


library.register_fake("combine", _fake, check)
library.register_kernel("combine", "cpu", combine_cpu)
library.register_kernel("combine", "any", combine_generic)
library.register_autograd("combine", _backward, _setup_context)
