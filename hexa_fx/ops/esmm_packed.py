"""Products with packed weights, which are read expert by expert, and with factors of a few columns (LoRA).

A packed weight is frozen: rows and biases have gradients, it has none. ``hexa::esmm_low_rank`` and its relatives add a second
product in the same accumulator, ``x @ W^T + u @ C^T``, plain, before an activation or before its gradient.
``hexa::low_rank_gradients`` has the gradients of such a factor and of its rows, and ``hexa::scaled_transpose`` brings factors from
the memory order of PEFT, (N, r, E), and their gradients back. Of `hexa::moe_ffn_sources`, which has the gradients: a low-rank
addition to a weight is such a product with ``u = x A^T``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats import format_of
from hexa_fx.ops import cpu, fixed_order, library
from hexa_fx.ops.rows import accumulate_dtype, flip, gather_rows, invert
from hexa_fx.ops.table import Activate, ActivateBackward, Esmm, EsmmAct, EsmmActBackward, LowRankGradients
from hexa_fx.ops.table_variants import (
    EsmmActBackwardPacked,
    EsmmActPacked,
    EsmmLowRank,
    EsmmPacked,
    EsmmPackedLowRank,
    ScaledTranspose,
)

_OPS = torch.ops.hexa


@library.kernel("esmm_packed", "any", "cpu")
def expert_by_expert(o: EsmmPacked) -> Tensor:
    """Kernel for any device: one expert's matrix exists at a time. Reads the offsets on the host."""
    x = gather_rows(o.x, o.v, o.top_k)
    y = x.new_zeros((x.shape[0], o.columns))
    wide = x.to(cpu.compute_dtype(x.dtype)) if x.device.type == "cpu" else x
    multiply = fixed_order.multiply_groups_into if fixed_order.is_fixed() else cpu.multiply_groups_into
    for expert, start, end in cpu.groups_of(o.offs.tolist()):
        matrix = format_of(o.format).expert(o.packed, o.scales, expert, x.dtype)
        bias = None if o.bias is None else o.bias[expert].unsqueeze(0)
        group = [(0, start, end)]
        multiply(wide[start:end], cpu.as_kn(matrix[None], o.layout), bias, group, y[start:end])
    return y


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    o = EsmmPacked._make(inputs)
    ctx.save_for_backward(o.packed, *o.scales, o.v, o.offs)
    ctx.static = (o.format, o.top_k, o.layout)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    packed, *scales, v, offs = ctx.saved_tensors
    format, top_k, layout = ctx.static
    needs = EsmmPacked.marks(ctx.needs_input_grad)
    dx = db = None
    if needs.x:
        dx = _OPS.esmm_packed(g, packed, scales, format, None, None, offs, 1, flip(layout))
        dx = dx if v is None else _OPS.combine(dx, None, invert(v), offs, top_k)
    if needs.bias:
        db = _OPS.ess(g, None, offs, 1, None)
    return EsmmPacked.by_argument(x=dx, scales=[None] * len(scales), bias=db)


library.register_autograd("esmm_packed", _backward, _setup_context)


@library.kernel("esmm_low_rank", "any")
@library.kernel("esmm_packed_low_rank", "any")
def summed(o: EsmmLowRank | EsmmPacked, by: Any = _OPS) -> Tensor:
    """Kernel for any device, by other operators: a product, and a second one where there is one."""
    y: Tensor = by.esmm_packed(*o.to(EsmmPacked)) if isinstance(o, EsmmPacked) else by.esmm(*o.to(Esmm))
    u, c = getattr(o, "u", None), getattr(o, "c", None)
    return y if u is None else y.add_(by.esmm(u, c, None, None, o.offs, 1, o.layout))


@library.kernel("esmm_act", "any")
@library.kernel("esmm_act_low_rank", "any")
@library.kernel("esmm_act_packed", "any")
def activated(o: EsmmAct | EsmmActPacked, by: Any = _OPS) -> tuple[Tensor, Tensor]:
    """Kernel for any device, by other operators: the products, then the activation."""
    if isinstance(o, EsmmActPacked):
        h = summed(o, by)
    else:
        both = [o.to(EsmmLowRank, weight=o.w1, bias=o.b1)]
        if o.w3 is not None:
            both.append(o.to(EsmmLowRank, weight=o.w3, bias=o.b3, c=getattr(o, "c3", None)))
        parts = [_product(each, by) for each in both]
        h = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    a = by.activate(*o.to(Activate, h=h))
    return (h if o.keep_h else h.new_empty((0, h.shape[1]))), a


@library.kernel("esmm_act_backward", "any")
@library.kernel("esmm_act_backward_low_rank", "any")
@library.kernel("esmm_act_backward_packed", "any")
def differentiated(o: EsmmActBackward | EsmmActBackwardPacked, by: Any = _OPS) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel for any device, by other operators: the products, then the activation's gradient."""
    packed = isinstance(o, EsmmActBackwardPacked)
    da = summed(o.to(EsmmPackedLowRank, x=o.dy), by) if packed else _product(o.to(EsmmLowRank, x=o.dy), by)
    return by.activate_backward(*o.to(ActivateBackward, da=da))  # type: ignore[no-any-return]


def _product(o: EsmmLowRank, by: Any) -> Tensor:
    """By the operator that has a second product, where there is one."""
    return by.esmm(*o.to(Esmm)) if o.u is None else by.esmm_low_rank(*o)  # type: ignore[no-any-return]


_ON_CPU = library.Kernels("cpu")
for _kernel, *_names in (
    (summed, "esmm_low_rank", "esmm_packed_low_rank"),
    (activated, "esmm_act_low_rank", "esmm_act_packed"),
    (differentiated, "esmm_act_backward", "esmm_act_backward_low_rank", "esmm_act_backward_packed"),
):
    for _name in _names:  # past torch's dispatcher, to which listed weights are no tensors
        library.kernel(_name, "cpu")(partial(_kernel, by=_ON_CPU))

low_rank_gradients = library.wrapper("low_rank_gradients", scale=1.0, experts_last=False)


@library.kernel("low_rank_gradients", "any")
def composed(o: LowRankGradients, by: Any = _OPS) -> tuple[Tensor, Tensor]:
    """Kernel for any device, by other operators: one reading of rows that are in order, two of gathered ones."""
    rows, u = (o.v, o.offs, o.top_k), o.u
    if o.top_k_weights is not None and o.v is not None:
        u = torch.mul(u, o.top_k_weights.reshape(-1, 1).index_select(0, o.v)).to(u.dtype)
    if o.factor is not None and o.v is None and o.layout == "kn":
        du, df, _ = by.esfk(u, o.rows, o.factor, None, o.offs, 1, "nk", False)
    else:
        du = o.rows.new_empty((0,)) if o.factor is None else by.esmm(o.rows, o.factor, None, *rows, o.layout)
        sides = (o.rows, u, o.v, None) if o.layout == "nk" else (u, o.rows, None, o.v)
        df = by.estmm(*sides, o.offs, o.top_k, "nk")
    if not o.experts_last:
        cast = df.to(o.dtype)
        return du, cast if o.scale == 1 else torch.mul(cast, o.scale)
    experts, columns, rank = df.shape
    turned: Tensor = by.scaled_transpose(df.contiguous().view(experts, columns * rank), o.dtype, o.scale)
    return du, turned.view(columns, rank, experts)


scaled_transpose = library.wrapper("scaled_transpose", scale=1.0)


@library.kernel("scaled_transpose", "any")
def scaled_transpose_any(o: ScaledTranspose) -> Tensor:
    """Kernel for any device."""
    wide = torch.promote_types(accumulate_dtype(o.x.dtype), accumulate_dtype(o.dtype))
    factor = o.x if o.scale == 1 else o.x.to(wide) * o.scale
    return factor.t().to(o.dtype, memory_format=torch.contiguous_format).contiguous()
