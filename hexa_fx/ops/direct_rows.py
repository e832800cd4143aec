"""reindex, esmm and combine with autograd on a CPU, without torch's dispatcher (see `hexa_fx.ops.direct`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.combine import check as check_combine
from hexa_fx.ops.combine import combine_cpu
from hexa_fx.ops.combine import gradients as combine_gradients
from hexa_fx.ops.esmm import check as check_esmm
from hexa_fx.ops.esmm import esmm_cpu, projection_backward
from hexa_fx.ops.reindex import check as check_reindex
from hexa_fx.ops.reindex import reindex_cpu
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

Grads = tuple[Tensor | None, ...]


def reindex(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``hexa::reindex``."""
    check_reindex(top_k_index, num_experts)
    return reindex_cpu(top_k_index, num_experts)


def esmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: str
) -> Tensor:
    """``hexa::esmm``."""
    check_esmm(x, weight, bias, v, offs, top_k, layout)
    y: Tensor = _Esmm.apply(x, weight, bias, v, offs, top_k, layout)
    return y


def combine(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """``hexa::combine``."""
    check_combine(y, top_k_weights, inv, offs, top_k)
    out: Tensor = _Combine.apply(y, top_k_weights, inv, offs, top_k)
    return out


class _Esmm(torch.autograd.Function):
    """esmm by its kernels, of which its gradients are made too."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, _, v, offs, top_k, layout = args
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, v, offs)
        ctx.static = (top_k, layout)
        with _AutoDispatchBelowAutograd():
            return esmm_cpu(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, weight, v, offs = ctx.saved_tensors
        args = (x, grads[0], weight, v, offs, *ctx.static, ctx.needs_input_grad[:3])
        if not library.is_plain_tensor(grads[0]):
            return *projection_backward(*args), None, None, None, None
        with _AutoDispatchBelowAutograd():
            return *projection_backward(*args), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        y, weights, inv, offs, top_k = args
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, weights, inv, offs)
        ctx.top_k = top_k
        with _AutoDispatchBelowAutograd():
            return combine_cpu(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        grad, (y, weights, inv, offs) = grads[0], ctx.saved_tensors
        args = (grad, y, weights, inv, offs, ctx.top_k, ctx.needs_input_grad[0])
        if not library.is_plain_tensor(grad):
            return *combine_gradients(*args), None, None, None
        with _AutoDispatchBelowAutograd():
            return *_combine_gradients(*args), None, None, None


def _combine_gradients(
    grad: Tensor, y: Tensor | None, weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int, needs_dy: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dy, dweights) by slot, so that no index has to be inverted."""
    wide = accumulate_dtype(grad.dtype)
    tokens, columns = grad.shape
    routed, per_token = int(offs[-1]), grad.to(wide).unsqueeze(1)
    dy = dweights = None
    if needs_dy:
        slots = per_token if weights is None else per_token * weights.to(wide).unsqueeze(2)
        slots = slots.expand(tokens, top_k, columns).reshape(-1, columns).to(grad.dtype)
        dy = torch.empty_like(slots).index_copy_(0, inv.long(), slots)
        dy[routed:].zero_()
    if y is not None and weights is not None:
        dots = (y.index_select(0, inv).view(tokens, top_k, columns).to(wide) * per_token).sum(2)
        if routed < inv.shape[0]:
            dots.masked_fill_((inv >= routed).view(tokens, top_k), 0)
        dweights = dots.to(weights.dtype)
    return dy, dweights
