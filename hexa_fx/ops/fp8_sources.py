"""`hexa::moe_ffn_fp8` on weights that are packed.

Checkpoints in FP8 blocks of 128 x 128 hold what products in FP8 multiply by, so that inference reads them as they lie. Other packed
weights, and calls that need gradients, multiply in the dtype of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import is_grad_enabled

from hexa_fx.formats.blocks import FP8_BLOCK
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import sources
from hexa_fx.ops.moe_ffn_fp8 import say_once
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_fp8 import is_whole
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnFp8, MoeFfnFp8Forward
from hexa_fx.torch_private import _any_requires_grad


def moe_ffn(*args: Any) -> Any:
    """The layer, of arguments of which some weights are packed."""
    o = MoeFfnFp8Forward._make(args)
    found = _as_they_lie(o)
    if isinstance(found, MoeFfnFp8):
        return torch.ops.hexa.moe_ffn_fp8.default(*found)
    say_once(f"compute='fp8_block' multiplies by packed weights in {o.x.dtype}: {found}")
    return torch.ops.hexa.moe_ffn_sources.default(*sources.operands(tuple(o.to(MoeFfn))))


def _as_they_lie(o: MoeFfnFp8Forward) -> MoeFfnFp8 | str:
    """The operands with packed weights as quantised ones; or why that cannot be."""
    both = (o.w1, o.w2)
    if o.w3 is not None or not all(isinstance(w, QuantizedWeight) and w.format == FP8_BLOCK.name for w in both):
        return "they are not all in FP8 blocks, with gate and up in one"
    if is_grad_enabled() and _any_requires_grad(*o):
        return "gradients are wanted"
    packed, layouts = [], []
    for weight, layout in zip(both, (o.layout1, o.layout2), strict=True):
        assert isinstance(weight, QuantizedWeight)
        packed.append(weight)
        layouts.append(flip(layout) if weight.transposed else layout)
    w1, w2 = (weight.packed for weight in packed)
    if not is_whole(w1, w2, o.glu, *layouts):
        return "gate, up and down do not lie as blocks that products read"
    s1, s2 = (weight.scales[0] for weight in packed)
    return o.to(MoeFfnFp8, w1=w1, w2=w2, layout1=layouts[0], layout2=layouts[1], s1=s1, s2=s2)
