"""Products of rewritten graphs with weights that are no plain tensors: packed ones, and ones with low-rank additions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.formats.adapted_weight import AdaptedWeight
from hexa_fx.formats.formed import Formed, PackedStack
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import listed_calls
from hexa_fx.ops.listed import Listed, dense
from hexa_fx.ops.records import DENSE
from hexa_fx.ops.rows import accumulate_dtype, expert_rows, flip
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnSources

_OPS = torch.ops.hexa

_PACKED, _SOURCES = (QuantizedWeight, PackedStack), (QuantizedWeight, Formed)
TAKE_SOURCES = ("moe_ffn", "moe_ffn_fixed", "moe_ffn_fp8")
"""Operators of rewritten graphs that take sources in place of weights."""


def takes_sources(target: Any) -> bool:
    """Whether a node's target is such an operator."""
    return any(target is getattr(_OPS, name).default for name in TAKE_SOURCES)


def is_source(weight: Any) -> bool:
    """Whether a weight is packed or has an addition."""
    return isinstance(weight, _SOURCES)


def operands(args: Sequence[Any]) -> MoeFfnSources:
    """Of `hexa::moe_ffn_sources`, from those of `hexa::moe_ffn` of which some weights are sources."""
    o = MoeFfn._make(args)
    layout1: str = o.layout1
    first, up, down = _source(o.w1, layout1), _source(o.w3, layout1), _source(o.w2, o.layout2)
    other = flip(layout1)
    if first.layout == other or (up.weight is not None and up.layout == other):
        layout1, first, up = other, first.read_as(other), up.read_as(other)
    tokens, biases = (o.x, o.top_k_index, o.top_k_weights), (o.b1, o.b3, o.b2)
    weights = (first.weight, biases[0], up.weight, biases[1], down.weight, biases[2])
    factors = (*first.factors, *up.factors, *down.factors)
    packed = ([first.scale, up.scale, down.scale], first.scales, up.scales, down.scales)
    formats = [first.format, up.format, down.format]
    static = (o.activation, o.glu, o.params, layout1, down.layout, o.recompute_h)
    return MoeFfnSources._make((*tokens, *weights, *factors, *packed, formats, *static))


class _Source(NamedTuple):
    """A weight as the operator takes it."""

    weight: Tensor | None
    scales: list[Tensor]
    format: str
    factors: tuple[Tensor | None, Tensor | None]
    scale: float
    layout: str

    def read_as(self, layout: str) -> _Source:
        """The same in another layout, in which only a dense weight can be read."""
        if self.layout == layout or self.weight is None:
            return self
        if self.format != DENSE:
            raise InputError("gate and up are packed along different dimensions; pack both alike")
        return self._replace(weight=self.weight.transpose(1, 2), layout=layout)


def _source(weight: Any, layout: str) -> _Source:
    base, scale = weight, 1.0
    factors: tuple[Tensor | None, Tensor | None] = (None, None)
    if isinstance(weight, AdaptedWeight):
        base, factors, scale = weight.weight, weight.factors(layout), weight.scale
    if not isinstance(base, _PACKED):
        return _Source(base, [], DENSE, factors, scale, layout)
    return _Source(
        base.packed, [*base.scales], base.format, factors, scale, flip(layout) if base.transposed else layout
    )


def esmm(x: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    """`hexa::esmm` with a weight that is packed, listed or neither."""
    if type(weight) is Listed:
        return listed_calls.esmm(x, weight, bias, *rest)
    if isinstance(weight, _PACKED):
        *rows, layout = rest
        layout = flip(layout) if weight.transposed else layout
        return _OPS.esmm_packed.default(x, weight.packed, weight.scales, weight.format, dense(bias), *rows, layout)
    return _OPS.esmm.default(x, weight, dense(bias), *rest)


def has_scaled_rows(weights: Sequence[Any]) -> bool:
    """Whether the rows of one of these weights are scaled."""
    adapted = [weight for weight in weights if type(weight) is AdaptedWeight]
    return any(weight.row_scale is not None for weight in adapted) if adapted else False


def moe_ffn(*args: Any) -> Tensor:
    """`hexa::moe_ffn` on weights whose rows are scaled, ``g * (W x)``: operator by operator, with the gradients of these."""
    o = MoeFfn._make(args)
    top_k, w1 = o.top_k_index.shape[1], o.w1
    v, inv, offs = _OPS.reindex.default(o.top_k_index, (w1.weight if isinstance(w1, AdaptedWeight) else w1).shape[0])
    first = [(w1, o.b1)] if o.w3 is None else [(w1, o.b1), (o.w3, o.b3)]
    h = torch.cat([_project(o.x, weight, bias, v, offs, top_k, o.layout1) for weight, bias in first], 1)
    a = _OPS.activate.default(h, o.activation, o.glu, o.params)
    y = _project(a, o.w2, o.b2, None, offs, 1, o.layout2)
    return _OPS.combine.default(y, o.top_k_weights, inv, offs, top_k)  # type: ignore[no-any-return]


def _project(
    x: Tensor, weight: Any, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: str
) -> Tensor:
    rows = v, offs, top_k
    if not isinstance(weight, AdaptedWeight):
        return esmm(x, weight, bias, *rows, layout)  # type: ignore[no-any-return]
    y: Tensor = esmm(x, weight.weight, bias if weight.row_scale is None else None, *rows, layout)
    if weight.row_scale is not None:
        y = y * expert_rows(weight.row_scale.to(y.dtype), offs, len(y))
        y = y if bias is None else y + expert_rows(dense(bias).to(y.dtype), offs, len(y))
    a, c = weight.factors(layout)
    u = esmm(x, a.to(x.dtype).contiguous(), None, *rows, "nk")
    return y + esmm(u, (c * weight.scale).to(u.dtype).contiguous(), None, None, offs, 1, "nk")  # type: ignore[no-any-return]


@torch.no_grad()
def row_norms(weight: Any, a: Tensor, c: Tensor) -> Tensor:
    """(E, N) norms of the rows of ``W + C A``, in float32 or float64; the sum is not formed.

    Args:
        weight: W (E, N, K), dense or packed, of which one expert is unpacked at a time.
        a, c: (E, r, K) and (E, N, r).
    """
    experts, rank, columns = a.shape
    dtype = accumulate_dtype(weight.dtype)
    if isinstance(weight, QuantizedWeight):
        own = torch.stack([weight.expert(number).to(dtype).square().sum(1) for number in range(experts)])
    elif type(weight) is Listed:
        own = weight.each(lambda matrix: torch.linalg.vector_norm(matrix, dim=1, dtype=dtype).square()).stack()
    else:
        own = torch.linalg.vector_norm(weight, dim=2, dtype=dtype).square()
    offs = torch.arange(0, experts * rank + 1, rank, dtype=torch.int32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        products = esmm(a.to(weight.dtype).reshape(-1, columns), weight, None, None, offs, 1, "nk")
        wide, c = a.to(dtype), c.to(dtype)
        both = (products.view(experts, rank, -1).transpose(1, 2).to(dtype) * c).sum(2)
        square = own + 2 * both + ((c @ (wide @ wide.transpose(1, 2))) * c).sum(2)
    norms: Tensor = square.clamp_min(0).sqrt()
    return norms
