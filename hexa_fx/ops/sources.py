"""Products of rewritten graphs with weights that are no plain tensors: packed ones, and ones with low-rank additions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops.adapted_weight import AdaptedWeight
from hexa_fx.ops.formed import Formed, PackedStack
from hexa_fx.ops.forms import DENSE
from hexa_fx.ops.quantized_weight import QuantizedWeight
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnSources

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
    return _OPS.moe_ffn_sources.default(*_operands(MoeFfn._make(args)))


def moe_ffn_fixed(*args: Any) -> Any:
    """`hexa::moe_ffn_fixed` of such arguments."""
    return _OPS.moe_ffn_sources_fixed.default(*_operands(MoeFfn._make(args)))


def _operands(o: MoeFfn) -> MoeFfnSources:
    first, second = [_source(w, o.layout1) for w in (o.w1, o.w3)], _source(o.w2, o.layout2)
    layout1: str = o.layout1
    if any(source.weight is not None and source.layout == flip(layout1) for source in first):
        layout1 = flip(layout1)
        first = [source.read_as(layout1) for source in first]
    all_of: dict[str, Any] = dict(zip("132", (*first, second)))
    given: dict[str, Any] = {f"w{n}": source.weight for n, source in all_of.items()}
    given |= {f"{kind}{n}": factor for n, source in all_of.items() for kind, factor in zip("ac", source.factors)}
    given |= {f"s{n}": source.scales for n, source in all_of.items()}
    given |= {"alphas": [source.scale for source in all_of.values()], "layout1": layout1, "layout2": second.layout}
    return o.to(MoeFfnSources, formats=[source.format for source in all_of.values()], **given)


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
