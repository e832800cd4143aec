"""``hexa::combine``: the weighted sum of every token's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.rows import accumulate_dtype, invert, routed_rows
from hexa_fx.ops.table import Combine
from hexa_fx.torch_private import _embedding_bag_forward_only

combine = library.wrapper("combine")


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


def keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None = None) -> None:
    """What backward needs."""
    o, needs = Combine._make(inputs), Combine.marks(ctx.needs_input_grad)
    ctx.save_for_backward(o.y if needs.top_k_weights else None, o.top_k_weights, o.inv, o.offs)
    ctx.top_k = o.top_k


def _gradients(
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


def combine_backward(ctx: Any, grad: Tensor, gradients: Callable[..., Any] = _gradients) -> tuple[Tensor | None, ...]:
    """Gradients of every argument. gradients: as `_gradients`."""
    y, weights, inv, offs = ctx.saved_tensors
    needs_dy = bool(Combine.marks(ctx.needs_input_grad).y)
    dy, dweights = gradients(grad, y, weights, inv, offs, ctx.top_k, needs_dy)
    return Combine.by_argument(y=dy, top_k_weights=dweights)


library.register_kernel("combine", "cpu", combine_cpu)
library.register_kernel("combine", "any", combine_generic)
library.register_autograd("combine", combine_backward, keep_for_combine)
