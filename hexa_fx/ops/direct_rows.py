"""reindex, esmm and combine with autograd on a CPU, without torch's dispatcher (see `hexa_fx.ops.direct`).

A small esmm multiplies every row by every expert's weight in one matmul and picks what it needs: fewer calls, little more work.
Picking is exact whatever the numbers are. Gradients are sums with zeros for what was not picked, which are exact unless
something is infinite or NaN. That is checked, and gradients are then computed expert by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd

from hexa_fx.ops import library
from hexa_fx.ops.combine import check as check_combine
from hexa_fx.ops.combine import combine_cpu
from hexa_fx.ops.combine import gradients as combine_gradients
from hexa_fx.ops.cpu import all_finite, settle_allocator
from hexa_fx.ops.dense import MEMORY_BOUND
from hexa_fx.ops.esmm import check as check_esmm
from hexa_fx.ops.esmm import esmm_cpu, projection_backward
from hexa_fx.ops.reindex import check as check_reindex
from hexa_fx.ops.reindex import reindex_cpu
from hexa_fx.ops.rows import accumulate_dtype, expert_of_row, row_count

SPARE_WORK = 1 << 22
"""Multiply-adds of rows by experts that are not theirs, up to which one matmul of all is the faster way."""

_WORK_OF_AN_ELEMENT = 30
"""Multiply-adds of a matmul in the time that picking takes for one element of its result."""

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
    picks = _picks(x, weight, v, offs)
    y: Tensor = (_PickedEsmm if picks else _Esmm).apply(x, weight, bias, v, offs, top_k, layout)
    return y


def combine(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """``hexa::combine``."""
    check_combine(y, top_k_weights, inv, offs, top_k)
    out: Tensor = _Combine.apply(y, top_k_weights, inv, offs, top_k)
    return out


def _picks(x: Tensor, weight: Tensor, v: Tensor | None, offs: Tensor) -> bool:
    """Whether one matmul of all rows and experts is faster."""
    if x.dtype != accumulate_dtype(x.dtype) or not x.numel():
        return False
    experts, one, two = weight.shape
    width = one * two // max(x.shape[1], 1)
    pairs = max(x.shape[0], MEMORY_BOUND) * experts - row_count(x, v)  # one row takes as long as reading all weights
    return pairs * (one * two + _WORK_OF_AN_ELEMENT * width) <= SPARE_WORK


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
        return *_by_expert(ctx, grads[0], *ctx.saved_tensors[:4]), None, None, None, None


def _by_expert(ctx: Any, g: Tensor, x: Tensor | None, weight: Tensor, v: Tensor | None, offs: Tensor) -> Grads:
    args = (x, g, weight, v, offs, *ctx.static, ctx.needs_input_grad[:3])
    if not library.is_plain_tensor(g):
        return projection_backward(*args)
    with _AutoDispatchBelowAutograd():
        return projection_backward(*args)


class _PickedEsmm(torch.autograd.Function):
    """Every row times every expert's weight, of which each row's own expert is picked."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, bias, v, offs, top_k, layout = args
        settle_allocator()
        with _AutoDispatchBelowAutograd():
            flat, experts = _flat(weight, layout), weight.shape[0]
            routed, place = _places(v, offs, top_k, x.shape[0], experts)
            every = torch.mm(x, flat.t()) if bias is None else torch.addmm(bias.reshape(-1), x, flat.t())
            y = every.view(-1, flat.shape[0] // experts).index_select(0, place)
            y[routed:].zero_()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, v, offs, place)
        ctx.static, ctx.routed, ctx.rows = (top_k, layout), routed, x.shape[0]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        g = grads[0]
        x, weight, v, offs, place = ctx.saved_tensors
        found = None
        if library.is_plain_tensor(g):
            with _AutoDispatchBelowAutograd():
                found = _picked_gradients(ctx, g, x, weight, place)
        return *(found or _by_expert(ctx, g, x, weight, v, offs)), None, None, None, None


def _picked_gradients(ctx: Any, g: Tensor, x: Tensor | None, weight: Tensor, place: Tensor) -> Grads | None:
    """(dx, dW, db), each if it is needed; None if they are not finite."""
    (_, layout), routed, needs = ctx.static, ctx.routed, ctx.needs_input_grad
    experts, width = weight.shape[0], g.shape[1]
    every = g.new_zeros((ctx.rows * experts, width))
    every.index_add_(0, place[:routed], g[:routed])  # a token may have the same expert twice
    every = every.view(-1, experts * width)
    dx = torch.mm(every, _flat(weight, layout)) if needs[0] else None
    dw = torch.mm(every.t(), x).view(experts, width, -1) if needs[1] and x is not None else None
    if dw is not None and layout == "kn":
        dw = dw.transpose(1, 2).contiguous()
    db = every.sum(0).view(experts, width) if needs[2] else None
    found = (dx, dw, db)
    return found if all_finite(t for t in found if t is not None) else None


def _flat(weight: Tensor, layout: str) -> Tensor:
    """(E * N, K)."""
    weight = weight.transpose(1, 2) if layout == "kn" else weight
    return weight.reshape(-1, weight.shape[2])


def _places(v: Tensor | None, offs: Tensor, top_k: int, rows: int, experts: int) -> tuple[int, Tensor]:
    """The number of routed rows, and for every row its index (n,) among all pairs of rows and experts."""
    count = rows if v is None else v.shape[0]
    routed, own = int(offs[-1]), expert_of_row(offs, count)
    if routed < count:
        own = own.clamp_(max=experts - 1)
    if v is None:
        return routed, own.add_(torch.arange(0, count * experts, experts))
    base = v if top_k == 1 else v.div(top_k, rounding_mode="floor")
    return routed, own.add_(base, alpha=experts)


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
