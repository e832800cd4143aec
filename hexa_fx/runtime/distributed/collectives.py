"""Collectives over unequal shards, as operators.

Shards are rows: rank i holds ``sizes[i]`` rows, and all ranks pass the same ``sizes``. A group is named by the string
that torch's functional collectives use. Results are pending until ``_c10d_functional.wait_tensor``.

Equal sizes take torch's own tensor collectives. Unequal ones take what was measured to be fastest without padding:
lists of views on NCCL (grouped broadcasts and reduces), on Gloo one broadcast an owner and an all-to-all with a local
sum, which also adds in rank order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Registers the autograd formulas of torch.ops._c10d_functional. Without this import the gradients of all_reduce and
# reduce_scatter_tensor are silently those of one rank.
import torch.distributed._functional_collectives as _functional_collectives
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from hexa_fx.runtime.distributed import lost
from hexa_fx.runtime.distributed.groups import guarded

__all__ = ["all_gather_into", "all_reduce_", "count_traffic", "fill_slot", "gather_even", "scatter_sum", "wait"]

assert _functional_collectives is not None

_resolve_process_group: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009

_traffic: list[Counter[str]] = []


@contextmanager
def count_traffic() -> Iterator[Counter[str]]:
    """Counts the bytes this rank receives in hexa's collectives, by operator name, while the context is open."""
    counter: Counter[str] = Counter()
    _traffic.append(counter)
    try:
        yield counter
    finally:
        _traffic.remove(counter)


def _count(name: str, nbytes: int) -> None:
    for counter in _traffic:
        counter[name] += nbytes


def wait(x: Tensor) -> Tensor:
    """The tensor, once the collectives that write it are done (on CUDA: in stream order)."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor.default(x)
    return result


# torch 2.13 renames the two; 2.11 knows only the old names.
gather_even = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_even = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _row_bytes(x: Tensor) -> int:
    numel = 1
    for size in x.shape[1:]:
        numel *= size
    return numel * x.element_size()


def _is_even(sizes: Sequence[int]) -> bool:
    return sizes[0] > 0 and all(size == sizes[0] for size in sizes)


def _is_nccl(group: Any, device: torch.device) -> bool:
    # A group may have one backend a device type, so the group's own name does not tell.
    return device.type == "cuda" and "nccl" in group._get_backend(device).name().lower()


def _pending(out: Tensor, works: Iterable[Any], group: str) -> Tensor:
    for work in works:
        _register_work(out, lost.keep(group, work))
    return out


def _group(name: str) -> Any:
    """The process group, unless one of its ranks is lost."""
    if lost.alarm:
        lost.check("a collective", name)
    return _resolve_process_group(name)


def all_reduce_(x: Tensor, group: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """``x`` reduced over the ranks, in place; in stream order on CUDA."""
    lost.keep(group, dist.all_reduce(x, op=op, group=_group(group), async_op=True)).wait()
    return x


def _start_gather(out: Tensor, x: Tensor, sizes: Sequence[int], group: Any) -> list[Any]:
    rank = dist.get_rank(group)
    _count("all_gather_v", (sum(sizes) - sizes[rank]) * _row_bytes(x))
    x = x.contiguous()
    if _is_even(sizes):
        return [gather_even(out, x, group=group, async_op=True)]
    parts = list(out.split(list(sizes)))
    if _is_nccl(group, x.device):
        return [dist.all_gather(parts, x, group=group, async_op=True)]
    parts[rank].copy_(x)
    owners = [dist.get_global_rank(group, i) for i in range(len(sizes))]
    return [dist.broadcast(p, o, group=group, async_op=True) for p, o in zip(parts, owners) if p.numel()]


def _check_rows(name: str, x: Tensor, rows: int, sizes: Sequence[int]) -> None:
    # torch's own collectives would hang, abort the process or finish with wrong data here, depending on the backend
    if x.shape[0] != rows:
        raise ValueError(f"hexa::{name}: this rank has {x.shape[0]} rows, sizes {list(sizes)} promise {rows}")


@torch.library.custom_op("hexa::all_gather_v", mutates_args=(), schema="(Tensor x, int[] sizes, str group) -> Tensor")
def all_gather_v(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """Rows of all ranks, in rank order: (sizes[rank], ...) -> (sum(sizes), ...). Pending until waited for."""
    pg = _group(group)
    _check_rows("all_gather_v", x, sizes[dist.get_rank(pg)], sizes)
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    return _pending(out, _start_gather(out, x, sizes, pg), group)


@torch.library.custom_op(
    "hexa::all_gather_v_", mutates_args=("out",), schema="(Tensor(a!) out, Tensor x, int[] sizes, str group) -> ()"
)
def all_gather_into(out: Tensor, x: Tensor, sizes: Sequence[int], group: str) -> None:
    """`all_gather_v` into a given (sum(sizes), ...) tensor.

    An operator of our own, because a write through ``.data`` or a plain broadcast does not tell autograd that saved
    views of ``out`` became stale.
    """
    _gather_into(out, x, sizes, group)


def _gather_into(out: Tensor, x: Tensor, sizes: Sequence[int], group: str) -> None:
    pg = _group(group)
    _check_rows("all_gather_v_", x, sizes[dist.get_rank(pg)], sizes)
    _pending(out, _start_gather(out, x, sizes, pg), group)


def fill_slot(out: Tensor, x: Tensor, sizes: Sequence[int], group: str) -> None:
    """`all_gather_into` for the runtime: the dispatcher takes longer to reach it than a small gather takes to start."""
    _gather_into(out, x, sizes, group)
    torch.autograd.graph.increment_version(out)


@torch.library.custom_op(
    "hexa::reduce_scatter_v", mutates_args=(), schema="(Tensor x, int[] sizes, str group) -> Tensor"
)
def reduce_scatter_v(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """Sum over ranks, each rank keeping its rows: (sum(sizes), ...) -> (sizes[rank], ...). Pending until waited for."""
    return scatter_sum(x, sizes, group)


def scatter_sum(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """`reduce_scatter_v` for the runtime, without the dispatcher and without a gradient of its own."""
    pg = _group(group)
    rank, world = dist.get_rank(pg), len(sizes)
    _check_rows("reduce_scatter_v", x, sum(sizes), sizes)
    _count("reduce_scatter_v", (world - 1) * sizes[rank] * _row_bytes(x))
    x = x.contiguous()
    out = x.new_empty((sizes[rank], *x.shape[1:]))
    if _is_even(sizes):
        return _pending(out, [_scatter_even(out, x, group=pg, async_op=True)], group)
    if _is_nccl(pg, x.device):
        return _pending(out, [dist.reduce_scatter(out, list(x.split(list(sizes))), group=pg, async_op=True)], group)
    pieces = x.new_empty((world * sizes[rank], *x.shape[1:]))
    dist.all_to_all_single(pieces, x, [sizes[rank]] * world, list(sizes), group=pg)
    return pieces.view(world, sizes[rank], *x.shape[1:]).sum(0)


@all_gather_v.register_fake
def _(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    return x.new_empty((sum(sizes), *x.shape[1:]))


@all_gather_into.register_fake
def _(out: Tensor, x: Tensor, sizes: Sequence[int], group: str) -> None:
    return None


@reduce_scatter_v.register_fake
def _(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    return x.new_empty((sizes[dist.get_rank(_resolve_process_group(group))], *x.shape[1:]))


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes, ctx.group = list(inputs[1]), inputs[2]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    with guarded("the backward of an all-gather", ctx.group):
        return wait(torch.ops.hexa.reduce_scatter_v(grad, ctx.sizes, ctx.group)), None, None


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    with guarded("the backward of a reduce-scatter", ctx.group):
        return wait(torch.ops.hexa.all_gather_v(grad, ctx.sizes, ctx.group)), None, None


all_gather_v.register_autograd(_gather_backward, setup_context=_keep_sizes)
reduce_scatter_v.register_autograd(_scatter_backward, setup_context=_keep_sizes)
