"""``hexa::reindex``: the re-index vector of the paper (Algorithm 1), compact and stable."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hexa_fx.config import checked_mode
from hexa_fx.errors import InputError
from hexa_fx.ops import library

_FEW_SLOTS = 64
_MANY_SLOTS = 2048

reindex = library.wrapper("reindex")


def reindex_cpu(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """CPU kernel."""
    return sort_slots(top_k_index, num_experts).tensors()


@dataclass(frozen=True)
class SortedSlots:
    """A sorted routing, as the CPU kernels use it.

    Args:
        slots: (n,) int64, slot of every row.
        token: (n,) int64, ``slots // top_k``.
        bounds: E + 1 row offsets.
    """

    slots: Tensor
    token: Tensor
    bounds: list[int]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """(v, inv, offs) of reindex."""
        if self.slots.shape[0] <= _FEW_SLOTS:
            slots = self.slots.tolist()
            inverse = [0] * len(slots)
            for row, slot in enumerate(slots):
                inverse[slot] = row
            return int_tensor("i", slots), int_tensor("i", inverse), int_tensor("i", self.bounds)
        rows = torch.arange(self.slots.shape[0], dtype=torch.int32, device="cpu")
        inv = torch.empty_like(rows).scatter_(0, self.slots, rows)
        return self.slots.to(torch.int32), inv, int_tensor("i", self.bounds)


def sort_slots(top_k_index: Tensor, num_experts: int) -> SortedSlots:
    """A stable sort of the slots by expert; ids out of range are sentinels.

    Raises:
        InputError: there is one, with HEXA_FX_CHECKED=1.
    """
    tokens, top_k = top_k_index.shape
    if tokens * top_k <= _FEW_SLOTS:
        return _sort_few([e for row in top_k_index.tolist() for e in row], top_k, num_experts)
    ids = top_k_index.reshape(-1)
    if tokens * top_k >= _MANY_SLOTS:
        ids = _within_range(ids, num_experts).to(_narrowest(num_experts))
    in_order, slots = torch.sort(ids, stable=True)
    *bounds, end = torch.searchsorted(in_order, _boundaries(num_experts, ids.dtype), out_int32=True).tolist()
    if bounds[0] or end != tokens * top_k:
        return sort_slots(_within_range(ids, num_experts).reshape(tokens, top_k), num_experts)
    token = slots if top_k == 1 else slots.div(top_k, rounding_mode="floor")
    return SortedSlots(slots, token, bounds)


def _sort_few(ids: list[int], top_k: int, num_experts: int) -> SortedSlots:
    """As `sort_slots`, in Python, because a dozen tensor operators cost more than sorting a few numbers."""
    order = sorted(range(len(ids)), key=ids.__getitem__)
    if ids and (ids[order[0]] < 0 or ids[order[-1]] > num_experts):
        _refuse_if_checked(ids[order[0]], ids[order[-1]], num_experts)
        return _sort_few([e if 0 <= e < num_experts else num_experts for e in ids], top_k, num_experts)
    bounds = [0] * (num_experts + 2)
    for e in ids:
        bounds[e + 1] += 1
    bounds = list(accumulate(bounds[: num_experts + 1]))
    slots = int_tensor("q", order)
    return SortedSlots(slots, slots if top_k == 1 else int_tensor("q", [s // top_k for s in order]), bounds)


def int_tensor(code: str, values: list[int]) -> Tensor:
    """An int32 (``i``) or int64 (``q``) tensor of a few numbers, made three times as fast as by torch.tensor."""
    dtype = torch.int32 if code == "i" else torch.int64
    return torch.frombuffer(array(code, values), dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")


def _within_range(ids: Tensor, num_experts: int) -> Tensor:
    """``ids`` (n,) with the sentinel in place of those out of range."""
    low, high = (int(t) for t in torch.aminmax(ids))
    if low >= 0 and high <= num_experts:
        return ids
    _refuse_if_checked(low, high, num_experts)
    ids = ids.to(torch.int64)
    return ids.masked_fill((ids < 0) | (ids > num_experts), num_experts)


def _refuse_if_checked(low: int, high: int, num_experts: int) -> None:
    if checked_mode():
        raise out_of_range(low, high, num_experts)


def out_of_range(low: int, high: int, num_experts: int) -> InputError:
    """What is said in checked mode of ids below 0 or above ``num_experts``."""
    return InputError(
        f"hexa::reindex: expert ids run from {low} to {high}; expected 0 to {num_experts - 1}, or {num_experts} for a "
        "slot that contributes nothing"
    )


def _narrowest(num_experts: int) -> torch.dtype:
    """The narrowest integer type that holds the ids: torch sorts short ones by radix, in a fraction of the time."""
    if num_experts < torch.iinfo(torch.uint8).max:
        return torch.uint8
    return torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32


@lru_cache(maxsize=64)
def _boundaries(num_experts: int, dtype: torch.dtype) -> Tensor:
    """The numbers 0 .. E + 1; do not write to it."""
    return torch.arange(num_experts + 2, dtype=dtype, device="cpu")


library.register_kernel("reindex", "cpu", reindex_cpu)
