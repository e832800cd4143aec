"""reindex, esmm and combine with autograd on a CPU, without torch's dispatcher (see `hexa_fx.ops.direct`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.combine import combine_backward, combine_cpu, keep_for_combine
from hexa_fx.ops.esmm import esmm_backward, esmm_cpu, keep_for_esmm
from hexa_fx.ops.reindex import reindex_cpu
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table import Combine, Esmm, Reindex
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

Grads = tuple[Tensor | None, ...]


def reindex(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``hexa::reindex``."""
    Reindex._make(args).check("reindex")
    return reindex_cpu(*args)


def esmm(*args: Any) -> Tensor:
    """``hexa::esmm``."""
    Esmm._make(args).check("esmm")
    y: Tensor = _Esmm.apply(*args)
    return y


def combine(*args: Any) -> Tensor:
    """``hexa::combine``."""
    Combine._make(args).check("combine")
    out: Tensor = _Combine.apply(*args)
    return out


class _Esmm(torch.autograd.Function):
    """esmm by its kernels, of which its gradients are made too."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        keep_for_esmm(ctx, args)
        with _AutoDispatchBelowAutograd():
            return esmm_cpu(Esmm._make(args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        with _AutoDispatchBelowAutograd() if library.is_plain_tensor(grads[0]) else nullcontext():
            return esmm_backward(ctx, grads[0])


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        keep_for_combine(ctx, args)
        with _AutoDispatchBelowAutograd():
            return combine_cpu(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        if not library.is_plain_tensor(grads[0]):
            return combine_backward(ctx, grads[0])
        with _AutoDispatchBelowAutograd():
            return combine_backward(ctx, grads[0], _combine_gradients)


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
