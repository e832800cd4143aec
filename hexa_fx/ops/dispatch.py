"""Computes `hexa::moe_ffn` the conventional way: rows copied into expert order, grouped matmul, weighted scatter.

It runs when the expert-specific operators are switched off (``HexaConfig.expert_operators``), as the yardstick for what they save.
It is plain torch with torch's own autograd, so the inputs of every step are saved: (n, D) and (n, I) twice each, where
`hexa::moe_ffn` saves (T, D) and (n, I).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hexa_fx.ops.fallback import has_grouped_mm, reindex_any
from hexa_fx.ops.rows import expert_rows, gather_rows, routed_rows


def dispatch_combine(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor | None,
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
    recompute_h: bool = False,
) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`; the last argument has no meaning here.

    Reads the offsets on the host, except for bfloat16 on Hopper, where torch's grouped matmul takes them.
    """
    x, w1, w2 = (in_compute_dtype(t) for t in (x, w1, w2))
    b1, w3, b3, b2 = (None if t is None else in_compute_dtype(t) for t in (b1, w3, b3, b2))
    top_k = top_k_index.shape[1]
    v, _, offs = reindex_any(top_k_index, w1.shape[0])
    routed = routed_rows(offs, v.shape[0])
    rows = torch.where(routed, gather_rows(x, v, top_k), 0)
    h = _project(rows, w1, b1, offs, layout1)
    if w3 is not None:
        h = torch.cat((h, _project(rows, w3, b3, offs, layout1)), dim=1)
    a = torch.ops.hexa.activate(h, activation, glu, params)
    y = torch.where(routed, _project(a, w2, b2, offs, layout2), 0)
    if top_k_weights is not None:
        y = y * top_k_weights.reshape(-1).index_select(0, v).unsqueeze(1).to(y.dtype)
    token = torch.div(v, top_k, rounding_mode="floor")
    return y.new_zeros((x.shape[0], y.shape[1])).index_add(0, token, y)


def in_compute_dtype(t: Tensor) -> Tensor:
    """``t`` in autocast's dtype where autocast is on, as `hexa::moe_ffn` casts its operands."""
    if t.dtype == torch.float64 or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, layout: str) -> Tensor:
    weight = weight.transpose(1, 2) if layout == "nk" else weight
    if has_grouped_mm(x, weight):
        y = torch._grouped_mm(x, weight, offs=offs[1:].contiguous())
    else:
        bounds = offs.tolist()
        parts = [x[start:end] @ weight[e] for e, (start, end) in enumerate(pairwise(bounds))]
        y = torch.cat((*parts, x.new_zeros((x.shape[0] - bounds[-1], weight.shape[2]))))
    return y if bias is None else y + expert_rows(bias, offs, y.shape[0])
