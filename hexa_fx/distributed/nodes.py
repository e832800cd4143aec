"""The functions that partitioned graphs call.

A graph holds no process group and no buffer, only sizes and the name of a `PartitionSession`, so that it can be printed, copied and
compared between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

from hexa_fx.distributed.collectives import finish
from hexa_fx.distributed.geometry import Weights
from hexa_fx.distributed.lockstep import in_backward_of
from hexa_fx.distributed.reductions import Destination, LocalWeight, can_defer
from hexa_fx.distributed.session import PartitionSession, find_session
from hexa_fx.distributed.shared_cache import in_backward
from hexa_fx.errors import PlanError
from hexa_fx.ops.library import DirectFunction
from hexa_fx.ops.listed import Listed
from hexa_fx.runtime.program import keep_lists


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which experts compute on ``x``. Tensors are cast before they travel, so autocast halves the bytes."""
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def to_compute_dtype(x: Tensor) -> Tensor:
    """``x`` in the dtype that the experts compute in."""
    return x.to(autocast_dtype(x))


def weight_dtype(weight: Tensor, x: Tensor) -> torch.dtype:
    """The dtype in which a weight is multiplied with ``x``, which has 16 bits under mixed precision of FSDP2 around experts."""
    if torch.is_autocast_enabled(x.device.type):
        return autocast_dtype(weight)
    return x.dtype if weight.dtype == torch.float32 and x.dtype in _MIXED else weight.dtype


_MIXED = (torch.bfloat16, torch.float16)


def in_dtype_of(weight: Any, x: Tensor) -> Any:
    """A weight, which may be a list, as mixed precision around the experts has it; under autocast as it is."""
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return weight
    return weight.to(weight_dtype(weight, x))


def token_counts(x: Tensor, session: str) -> list[int]:
    """T_i of every rank, exchanged between hosts (the device does not wait)."""
    return find_session(session).exchange_counts(int(x.shape[0]))


def check_tokens(x: Tensor, tokens: Sequence[int], session: str) -> Tensor:
    """Returns ``x`` if it has as many rows as the plan fixed for this rank; else raises `PlanError`."""
    active = find_session(session)
    in_backward_of(active.groups.main_name)
    rank = active.groups.rank
    if x.shape[0] != tokens[rank]:
        raise PlanError(
            f"rank {rank} has {x.shape[0]} tokens, the plan fixed {list(tokens)}: plan with static_tokens=False to let "
            "token counts change"
        )
    return x


def own_rows(x: Tensor, tokens: Sequence[int], session: str) -> Tensor:
    """This rank's rows of a tensor that holds the rows of all ranks."""
    rank = find_session(session).groups.rank
    return x.narrow(0, sum(tokens[:rank]), tokens[rank])


def scale_gradient(x: Any, factor: float) -> Any:
    """Returns a weight, which may be a list, unchanged, and multiplies its gradient by ``factor``."""
    if x is None:
        return None
    if type(x) is Listed:
        return x.each(lambda tensor: _ScaleGradient.apply(tensor, factor))
    return _ScaleGradient.apply(x, factor)


keep_lists(in_dtype_of, scale_gradient)


class _ScaleGradient(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def local_weight(weight: Tensor) -> Tensor:
    """This rank's slice of a parameter that is a DTensor over the ranks of the plan; any other tensor as it is."""
    if not isinstance(weight, DTensor):
        return weight
    if is_compiling():
        return weight.to_local()
    if not is_grad_enabled() or not weight.requires_grad:
        return weight._local_tensor.detach()
    result: Tensor = LocalWeight.apply(weight)
    return result


def no_channels(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None, *weights: Tensor | None) -> Tensor:
    """The zeros that `hexa::moe_ffn` would give on a rank with h_i = 0, so that kernels need not support empty weights.

    They take part in autograd, because every rank has to join the collectives of backward.
    """
    result: Tensor = _NoChannels.apply(x, top_k_index, top_k_weights, *weights)
    return result


class _NoChannels(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor | None) -> Tensor:
        ctx.kinds = [None if t is None else (t.shape, t.dtype) for t in (x, *others)]
        return x.new_zeros(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dy = grads[0]
        return tuple(
            dy.new_zeros(kind[0], dtype=kind[1]) if kind is not None and need else None
            for kind, need in zip(ctx.kinds, ctx.needs_input_grad)
        )


def cache_prefetch(
    w1: Tensor, b1: Tensor | None, w3: Tensor | None, b3: Tensor | None, w2: Tensor, layer: str, session: str
) -> None:
    """Starts the gather of a data-centric layer whose `cache_gather` comes later."""
    cache = find_session(session).cache
    dtype = autocast_dtype(w1) if torch.is_autocast_enabled(w1.device.type) else cache.dtype_of(layer) or w1.dtype
    if cache.is_due(layer, dtype):  # mostly it has begun by itself
        one, two, three, four, five = [None if w is None else local_weight(w) for w in (w1, b1, w3, b3, w2)]
        cache.prefetch(layer, (one, two, three, four, five), dtype)


def cache_gather(
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    w2: Tensor,
    shards: Sequence[int],
    x: Tensor,
    layer: str,
    session: str,
) -> Weights:
    """Local slices -> all of the layer's weights, as views of a cache slot (w1 and w3 layout nk, w2 layout kn).

    Backward: packs the weights' gradients, reduce-scatters them to their owners in the plan's ``grad_dtype`` while backward
    goes on, and gives the slot to the layer before.
    """
    weights = (w1, b1, w3, b3, w2)
    active = find_session(session)
    cache = active.cache
    source = cache.source(layer, weights, weight_dtype(w1, x))
    if not is_grad_enabled():
        return active.geometry(layer).views(cache.fetch(layer))
    active.saved_tensors.check_bound()
    result: Weights = _CacheGather.apply(*weights, (active, layer, shards, source))
    active.saved_tensors.hook()
    return result


class _CacheGather(DirectFunction):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        session, layer, shards, source = args[5]
        ctx.session, ctx.layer, ctx.shards, ctx.source, ctx.dtype = session, layer, shards, source, args[0].dtype
        ctx.set_materialize_grads(False)
        return session.geometry(layer).views(session.cache.fetch(layer))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        session: PartitionSession = ctx.session
        plan, geometry, reductions = session.plan, session.geometry(ctx.layer), session.reductions
        source, needs, dtype = ctx.source, ctx.needs_input_grad[:5], ctx.dtype
        in_backward_of(session.groups.main_name)
        with reductions.guard(ctx.layer):
            session.cache.release(ctx.layer)  # first, because it starts the gather of the layer two before
            reductions.finish()  # that of the next layer, which travelled while this layer's experts ran
            rows = geometry.view_grads(grads, dtype if plan.grad_dtype == "parameter" else source.dtype)
            own, works = reductions.start(rows, ctx.shards)

            def local() -> Weights:
                finish(works)
                if plan.grad_scale != 1.0:
                    own.mul_(plan.grad_scale)  # nobody else holds the sum
                return geometry.unpack(own, dtype, needs)

            if not can_defer(ctx, source.weights, source.targets):
                return *local(), None
            reductions.defer(ctx.layer, lambda: _deliver(source.targets, local()))
            return (None,) * 6


def _deliver(targets: Sequence[Destination | None], grads: Sequence[Tensor | None]) -> None:
    for target, grad in zip(targets, grads):
        if target is not None and grad is not None:
            target.add(grad)


def cache_release(y: Tensor, layer: str, session: str) -> Tensor:
    """Returns ``y``, the experts' output, and frees the layer's slot, except in recomputation, which backward follows."""
    active = find_session(session)
    active.saved_tensors.unhook()
    if not in_backward():
        active.cache.release(layer)
    return y


# Dead-code elimination must keep what fills a slot.
torch.fx.node.has_side_effect(cache_prefetch)
