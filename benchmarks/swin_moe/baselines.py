"""Other ways to run the model's experts, with the same parameters and the same signature as `model.Experts`.

    loop       tokens of an expert at a time, as the model's own code
    grouped    rows in expert order and torch's grouped matmul: dropless, as MegaBlocks' dMoE
    padded     Tutel's static formulation: C = ceil(f k T / E) places an expert, tokens over it dropped, places left over computed

Over several ranks all of them are expert-parallel, as the libraries in the paper: rank r owns E/N experts, and rows travel by
all-to-all, forth and back. `padded` sends equal buffers; the dropless ones exchange counts first, which the host waits for.
Rows are dispatched in the autocast dtype, which favours these baselines over libraries that dispatch float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.swin_moe.model import Experts


class OtherExperts(nn.Module):
    """Parameters of the E/N experts of this rank, taken from the model's."""

    def __init__(self, experts: Experts, group: Any = None) -> None:
        super().__init__()
        self.group, self.world = group, dist.get_world_size(group) if group is not None else 1
        self.count = experts.w1.shape[0]
        if self.count % self.world:
            raise ValueError(f"{self.count} experts cannot be spread over {self.world} ranks")
        rank, own = dist.get_rank(group) if group is not None else 0, self.count // self.world
        for name, parameter in experts.named_parameters():
            mine = parameter.detach()[rank * own : (rank + 1) * own].clone()
            self.register_parameter(name, nn.Parameter(mine))


class NoExperts(OtherExperts):
    """Tokens as they come. Parameters, their gradients and the optimizer's state are those of the other baselines.

    What another row's peak lies above this one's is what its experts' computation takes.
    """

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        nothing = sum(p.flatten()[0] for p in self.parameters()) * 0.0
        return x + (weights.sum() * 0.0 + nothing).to(x.dtype)


class PaddedExperts(OtherExperts):
    """Buffers of C rows an expert; what does not fit is dropped.

    Args:
        factor: capacity factor f; 0 means room for everything (C = T), so that nothing is dropped.
    """

    def __init__(self, experts: Experts, group: Any = None, factor: float = 1.25) -> None:
        super().__init__(experts, group)
        self.factor = factor

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        dtype = x.dtype
        x = in_compute_dtype(x)
        tokens, top_k = ids.shape
        capacity = math.ceil(self.factor * top_k * tokens / self.count) if self.factor else tokens
        place = places(ids, self.count, capacity)
        sent = _Encode.apply(x, place, self.count * capacity)
        rows = self._to_owners(sent.view(self.count, capacity, -1))
        hidden = F.gelu(bias_matmul(rows, self.w1, self.b1))
        out = self._from_owners(bias_matmul(hidden, self.w2, self.b2), capacity)
        return _Decode.apply(out.reshape(self.count * capacity, -1), place, weights.to(out.dtype)).to(dtype)

    def _to_owners(self, rows: Tensor) -> Tensor:
        """(E, C, D) of this rank -> (E/N, N C, D) of its experts."""
        if self.world == 1:
            return rows
        got = _AllToAll.apply(rows.contiguous(), None, None, self.group).view(self.world, -1, *rows.shape[1:])
        return got.transpose(0, 1).reshape(got.shape[1], -1, rows.shape[2])

    def _from_owners(self, rows: Tensor, capacity: int) -> Tensor:
        if self.world == 1:
            return rows
        parted = rows.view(rows.shape[0], self.world, capacity, -1).transpose(0, 1).contiguous()
        return _AllToAll.apply(parted.flatten(0, 1), None, None, self.group)


def places(ids: Tensor, experts: int, capacity: int) -> Tensor:
    """(T, k) row in the (E C) buffer of every choice, E C for dropped ones. First choices of all tokens queue first."""
    flat = ids.t().reshape(-1)
    chosen = (torch.arange(experts, device=ids.device)[:, None] == flat).to(torch.int32)
    position = chosen.cumsum(1).gather(0, flat[None]).squeeze(0) - 1
    row = torch.where(position < capacity, flat * capacity + position, experts * capacity)
    return row.view(ids.shape[1], ids.shape[0]).t()


def bias_matmul(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(E, R, K) @ (E, N, K)^T + (E, 1, N)."""
    weight, bias = in_compute_dtype(weight), in_compute_dtype(bias)
    return torch.baddbmm(bias[:, None].to(rows.dtype), rows, weight.transpose(1, 2).to(rows.dtype))


class _Encode(torch.autograd.Function):
    """Tokens copied to their places, k writes of T rows; the gradient reads them back. No row is added to atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place)
        buffer = x.new_zeros(rows + 1, x.shape[1])  # dropped choices go to the last row
        for slot in place.unbind(1):
            buffer.index_copy_(0, slot, x)
        return buffer[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _gather_sum(grads[0], place, None), None, None


class _Decode(torch.autograd.Function):
    """Weighted sum of a token's rows. Keeps the buffer and not the T k gathered rows, as Tutel's kernel."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, place, weights)
        return _gather_sum(rows, place, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, place, weights = ctx.saved_tensors
        dy, dweights = grads[0], torch.empty_like(weights)
        drows = rows.new_zeros(rows.shape[0] + 1, rows.shape[1])
        for slot, at in enumerate(place.unbind(1)):
            drows.index_copy_(0, at, dy * weights[:, slot, None])
            there, kept = _rows_at(rows, at)
            dweights[:, slot] = (there * dy).sum(-1) * kept
        return drows[:-1], None, dweights


def _rows_at(rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Rows by place, and which of them were not dropped (the others are any rows)."""
    return rows.index_select(0, at.clamp(max=rows.shape[0] - 1)), at < rows.shape[0]


def _gather_sum(rows: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    y = rows.new_zeros(place.shape[0], rows.shape[1])
    for slot, at in enumerate(place.unbind(1)):
        there, kept = _rows_at(rows, at)
        y.addcmul_(there, (kept if weights is None else weights[:, slot] * kept)[:, None].to(rows.dtype))
    return y


class DroplessExperts(OtherExperts):
    """Every routed row is computed, none is padded.

    Args:
        compute: ``loop`` or ``grouped``.
    """

    def __init__(self, experts: Experts, group: Any = None, compute: str = "grouped") -> None:
        super().__init__(experts, group)
        self.compute = compute

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        dtype = x.dtype
        x = in_compute_dtype(x)
        expert, order = torch.sort(ids.flatten(), stable=True)
        token = torch.div(order, ids.shape[1], rounding_mode="floor")
        counts = torch.bincount(expert, minlength=self.count)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        rows = _Expand.apply(x, token, back)
        out = self._local(rows, counts) if self.world == 1 else self._remote(rows, counts)
        slots = _Permute.apply(out, back, order).view(*ids.shape, -1)
        return torch.bmm(weights[:, None].to(slots.dtype), slots).squeeze(1).to(dtype)

    def _remote(self, rows: Tensor, counts: Tensor) -> Tensor:
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        send = counts.view(self.world, -1).sum(1).tolist()
        receive = theirs.view(self.world, -1).sum(1).tolist()
        got = _AllToAll.apply(rows, send, receive, self.group)
        own = torch.arange(self.count // self.world, device=rows.device).repeat(self.world)
        expert = torch.repeat_interleave(own, theirs, output_size=got.shape[0])
        order = torch.sort(expert, stable=True).indices
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        out = self._local(_Permute.apply(got, order, back), theirs.view(self.world, -1).sum(0))
        return _AllToAll.apply(_Permute.apply(out, back, order), receive, send, self.group)

    def _local(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        if self.compute == "loop":
            bounds = [0, *ends.tolist()]
            parts = [self._expert(e, rows[bounds[e] : bounds[e + 1]]) for e in range(len(bounds) - 1)]
            return torch.cat(parts)
        expert = torch.repeat_interleave(counts, output_size=rows.shape[0])
        hidden = F.gelu(grouped_mm(rows, self.w1, ends) + in_compute_dtype(self.b1).index_select(0, expert))
        return grouped_mm(hidden, self.w2, ends) + in_compute_dtype(self.b2).index_select(0, expert)

    def _expert(self, e: int, rows: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(rows, self.w1[e], self.b1[e])), self.w2[e], self.b2[e])


class _Permute(torch.autograd.Function):
    """rows[order]; the gradient takes the way back, which torch would do by atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Expand(torch.autograd.Function):
    """x[token] for every routed row; the gradient sums a token's k rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.tokens = x.shape[0]
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back).view(ctx.tokens, -1, grads[0].shape[1]).sum(1), None, None


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows of expert e times (N, K)^T of expert e; torch's operator takes no bias."""
    kn = in_compute_dtype(weight).transpose(1, 2)
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(rows, kn.to(rows.dtype), offs=ends)
    return torch._grouped_mm(rows, kn.to(rows.dtype), offs=ends)


class _AllToAll(torch.autograd.Function):
    """Equal parts, or ``send`` and ``receive`` rows a rank; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int] | None, receive: Sequence[int] | None, group: Any) -> Tensor:
        ctx.sizes = (send, receive, group)
        return exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send, receive, group = ctx.sizes
        return exchange(grads[0].contiguous(), receive, send, group), None, None, None


def exchange(x: Tensor, send: Sequence[int] | None, receive: Sequence[int] | None, group: Any) -> Tensor:
    out = torch.empty_like(x) if receive is None else x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def in_compute_dtype(t: Tensor) -> Tensor:
    """As `torch.nn.functional.linear` would see it under autocast."""
    if not t.is_floating_point() or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))
