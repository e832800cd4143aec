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
from hexa_fx.ops.forms import DENSE
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnSources

_OPS = torch.ops.hexa

_PACKED, _SOURCES = (QuantizedWeight, PackedStack), (QuantizedWeight, Formed)
TAKE_SOURCES = ("moe_ffn", "moe_ffn_fixed")
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


def esmm(x: Tensor, weight: Any, *rest: Any) -> Any:
    """`hexa::esmm` with a weight that is packed."""
    if isinstance(weight, _PACKED):
        *rows, layout = rest
        layout = flip(layout) if weight.transposed else layout
        return _OPS.esmm_packed.default(x, weight.packed, weight.scales, weight.format, *rows, layout)
    return _OPS.esmm.default(x, weight, *rest)
