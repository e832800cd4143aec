"""Collectives over unequal shards of rows, of which rank i holds ``sizes[i]``. All ranks pass the same ``sizes``.

A group is named by a string, as in torch's functional collectives, so that graphs can be printed and compared between
ranks. Graphs call `all_gather_v`, `reduce_scatter_v` and `all_reduce`, which are differentiable and whose results are pending
until `wait`. The runtime calls `start_gather`, `fill_slot` and `start_scatter`, which have no gradients and return what to wait
for, and `all_reduce_`, which waits. None of them is a torch operator, because the dispatcher would take longer than a small
collective takes to start.

Equal sizes use torch's own tensor collectives. Unequal sizes use what measured fastest without padding: lists of views on NCCL
(grouped broadcasts and reduces); on Gloo one broadcast per owner, and an all-to-all with a local sum in rank order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from hexa_fx.distributed.lockstep import guarded, in_backward_of
from hexa_fx.errors import PlanError
from hexa_fx.ops.library import DirectFunction

__all__ = [
    *("all_gather_v", "all_reduce", "all_reduce_", "count_traffic", "fill_slot", "finish", "reduce_scatter_v"),
    *("start_gather", "start_scatter", "wait"),
]

Works = list[Any]
"""Collectives under way."""

_WORKS = "_hexa_works"
"""The attribute of a pending tensor that has the collectives which write it. Torch's own registry is behind its dispatcher."""

_resolve_process_group: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
_traffic: list[Counter[str]] = []


@contextmanager
def count_traffic() -> Iterator[Counter[str]]:
    """A context that counts the bytes this rank receives in our collectives, by operator name."""
    counter: Counter[str] = Counter()
    _traffic.append(counter)
    try:
        yield counter
    finally:
        _traffic.remove(counter)


def _count(name: str, nbytes: int) -> None:
    for counter in _traffic:
        counter[name] += nbytes


# --- what graphs call ------------------------------------------------------------------------------------------------


def wait(x: Tensor) -> Tensor:
    """The tensor, once the collectives that write it are done (on CUDA: in stream order).

    Raises:
        PlanError: the tensor is not what one of the functions below returned.
    """
    works = getattr(x, _WORKS, None)
    if works is None:
        raise PlanError("a graph waits for a tensor that no collective writes: wait for what the collective returned")
    with _AutoDispatchBelowAutograd():  # Gloo copies its result on arrival, which autograd must not record
        finish(works)
    setattr(x, _WORKS, ())
    return x


def all_gather_v(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """Rows of all ranks, in rank order: (sizes[rank], ...) -> (sum(sizes), ...). Pending until waited for.

    Raises:
        ValueError: this rank has another number of rows.
    """
    if is_grad_enabled() and x.requires_grad:
        return _Gather.apply(x, sizes, group)  # type: ignore[no-any-return]
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    return _pending(out, start_gather(out, x, sizes, group))


def reduce_scatter_v(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """Sum over ranks, each rank keeping its rows: (sum(sizes), ...) -> (sizes[rank], ...). Pending until waited for.

    Raises:
        ValueError: this rank has another number of rows.
    """
    if is_grad_enabled() and x.requires_grad:
        return _Scatter.apply(x, sizes, group)  # type: ignore[no-any-return]
    return _pending(*start_scatter(x, sizes, group))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum over ranks, on all ranks. Pending until waited for."""
    if is_grad_enabled() and x.requires_grad:
        return _Reduce.apply(x, group)  # type: ignore[no-any-return]
    out = x.clone(memory_format=torch.contiguous_format)
    return _pending(out, [dist.all_reduce(out, group=_resolve_process_group(group), async_op=True)])


class _Gather(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return all_gather_v(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with guarded("the backward of an all-gather"):
            return wait(reduce_scatter_v(grads[0], ctx.sizes, ctx.group)), None, None


class _Scatter(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return reduce_scatter_v(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with guarded("the backward of a reduce-scatter"):
            in_backward_of(ctx.group)
            return wait(all_gather_v(grads[0], ctx.sizes, ctx.group)), None, None


class _Reduce(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with guarded("the backward of an all-reduce"):
            in_backward_of(ctx.group)
            return wait(all_reduce(grads[0], ctx.group)), None


def _pending(out: Tensor, works: Works) -> Tensor:
    setattr(out, _WORKS, works)
    return out


# --- what the runtime calls ------------------------------------------------------------------------------------------


def finish(works: Sequence[Any]) -> None:
    """Waits for collectives (on CUDA: in stream order)."""
    for work in works:
        work.wait()


def start_gather(out: Tensor, x: Tensor, sizes: Sequence[int], group: str) -> Works:
    """Starts `all_gather_v` into a given (sum(sizes), ...) tensor, of which ``x`` may be this rank's part."""
    pg = _resolve_process_group(group)
    rank = pg.rank()
    if x.shape[0] != sizes[rank]:
        raise _wrong_rows("all_gather_v", x, sizes[rank], sizes)
    if _traffic:
        _count("all_gather_v", (sum(sizes) - sizes[rank]) * _row_bytes(x))
    return _gather(out, x.contiguous(), sizes, pg, rank)


def fill_slot(out: Tensor, x: Tensor, sizes: Sequence[int], group: str) -> Works:
    """`start_gather` into a buffer in use: also tells autograd that saved views of ``out`` are stale, which torch would not."""
    works = start_gather(out, x, sizes, group)
    torch.autograd.graph.increment_version(out)
    return works


def start_scatter(x: Tensor, sizes: Sequence[int], group: str) -> tuple[Tensor, Works]:
    """Starts `reduce_scatter_v`: the result, and what to wait for."""
    pg = _resolve_process_group(group)
    rank = pg.rank()
    if x.shape[0] != sum(sizes):
        raise _wrong_rows("reduce_scatter_v", x, sum(sizes), sizes)
    if _traffic:
        _count("reduce_scatter_v", (len(sizes) - 1) * sizes[rank] * _row_bytes(x))
    out = x.new_empty((sizes[rank], *x.shape[1:]))
    return out, _scatter(out, x.contiguous(), sizes, pg)


def all_reduce_(x: Tensor, group: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """``x`` reduced over the ranks, in place; in stream order on CUDA."""
    dist.all_reduce(x, op=op, group=_resolve_process_group(group))
    return x


def _wrong_rows(name: str, x: Tensor, rows: int, sizes: Sequence[int]) -> ValueError:
    # here torch's own collectives would hang, abort the process or finish with wrong data, depending on the backend
    return ValueError(f"{name}: this rank has {x.shape[0]} rows, sizes {list(sizes)} promise {rows}")


# What torch.distributed's functions of these names call, without their type and group checks.
_GATHER, _SCATTER = AllgatherOptions(), ReduceScatterOptions()
_GATHER.asyncOp = _SCATTER.asyncOp = True


def _gather(out: Tensor, x: Tensor, sizes: Sequence[int], group: Any, rank: int) -> Works:
    if _is_even(sizes):
        return [group._allgather_base(out, x, _GATHER)]
    parts = list(out.split(list(sizes)))
    if _is_nccl(group, x.device):
        return [dist.all_gather(parts, x, group=group, async_op=True)]
    if parts[rank].data_ptr() != x.data_ptr():
        parts[rank].copy_(x)
    owners = [dist.get_global_rank(group, i) for i in range(len(sizes))]
    return [dist.broadcast(p, o, group=group, async_op=True) for p, o in zip(parts, owners) if p.numel()]


def _scatter(out: Tensor, x: Tensor, sizes: Sequence[int], group: Any) -> Works:
    if _is_even(sizes):
        return [group._reduce_scatter_base(out, x, _SCATTER)]
    if _is_nccl(group, x.device):
        return [dist.reduce_scatter(out, list(x.split(list(sizes))), group=group, async_op=True)]
    world, mine = len(sizes), out.shape[0]
    pieces = x.new_empty((world * mine, *x.shape[1:]))
    dist.all_to_all_single(pieces, x, [mine] * world, list(sizes), group=group)
    torch.sum(pieces.view(world, *out.shape), 0, out=out)
    return []


def _is_even(sizes: Sequence[int]) -> bool:
    return sizes[0] > 0 and sizes.count(sizes[0]) == len(sizes)


def _is_nccl(group: Any, device: torch.device) -> bool:
    # A group may have a backend for each device type, so its own name does not tell.
    return device.type == "cuda" and "nccl" in group._get_backend(device).name().lower()


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()
