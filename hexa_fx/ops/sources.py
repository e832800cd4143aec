"""Products of rewritten graphs with weights that are no plain tensors: packed ones, and ones with low-rank additions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops.adapted_weight import AdaptedWeight
from hexa_fx.ops.projection import DENSE
from hexa_fx.ops.quantized_weight import QuantizedWeight

_OPS = torch.ops.hexa
_NO_ADDITION = [1.0] * 3


def is_source(weight: Any) -> bool:
    """Whether a weight is packed or has an addition."""
    return isinstance(weight, AdaptedWeight | QuantizedWeight)


def moe_ffn(*args: Any) -> Any:
    """`hexa::moe_ffn` of arguments of which some weights are sources."""
    x, index, gates, w1, b1, w3, b3, w2, b2, *static = args
    weights: list[Tensor | None] = []
    scales: list[tuple[Tensor, ...]] = []
    formats: list[str] = []
    factors: list[Tensor | None] = []
    for weight, layout in ((w1, static[3]), (w3, static[3]), (w2, static[4])):
        adapted = isinstance(weight, AdaptedWeight)
        base = weight.weight if adapted else weight
        packed = isinstance(base, QuantizedWeight)
        weights.append(base.packed if packed else base)
        scales.append(base.scales if packed else ())
        formats.append(base.format if packed else DENSE)
        factors += weight.factors(layout) if adapted else (None, None)
    operands = (weights[0], b1, weights[1], b3, weights[2], b2, *factors, _NO_ADDITION, *scales, formats)
    return _OPS.moe_ffn_sources.default(x, index, gates, *operands, *static)


def esmm(x: Tensor, weight: Any, *rest: Any) -> Any:
    """`hexa::esmm` with a weight that is packed."""
    if isinstance(weight, QuantizedWeight):
        return _OPS.esmm_packed.default(x, weight.packed, weight.scales, weight.format, *rest)
    return _OPS.esmm.default(x, weight, *rest)
