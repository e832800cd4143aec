"""The operators of `hexa_fx.ops.table_fp8` in plain torch, on any device: the reference of kernels.

Elements are read to float32 and multiplied there, which is what products with float32 accumulators do, but for the order of sums.
An expert's weight is read at a time. The offsets are read on the host.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import (
    BLOCK,
    first_groups,
    group_rows,
    padded,
    quantize_groups,
    quantize_rows,
    quantize_weight,
    read_bytes,
    read_groups,
    read_rows,
    read_weight,
    rows_as_bytes,
)
from hexa_fx.ops import library
from hexa_fx.ops import table_fp8 as table
from hexa_fx.ops.activations import activation_forward, gate_and_up, weighted_backward
from hexa_fx.ops.cpu import groups_of
from hexa_fx.ops.reindex import combine_generic
from hexa_fx.ops.rows import expert_rows, gather_rows, routed_rows


@library.kernel("quantize_rows_fp8", "cpu", "any")
def _rows(o: table.QuantizeRowsFp8) -> tuple[Tensor, Tensor]:
    return quantize_rows(o.x, o.binary)


@library.kernel("quantize_columns_fp8", "cpu", "any")
def _columns(o: table.QuantizeColumnsFp8) -> tuple[Tensor, Tensor]:
    return quantize_groups(gather_rows(o.x, o.v, o.top_k), o.offs)


@library.kernel("group_rows_fp8", "cpu", "any")
def _groups(o: table.GroupRowsFp8) -> tuple[Tensor, Tensor]:
    rows, scales = (gather_rows(t, o.v, o.top_k) for t in (o.x, o.xs))
    return group_rows(rows, scales, o.offs)


@library.kernel("quantize_weight_fp8", "cpu", "any")
def _weight(o: table.QuantizeWeightFp8) -> None:
    for expert in range(o.w.shape[0]):
        parts = [part[expert] if o.layout == "nk" else part[expert].t() for part in (o.w, o.w3) if part is not None]
        if o.glu in ("concat", "interleaved"):
            parts = [half.t() for half in gate_and_up(parts[0].t(), o.glu)]
        matrix = torch.cat([_filled_up(part) for part in parts])
        elements, scales = quantize_weight(matrix)
        o.q[expert].copy_(elements)
        o.s[expert].copy_(scales)
        if o.q_t is not None and o.s_t is not None:
            o.q_t[expert].copy_(elements.t())
            o.s_t[expert].copy_(scales.t())


def _filled_up(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return torch.nn.functional.pad(matrix, (0, padded(columns) - columns, 0, padded(rows) - rows))


def _product(x: Tensor, w: Tensor, ws: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
    """(n, N) in float32 of rows (n, K) in float32; zero where there is no expert."""
    y = x.new_zeros((x.shape[0], w.shape[1]))
    for expert, start, end in groups_of(offs.tolist()):
        torch.mm(x[start:end], read_weight(w[expert], ws[expert]).t(), out=y[start:end])
    return y if bias is None else y.add_(expert_rows(bias, offs, y.shape[0]))


@library.kernel("esmm_act_fp8", "cpu", "any")
def _esmm_act(o: table.EsmmActFp8) -> tuple[Tensor, ...]:
    h = _product(gather_rows(read_rows(o.x, o.xs), o.v, o.top_k), o.w, o.ws, o.bias, o.offs)
    a = activation_forward(h, o.activation, table.glu_of(o.gated), o.params)
    return *quantize_rows(h if o.keep_h else h[:0]), *quantize_rows(a)


@library.kernel("esmm_fp8", "cpu", "any")
def _esmm(o: table.EsmmFp8) -> tuple[Tensor, Tensor]:
    return rows_as_bytes(_product(read_rows(o.x, o.xs), o.w, o.ws, o.bias, o.offs))


@library.kernel("combine_fp8", "cpu", "any")
def _combine(o: table.CombineFp8) -> Tensor:
    weights = None if o.top_k_weights is None else o.top_k_weights.float()
    rows = torch.where(routed_rows(o.offs, o.y.shape[0]), read_bytes(o.y, o.ys)[:, : o.columns], 0)
    return combine_generic(rows, weights, o.inv, o.offs, o.top_k).to(o.dtype)


@library.kernel("esmm_act_backward_fp8", "cpu", "any")
def _esmm_act_backward(o: table.EsmmActBackwardFp8) -> tuple[Tensor, ...]:
    da = _product(gather_rows(read_rows(o.dy, o.dys), o.v, o.top_k), o.w, o.ws, None, o.offs)
    h = torch.where(routed_rows(o.offs, o.v.shape[0]), read_rows(o.h, o.hs), 0)
    share = 1.0 if o.top_k_weights is None else o.top_k_weights.reshape(-1).index_select(0, o.v).float().unsqueeze(1)
    dh, a, _ = weighted_backward(da * share, h, None, o.activation, table.glu_of(o.gated), o.params)
    dots, a = (da * a).view(a.shape[0], a.shape[1] // BLOCK, BLOCK).sum(2), a * share
    rows, *groups, wants_dots = o.needs
    none = o.offs.new_zeros(o.offs.shape[0])
    of_dh, of_a = (
        quantize_groups(t, o.offs, shared) if need else quantize_groups(t[:0], none, shared)
        for t, need, shared in zip((dh, a), groups, (False, True))
    )
    return *quantize_rows(dh if rows else dh[:0]), *of_dh, *of_a, dots if wants_dots else dots[:0].clone()


@library.kernel("estmm_fp8", "cpu", "any")
def _estmm(o: table.EstmmFp8) -> None:
    for expert, (first, end) in enumerate(pairwise(first_groups(o.offs).tolist())):
        pairs = (o.x, o.xs), (o.g, o.gs)
        a, b = (read_groups(q[first:end], s[first:end]).transpose(0, 1).flatten(1) for q, s in pairs)
        product = (a @ b.t())[: o.out.shape[1], : o.out.shape[2]]
        o.out[expert].add_(product) if o.add else o.out[expert].copy_(product)


@library.kernel("ess_fp8", "cpu", "any")
def _ess(o: table.EssFp8) -> Tensor:
    y = o.gs.new_zeros((o.offs.shape[0] - 1, o.g.shape[1]))
    for expert, (first, end) in enumerate(pairwise(first_groups(o.offs).tolist())):
        y[expert] = read_groups(o.g[first:end], o.gs[first:end]).sum((0, 2))
    return y
