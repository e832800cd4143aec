"""Runs every expert on every token: the fastest way on a CPU for layers so small that calls cost more than arithmetic.

One matmul for all experts replaces a sort, gathers and a matmul per expert. Pairs that the routing did not choose get a routing
weight of zero. That is exact unless a number is infinite or NaN, since 0 * inf is NaN and would spread to other tokens. The
result is then not finite either, which is checked, and the caller runs by expert order instead.

Values are laid out as expert, channel, token: (E, N, T), so that gate and up are long contiguous runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexa_fx.ops.activations import activation_forward, weighted_backward
from hexa_fx.ops.cpu import all_finite, settle_allocator

SPARE_WORK = 3 << 21
"""Multiply-adds spent on tokens that did not choose the expert, up to which this way is the faster one for one expert."""

_SPARE_WORK_OF_AN_EXPERT = 1 << 18
"""And so many more for every expert that would have had matmuls of its own."""

_WORK_OF_AN_ELEMENT = 100
"""Multiply-adds of a matmul in the time that the elementwise steps take for one element of the activation."""

PART_OF = {"w3": "w1", "b3": "b1"}
"""Operands whose gradient is the second half of another's."""

MEMORY_BOUND = 24
"""Fewer tokens than this take no less time: reading the weights does."""

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Ffn:
    """The weights of `hexa::moe_ffn` as this module reads them, with gate and up in one weight.

    Args:
        w1: (E, N, D), any strides.
        b1: (E, N) or None.
        w2: (E, I, D), any strides.
        b2: (E, D) or None.
        activation, glu, params: as in `FfnSpec`; glu is not ``split``.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str
    glu: str
    params: Sequence[float]


@dataclass(frozen=True)
class Kept:
    """What backward needs besides the operands.

    Args:
        h: (E, N, T), the pre-activation of every expert and token.
        share: (E + 1, T), the routing weight of every expert and token, zero where it was not chosen; sentinels last.
    """

    h: Tensor
    share: Tensor


def takes(x: Tensor, top_k_index: Tensor, w1: Tensor, w3: Tensor | None, w2: Tensor) -> bool:
    """Whether this way is faster than running by expert order."""
    if x.dtype not in _DTYPES or x.device.type != "cpu":
        return False
    tokens, top_k = top_k_index.shape
    experts = w1.shape[0]
    weights = w1.numel() + w2.numel() + (0 if w3 is None else w3.numel())
    inner = w2.numel() // max(x.shape[1], 1)
    spare = max(experts - top_k, 0) * (weights + _WORK_OF_AN_ELEMENT * inner) // max(experts, 1)
    limit = SPARE_WORK + _SPARE_WORK_OF_AN_EXPERT * min(tokens * top_k, experts)
    return tokens > 0 and max(tokens, MEMORY_BOUND) * spare <= limit


def ffn_of(
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    glu: str,
    params: Sequence[float],
    layout1: str,
    layout2: str,
) -> Ffn:
    """The operands of moe_ffn from w1 to layout2 as an `Ffn`."""
    if layout1 == "kn":
        w1 = w1.transpose(1, 2)
    if w3 is not None:
        w3 = w3.transpose(1, 2) if layout1 == "kn" else w3
        b1 = _both_biases(b1, b3, w1)
        w1, glu = torch.cat((w1, w3), 1), "concat"
    return Ffn(w1, b1, w2.transpose(1, 2) if layout2 == "nk" else w2, b2, activation, glu, params)


def _both_biases(b1: Tensor | None, b3: Tensor | None, w1: Tensor) -> Tensor | None:
    if b1 is None and b3 is None:
        return None
    zero = w1.new_zeros(w1.shape[:2])
    return torch.cat((zero if b1 is None else b1, zero if b3 is None else b3), 1)


def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None, ffn: Ffn) -> tuple[Tensor, Kept] | None:
    """y (T, D) and what backward needs; None where only running by expert order gives the result, or the error."""
    settle_allocator()
    experts, width, _ = ffn.w1.shape
    share = _shares(x, top_k_index, top_k_weights, experts)
    if share is None:
        return None
    h = torch.mm(_flat(ffn.w1), _across(x)).view(experts, width, -1)
    if ffn.b1 is not None:
        h.add_(ffn.b1.unsqueeze(2))
    a = activation_forward(h, ffn.activation, ffn.glu, ffn.params).mul_(share[:-1].unsqueeze(1))
    y = torch.mm(_flat(a).t(), _flat(ffn.w2))
    if ffn.b2 is not None:
        y.addmm_(share[:-1].t(), ffn.b2)
    return (y, Kept(h, share)) if all_finite((y,)) else None


def _shares(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None, experts: int) -> Tensor | None:
    """`Kept.share`, or None for an id out of range."""
    ids = top_k_index.t().long()
    share = x.new_zeros((experts + 1, x.shape[0]))
    try:
        if top_k_weights is None:
            return share.scatter_add_(0, ids, x.new_ones(()).expand(ids.shape))
        return share.scatter_add_(0, ids, top_k_weights.t().to(x.dtype))
    except RuntimeError:
        return None


def backward(
    dy: Tensor,
    x: Tensor | None,
    top_k_index: Tensor,
    top_k_weights: Tensor | None,
    ffn: Ffn,
    kept: Kept,
    wanted: frozenset[str],
) -> dict[str, Tensor] | None:
    """The gradients of the operands ``wanted``, by name; None where backward has to run by expert order.

    Args:
        dy: (T, D).
        x: (T, D), or None where w1 is not wanted.
        wanted: of ``x``, ``top_k_weights``, ``w1``, ``b1``, ``w2``, ``b2``; the gradients of the weights have the layout
            of `Ffn`.
    """
    experts, width, _ = ffn.w1.shape
    share, found = kept.share[:-1], {}
    dy_across = _across(dy)
    da = torch.mm(_flat(ffn.w2), dy_across).view(experts, -1, dy.shape[0])
    dh, a, dots = weighted_backward(da, kept.h, share.unsqueeze(1), ffn.activation, ffn.glu, ffn.params)
    if top_k_weights is not None and dots is not None and "top_k_weights" in wanted:
        found["top_k_weights"] = _dweights(dy_across, top_k_index, dots, ffn.b2).to(top_k_weights.dtype)
    if "w2" in wanted:
        found["w2"] = torch.mm(_flat(a), dy).view(experts, -1, dy.shape[1])
    if "b2" in wanted:
        found["b2"] = torch.mm(share, dy)
    if "x" in wanted:
        found["x"] = torch.mm(_flat(ffn.w1).t(), _flat(dh)).t().contiguous()
    if "w1" in wanted:
        assert x is not None
        found["w1"] = torch.mm(_flat(dh), x).view(experts, width, -1)
    if "b1" in wanted:
        found["b1"] = dh.sum(2)
    return found if all_finite(found.values()) else None


def _dweights(dy_across: Tensor, top_k_index: Tensor, dots: Tensor, b2: Tensor | None) -> Tensor:
    """<dy, y[e]> for the experts of every token; zero for sentinels."""
    padded = dots.new_zeros((dots.shape[0] + 1, dots.shape[1]))
    if b2 is None:
        padded[:-1].copy_(dots)
    else:
        torch.addmm(dots, b2, dy_across, out=padded[:-1])
    return padded.gather(0, top_k_index.t().long()).t()


def by_operand(found: dict[str, Tensor], split: bool, layout1: str, layout2: str) -> dict[str, Tensor]:
    """The gradients of `backward` under the names, and in the layouts, of moe_ffn's operands."""
    if layout2 == "nk" and "w2" in found:
        found["w2"] = found["w2"].transpose(1, 2).contiguous()
    if not split:
        if layout1 == "kn" and "w1" in found:
            found["w1"] = found["w1"].transpose(1, 2).contiguous()
        return found
    for name, part in PART_OF.items():
        if part in found:
            found[part], found[name] = (
                t.transpose(1, 2).contiguous() if layout1 == "kn" and t.ndim == 3 else t.contiguous()
                for t in found[part].chunk(2, 1)
            )
    return found


def rows(kept: Kept, top_k_index: Tensor, v: Tensor, offs: Tensor) -> Tensor:
    """(n, N): h in expert order, as it is kept when running by expert order."""
    h, top_k = kept.h, top_k_index.shape[1]
    slots = v.long()
    experts = top_k_index.reshape(-1).index_select(0, slots).long().clamp_(max=h.shape[0] - 1)
    taken = h[experts, :, slots.div(top_k, rounding_mode="floor")]
    taken[int(offs[-1]) :].zero_()
    return taken


def _across(rows: Tensor) -> Tensor:
    """A (D, T) copy: small matmuls take two to three times as long on a transposed view."""
    return rows.t().contiguous()


def _flat(t: Tensor) -> Tensor:
    """(E, N, C) as (E * N, C); a copy where the strides do not allow a view."""
    return t.reshape(-1, t.shape[2])
