"""Products of rewritten graphs with weights that are no plain tensors: packed ones, and ones with low-rank additions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops.adapted_weight import AdaptedWeight
from hexa_fx.ops.formed import Formed, PackedStack
from hexa_fx.ops.projection import DENSE
from hexa_fx.ops.quantized_weight import QuantizedWeight
from hexa_fx.ops.rows import flip

_OPS = torch.ops.hexa

TAKE_SOURCES = ("moe_ffn", "moe_ffn_fixed")
"""Operators of rewritten graphs that take sources in place of weights."""


def takes_sources(target: Any) -> bool:
    """Whether a node's target is such an operator."""
    return any(target is getattr(_OPS, name).default for name in TAKE_SOURCES)


def is_source(weight: Any) -> bool:
    """Whether a weight is packed or has an addition."""
    return isinstance(weight, Formed | QuantizedWeight)


def moe_ffn(*args: Any) -> Any:
    """`hexa::moe_ffn` of arguments of which some weights are sources."""
    return _OPS.moe_ffn_sources.default(*_arguments(*args))


def moe_ffn_fixed(*args: Any) -> Any:
    """`hexa::moe_ffn_fixed` of such arguments."""
    return _OPS.moe_ffn_sources_fixed.default(*_arguments(*args))


def _arguments(*args: Any) -> tuple[Any, ...]:
    x, index, gates, w1, b1, w3, b3, w2, b2, activation, glu, params, layout1, layout2, recompute_h = args
    first, second = [_source(w, layout1) for w in (w1, w3)], _source(w2, layout2)
    if first[0].layout == flip(layout1) or (w3 is not None and first[1].layout == flip(layout1)):
        layout1 = flip(layout1)
        first = [source.read_as(layout1) for source in first]
    all_of = *first, second
    operands = (first[0].weight, b1, first[1].weight, b3, second.weight, b2)
    factors = [factor for source in all_of for factor in source.factors]
    packed = *(source.scales for source in all_of), [source.format for source in all_of]
    static = activation, glu, params, layout1, second.layout, recompute_h
    return x, index, gates, *operands, *factors, [source.scale for source in all_of], *packed, *static


class _Source(NamedTuple):
    """A weight as the operator takes it."""

    weight: Tensor | None
    scales: tuple[Tensor, ...]
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
    adapted = isinstance(weight, AdaptedWeight)
    base = weight.weight if adapted else weight
    factors, scale = (weight.factors(layout), weight.scale) if adapted else ((None, None), 1.0)
    if not isinstance(base, QuantizedWeight | PackedStack):
        return _Source(base, (), DENSE, factors, scale, layout)
    return _Source(base.packed, base.scales, base.format, factors, scale, flip(layout) if base.transposed else layout)


def esmm(x: Tensor, weight: Any, *rest: Any) -> Any:
    """`hexa::esmm` with a weight that is packed."""
    if isinstance(weight, QuantizedWeight | PackedStack):
        *rows, layout = rest
        layout = flip(layout) if weight.transposed else layout
        return _OPS.esmm_packed.default(x, weight.packed, weight.scales, weight.format, *rows, layout)
    return _OPS.esmm.default(x, weight, *rest)
