"""``hexa::reindex``: the re-index vector of the paper (Algorithm 1), compact and stable."""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library

_FEW_SLOTS = 64
_MANY_SLOTS = 2048

library.define("reindex(Tensor top_k_index, SymInt num_experts) -> (Tensor v, Tensor inv, Tensor offs)")


def reindex(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the routed rows by expert (paper, Algorithm 1).

    Args:
        top_k_index: (T, k) integer, expert of every slot ``t*k + s``. ``num_experts`` is the sentinel: that slot
            contributes nothing.
        num_experts: E.

    Returns:
        v: (T*k,) int32, slot of every row, sorted by expert, stable; sentinel slots last.
        inv: (T*k,) int32, row of every slot.
        offs: (E+1,) int32, rows of expert e are ``offs[e] .. offs[e+1]``.

    Raises:
        InputError: wrong shape or dtype; on a CPU also for an id below 0 or above ``num_experts``. Other devices do not
            look (that would stop the device) and take such an id as the sentinel.
    """
    v, inv, offs = torch.ops.hexa.reindex(top_k_index, num_experts)
    return v, inv, offs


def check(top_k_index: Tensor, num_experts: int) -> None:
    """Shape and dtype of the arguments."""
    if top_k_index.ndim != 2 or top_k_index.dtype not in checks.INTEGER:
        raise InputError(
            f"hexa::reindex: top_k_index is {checks.shape(top_k_index)}; expected integer (tokens, experts a token)"
        )
    checks.require(num_experts >= 1, "reindex", f"num_experts is {num_experts}; expected 1 or more")


def reindex_cpu(top_k_index: Tensor, num_experts: int, inverse: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
    """CPU kernel: a stable sort, and the offsets by bisection of the sorted ids. Without ``inverse`` inv is None."""
    ids = top_k_index.reshape(-1)
    if ids.numel() <= _FEW_SLOTS:
        return _reindex_few(ids.tolist(), num_experts, inverse)
    if ids.numel() >= _MANY_SLOTS:
        _check_range(ids, num_experts)
        ids = ids.to(_narrowest(num_experts))
    ids, order = torch.sort(ids, stable=True)
    offs = torch.searchsorted(ids, _expert_ids(num_experts, ids.dtype), out_int32=True)
    if ids.numel() and (offs[0].item() or ids[-1].item() > num_experts):
        _check_range(top_k_index, num_experts)
    if not inverse:
        return order.to(torch.int32), None, offs
    rows = torch.arange(order.shape[0], dtype=torch.int32)
    return order.to(torch.int32), torch.empty_like(rows).scatter_(0, order, rows), offs


def _reindex_few(ids: list[int], num_experts: int, inverse: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same in Python: a dozen tensor operators cost more than sorting a few numbers."""
    slots = sorted(range(len(ids)), key=ids.__getitem__)
    if slots and (ids[slots[0]] < 0 or ids[slots[-1]] > num_experts):
        _refuse(ids[slots[0]], ids[slots[-1]], num_experts)
    counts = [0] * (num_experts + 2)
    for e in ids:
        counts[e + 1] += 1
    rows = [0] * len(ids)
    for row, slot in enumerate(slots):
        rows[slot] = row
    return _int32(slots), _int32(rows) if inverse else None, _int32(list(accumulate(counts[: num_experts + 1])))


def _int32(values: list[int]) -> Tensor:
    return torch.frombuffer(array("i", values), dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)


def _check_range(ids: Tensor, num_experts: int) -> None:
    low, high = (int(t) for t in torch.aminmax(ids))
    _refuse(low, high, num_experts)


def _refuse(low: int, high: int, num_experts: int) -> None:
    if low < 0 or high > num_experts:
        raise InputError(
            f"hexa::reindex: expert ids run from {low} to {high}; expected 0 to {num_experts - 1}, or {num_experts} "
            "for a slot that contributes nothing"
        )


def _narrowest(num_experts: int) -> torch.dtype:
    """torch sorts short integers by radix, in a fraction of the time."""
    if num_experts <= torch.iinfo(torch.uint8).max:
        return torch.uint8
    return torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32


@lru_cache(maxsize=64)
def _expert_ids(num_experts: int, dtype: torch.dtype) -> Tensor:
    """0 .. E, read only."""
    return torch.arange(num_experts + 1, dtype=dtype)


def _fake(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    n = top_k_index.shape[0] * top_k_index.shape[1]
    int32 = {"dtype": torch.int32, "device": top_k_index.device}
    return torch.empty(n, **int32), torch.empty(n, **int32), torch.empty(num_experts + 1, **int32)  # type: ignore[call-overload]


library.register_kernel("reindex", "cpu", reindex_cpu, check)
library.register_fake("reindex", _fake, check)
