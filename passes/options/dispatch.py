"""Computes `hexa::moe_ffn` the conventional way: rows copied into expert order, grouped matmul, weighted scatter.

It runs when the expert-specific operators are switched off (``HexaConfig.expert_operators``), as the yardstick for what they save.
It is plain torch with torch's own autograd, so the inputs of every step are saved: (n, D) and (n, I) twice each, where
`hexa::moe_ffn` saves (T, D) and (n, I).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexa_fx.ops.fallback import reindex_any, takes_grouped_mm
from hexa_fx.ops.rows import expert_rows, gather_rows, routed_rows
from hexa_fx.ops.table_layers import MoeFfn
from hexa_fx.torch_private import grouped_mm

T = TypeVar("T", Tensor, Tensor | None)


def dispatch_combine(*args: Any) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`; ``recompute_h`` has no meaning here.

    Reads the offsets on the host, except for bfloat16 on Hopper, where torch's grouped matmul takes them.
    """
    o = MoeFfn(*args)
    top_k = o.top_k_index.shape[1]
    v, _, offs = reindex_any(o.top_k_index, o.w1.shape[0])
    routed = routed_rows(offs, v.shape[0])
    rows = torch.where(routed, gather_rows(in_compute_dtype(o.x), v, top_k), 0)
    h = _project(rows, o.w1, o.b1, offs, o.layout1)
    if o.w3 is not None:
        h = torch.cat((h, _project(rows, o.w3, o.b3, offs, o.layout1)), dim=1)
    a = torch.ops.hexa.activate(h, o.activation, o.glu, o.params)
    y = torch.where(routed, _project(a, o.w2, o.b2, offs, o.layout2), 0)
    if o.top_k_weights is not None:
        y = y * o.top_k_weights.reshape(-1).index_select(0, v).unsqueeze(1).to(y.dtype)
    token = torch.div(v, top_k, rounding_mode="floor")
    return y.new_zeros((o.x.shape[0], y.shape[1])).index_add(0, token, y)


def in_compute_dtype(t: T) -> T:
    """``t`` in autocast's dtype where autocast is on, as `hexa::moe_ffn` casts its operands; None stays None."""
    if t is None or t.dtype == torch.float64 or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, layout: str) -> Tensor:
    weight, bias = in_compute_dtype(weight.transpose(1, 2) if layout == "nk" else weight), in_compute_dtype(bias)
    if takes_grouped_mm(x, weight):
        y = grouped_mm(x, weight, offs=offs[1:].contiguous())
    else:
        bounds = offs.tolist()
        parts = [x[start:end] @ weight[e] for e, (start, end) in enumerate(pairwise(bounds))]
        y = torch.cat((*parts, x.new_zeros((x.shape[0] - bounds[-1], weight.shape[2]))))
    return y if bias is None else y + expert_rows(bias, offs, y.shape[0])
