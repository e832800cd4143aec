"""Rows sorted by expert, and back: ``hexa::reindex``, the re-index vector of the paper (Algorithm 1), compact and stable, and
``hexa::combine``, the weighted sum of every token's slots.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hexa_fx.config import checked_mode
from hexa_fx.errors import InputError
from hexa_fx.ops import library
from hexa_fx.ops.rows import accumulate_dtype, invert, routed_rows
from hexa_fx.ops.table import Combine
from hexa_fx.torch_private import _embedding_bag_forward_only

_FEW_SLOTS = 64
_MANY_SLOTS = 2048


def reindex_cpu(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
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


def reindex_any(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable sort; ids out of range are sentinels."""
    ids = top_k_index.reshape(-1).to(torch.int32)
    ids = torch.where((ids < 0) | (ids > num_experts), num_experts, ids)
    ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    offs = torch.searchsorted(ids, experts, out_int32=True)
    v = order.to(torch.int32)
    return v, invert(v), offs


library.register_kernel("reindex", "cpu", reindex_cpu)
library.register_kernel("reindex", "any", reindex_any)


def combine_generic(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    wide = accumulate_dtype(y.dtype)
    slots = torch.where(routed_rows(offs, y.shape[0]), y, 0).to(wide).index_select(0, inv)
    if top_k_weights is not None:
        w = top_k_weights.to(wide).reshape(-1, 1)
        slots = torch.where((inv < offs[-1]).unsqueeze(1), slots * w, 0)
    return slots.view(-1, top_k, y.shape[1]).sum(1).to(y.dtype)


def combine_cpu(y: Tensor, top_k_weights: Tensor | None, inv: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """Torch's embedding bag gathers and sums in one pass, accumulating in float32."""
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


@library.formula("combine", y="top_k_weights")
def _of_combine(o: Combine, needs: Any, grad: Tensor) -> dict[str, Any]:
    y, weights, inv, offs, top_k = o
    dy = dweights = None
    wide, v = accumulate_dtype(grad.dtype), invert(inv)
    routed = routed_rows(offs, v.shape[0])
    rows = grad.index_select(0, v.div(top_k, rounding_mode="floor")).to(wide)
    if needs.y:
        scaled = rows if weights is None else rows * weights.to(wide).reshape(-1).index_select(0, v).unsqueeze(1)
        dy = torch.where(routed, scaled, 0).to(grad.dtype)
    if weights is not None and needs.top_k_weights:
        dots = torch.where(routed.squeeze(1), (rows * y.to(wide)).sum(1), 0)
        dweights = dots.index_select(0, inv).view(weights.shape).to(weights.dtype)
    return {"y": dy, "top_k_weights": dweights}


library.register_kernel("combine", "cpu", combine_cpu)
library.register_kernel("combine", "any", combine_generic)
