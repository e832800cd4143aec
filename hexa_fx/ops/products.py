"""Operators on rows in expert order, by torch: projections and activations (paper, Algorithm 2), gradients of weights and biases
(section 3.3, Algorithms 3 and 4), the same added to a buffer, and products with packed weights and with factors of a few columns.

Kernels of ``any`` device are correct anywhere. They do not synchronise where torch has a grouped matmul for the case
(`torch._grouped_mm`), nor while a CUDA graph is captured; otherwise each operator reads the offsets on the host once. Most of a CPU
are those on tiles (`hexa_fx.ops.tiles`). A device's own, registered with ``torch.library.impl("hexa::esmm", "CUDA")`` or
`hexa_fx.ops.library.register_kernel`, replace them.

A packed weight is frozen: rows and biases have gradients, it has none. ``hexa::esmm_low_rank`` and its relatives add a second
product in the same accumulator, ``x @ W^T + u @ C^T``, plain, before an activation or before its gradient: a low-rank addition to a
weight with ``u = x A^T``. ``hexa::low_rank_gradients`` has the gradients of such a factor and of its rows, and
``hexa::scaled_transpose`` brings factors from the memory order of PEFT, (N, r, E), and their gradients back. A buffer of the
accumulators' type, float32 (float64 for float64), takes a gradient that was not rounded on its way into a sum over micro-batches;
one of the operands' type, such as ``.grad``, takes what torch would add to it.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats import format_of
from hexa_fx.ops import cpu, fixed_order, library, table, tiles
from hexa_fx.ops import table_variants as variants
from hexa_fx.ops.activations import activation_forward, weighted_backward
from hexa_fx.ops.cpu import groups_of
from hexa_fx.ops.listed import Listed, readable
from hexa_fx.ops.rows import (
    accumulate_dtype,
    expert_of_row,
    expert_rows,
    flip,
    gather_rows,
    invert,
    routed_rows,
    row_count,
)
from hexa_fx.ops.tiles import at_once
from hexa_fx.ops.tiling import whole
from hexa_fx.torch_private import DispatchKeySet, _any_requires_grad, grouped_mm

logger = logging.getLogger(__name__)
_OPS = torch.ops.hexa


@library.kernel("esmm", "cpu")
def esmm_cpu(o: table.Esmm) -> Tensor:
    tile = whole(o.v, o.offs, o.top_k, o.x)
    return tile.padded(tiles.esmm(tile, o._replace(x=tile.operand(o.x, o.v))))


@library.formula("esmm", x="weight", bias=None)
def esmm_gradients(o: table.Esmm, needs: Any, g: Tensor) -> dict[str, Any]:
    """In the operators. Where they are to be derived again they come from one each, since ``esfk`` is not derived. Kernels read
    listed weights.
    """
    ops: Any = _OPS
    weight: Any = o.weight
    v, offs, top_k, layout = o.v, o.offs, o.top_k, o.layout
    if type(weight) is Listed:
        ops, (weight,) = library.Kernels(g.device.type), readable((weight,), g.device.type)
    dx = dw = db = None
    if needs.x and needs.weight and not torch.is_grad_enabled():
        dx, dw, db = ops.esfk(o.x, g, weight, v, offs, top_k, layout, needs.bias)
    else:
        if needs.x:
            dx = ops.esmm(g, weight, None, None, offs, 1, flip(layout))
        if needs.weight:
            dw = ops.estmm(o.x, g, v, None, offs, top_k, layout)
        if needs.bias:
            db = ops.ess(g, None, offs, 1, None)
    if dx is not None and v is not None:
        dx = ops.combine(dx, None, invert(v), offs, top_k)
    return {"x": dx, "weight": dw, "bias": db if needs.bias else None}


@library.kernel("activate", "cpu", "any")
def activate_generic(o: table.Activate) -> Tensor:
    wide = o.h.to(accumulate_dtype(o.h.dtype))
    return activation_forward(wide, o.activation, o.glu, o.params).to(o.h.dtype)


@library.kernel("activate_backward", "cpu", "any")
def activate_backward_generic(o: table.ActivateBackward) -> tuple[Tensor, Tensor, Tensor]:
    da, h, top_k_weights, v, offs, *static = o
    wide = accumulate_dtype(h.dtype)
    of_a, of_h = da.to(wide), h.to(wide).contiguous()  # as dh is to lie
    if top_k_weights is None:
        dh, a, _ = weighted_backward(of_a, of_h, None, *static)
        return dh.to(h.dtype), a.to(h.dtype), h.new_empty(0)
    assert v is not None
    assert offs is not None
    routed = routed_rows(offs, h.shape[0])
    w = torch.where(routed, top_k_weights.reshape(-1).index_select(0, v).to(wide).unsqueeze(1), 0)
    dh, a, dots = weighted_backward(of_a, of_h, w, *static)
    assert dots is not None
    dweights = torch.where(routed.squeeze(1), dots, 0).index_select(0, invert(v)).view(top_k_weights.shape)
    return dh.to(h.dtype), a.to(h.dtype), dweights.to(top_k_weights.dtype)


@library.formula("activate")
def _of_activate(o: table.Activate, needs: Any, da: Tensor) -> dict[str, Any]:
    dh, _, _ = _OPS.activate_backward(da, o.h, None, None, None, o.activation, o.glu, o.params)
    return {"h": dh}


def _differentiable(keyset: DispatchKeySet, *args: Any) -> Any:
    """Where a gradient is wanted it is that of the operators that it consists of."""
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        return activated(table.EsmmAct(*args))
    return library.below_autograd(library.overload("esmm_act"), keyset, args)


library.register_autograd_kernel("esmm_act", _differentiable)


@library.kernel("esmm_packed", "any", "cpu")
def expert_by_expert(o: variants.EsmmPacked) -> Tensor:
    """One expert's matrix exists at a time. Reads the offsets on the host."""
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


@library.formula("esmm_packed", x=None, bias=None)
def _of_esmm_packed(o: variants.EsmmPacked, needs: Any, g: Tensor) -> dict[str, Any]:
    dx = None
    if needs.x:
        dx = _OPS.esmm_packed(g, o.packed, o.scales, o.format, None, None, o.offs, 1, flip(o.layout))
        dx = dx if o.v is None else _OPS.combine(dx, None, invert(o.v), o.offs, o.top_k)
    db = _OPS.ess(g, None, o.offs, 1, None) if needs.bias else None
    return {"x": dx, "scales": [None] * len(o.scales), "bias": db}


@library.kernel("esmm_low_rank", "any")
@library.kernel("esmm_packed_low_rank", "any")
def summed(o: table.Esmm | variants.EsmmPacked, by: Any = _OPS) -> Tensor:
    """A product, and a second one where there is one."""
    y: Tensor = (
        by.esmm_packed(*o.to(variants.EsmmPacked)) if isinstance(o, variants.EsmmPacked) else by.esmm(*o.to(table.Esmm))
    )
    u, c = getattr(o, "u", None), getattr(o, "c", None)
    return y if u is None else y.add_(by.esmm(u, c, None, None, o.offs, 1, o.layout))


@library.kernel("esmm_act", "any")
@library.kernel("esmm_act_low_rank", "any")
@library.kernel("esmm_act_packed", "any")
def activated(o: table.EsmmAct | variants.EsmmActPacked, by: Any = _OPS) -> tuple[Tensor, Tensor]:
    """The products, then the activation."""
    if isinstance(o, variants.EsmmActPacked):
        h = summed(o, by)
    else:
        both = [o.to(variants.EsmmLowRank, weight=o.w1, bias=o.b1)]
        if o.w3 is not None:
            both.append(o.to(variants.EsmmLowRank, weight=o.w3, bias=o.b3, c=getattr(o, "c3", None)))
        parts = [_product(each, by) for each in both]
        h = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    a = by.activate(*o.to(table.Activate, h=h))
    return (h if o.keep_h else h.new_empty((0, h.shape[1]))), a


@library.kernel("esmm_act_backward", "any")
@library.kernel("esmm_act_backward_low_rank", "any")
@library.kernel("esmm_act_backward_packed", "any")
def differentiated(
    o: table.EsmmActBackward | variants.EsmmActBackwardPacked, by: Any = _OPS
) -> tuple[Tensor, Tensor, Tensor]:
    """The products, then the activation's gradient."""
    packed = isinstance(o, variants.EsmmActBackwardPacked)
    da = (
        summed(o.to(variants.EsmmPackedLowRank, x=o.dy), by)
        if packed
        else _product(o.to(variants.EsmmLowRank, x=o.dy), by)
    )
    return by.activate_backward(*o.to(table.ActivateBackward, da=da))  # type: ignore[no-any-return]


def _product(o: variants.EsmmLowRank, by: Any) -> Tensor:
    """By the operator that has a second product, where there is one."""
    return by.esmm(*o.to(table.Esmm)) if o.u is None else by.esmm_low_rank(*o)  # type: ignore[no-any-return]


_ON_CPU = library.Kernels("cpu")
for _kernel, *_names in (
    (summed, "esmm_low_rank", "esmm_packed_low_rank"),
    (activated, "esmm_act_low_rank", "esmm_act_packed"),
    (differentiated, "esmm_act_backward", "esmm_act_backward_low_rank", "esmm_act_backward_packed"),
):
    for _name in _names:  # past torch's dispatcher, to which listed weights are no tensors
        library.kernel(_name, "cpu")(partial(_kernel, by=_ON_CPU))


@library.kernel("low_rank_gradients", "any")
def composed(o: table.LowRankGradients, by: Any = _OPS) -> tuple[Tensor, Tensor]:
    """One reading of rows that are in order, two of gathered ones."""
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


@library.kernel("scaled_transpose", "any")
def scaled_transpose_any(o: variants.ScaledTranspose) -> Tensor:
    wide = torch.promote_types(accumulate_dtype(o.x.dtype), accumulate_dtype(o.dtype))
    factor = o.x if o.scale == 1 else o.x.to(wide) * o.scale
    return factor.t().to(o.dtype, memory_format=torch.contiguous_format).contiguous()


@library.formula("estmm")
def _of_estmm(o: table.Estmm, needs: Any, grad: Tensor) -> dict[str, Any]:
    (x, g, x_index, g_index, offs, top_k, layout), dx, dg = o, None, None
    if needs.x:
        rows = _OPS.esmm(g, grad, None, g_index, offs, top_k if g_index is not None else 1, flip(layout))
        dx = rows if x_index is None else _OPS.combine(rows, None, invert(x_index), offs, top_k)
    if needs.g:
        rows = _OPS.esmm(x, grad, None, x_index, offs, top_k if x_index is not None else 1, layout)
        dg = rows if g_index is None else _OPS.combine(rows, None, invert(g_index), offs, top_k)
    return {"x": dx, "g": dg}


@library.formula("ess")
def _of_ess(o: table.Ess, needs: Any, grad: Tensor) -> dict[str, Any]:
    (g, v, offs, top_k, scale), dscale = o, None
    rows = expert_rows(grad, offs, row_count(g, v))
    if v is None:
        return {"g": rows}
    inv = invert(v)
    weights = None if scale is None else scale.reshape(-1, top_k)
    dg = _OPS.combine(rows, weights, inv, offs, top_k) if needs.g else None
    if scale is not None and needs.scale:
        wide = accumulate_dtype(grad.dtype)
        dots = (g.repeat_interleave(top_k, 0).to(wide) * rows.index_select(0, inv).to(wide)).sum(1)
        dscale = dots.view(scale.shape).to(scale.dtype)
    return {"g": dg, "scale": dscale}


for _name in ("esmm_act", "estmm", "ess", "esfk", "estmm_add", "ess_add", "esfk_add"):
    library.kernel(_name, "cpu")(partial(at_once, _name))


@library.kernel("estmm_add", "any")
@library.kernel("ess_add", "any")
def added_any(o: table.EstmmAdd | table.EssAdd) -> None:
    """Torch adds the gradient, already rounded to the operands' type."""
    ops = _OPS
    o.into.add_(ops.estmm(*o.to(table.Estmm)) if isinstance(o, table.EstmmAdd) else ops.ess(*o.to(table.Ess)))


@library.kernel("esfk_add", "any")
def esfk_add_any(o: table.EsfkAdd) -> Tensor:
    dx, dw, db = _OPS.esfk(*o.to(table.Esfk, has_bias=o.into_bias is not None))
    o.into.add_(dw)
    if o.into_bias is not None:
        o.into_bias.add_(db)
    return dx  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _log_once(op: str, device: str, how: str) -> None:
    level = logging.DEBUG if device == "cuda" else logging.WARNING  # on CUDA whoever runs this has said why
    logger.log(level, "hexa::%s has no kernel for %s here; running %s", op, device, how)


@library.kernel("esmm", "any")
def esmm_any(o: table.Esmm) -> Tensor:
    """Gather, grouped matmul, bias."""
    rows = gather_rows(o.x, o.v, o.top_k)
    kn = o.weight.transpose(1, 2) if o.layout == "nk" else o.weight
    y = _grouped_mm(rows, kn, o.offs)
    if o.bias is not None:
        y = y + expert_rows(o.bias, o.offs, y.shape[0])
    return torch.where(routed_rows(o.offs, y.shape[0]), y, 0)


@library.kernel("ess", "any")
def ess_any(o: table.Ess) -> Tensor:
    """index_add over the experts of the rows (in float32; the order of the sum is not fixed on a GPU)."""
    rows = gather_rows(o.g, o.v, o.top_k).to(accumulate_dtype(o.g.dtype))
    if o.scale is not None and o.v is not None:
        rows = rows * o.scale.reshape(-1).index_select(0, o.v).to(rows.dtype).unsqueeze(1)
    experts = o.offs.shape[0] - 1
    y = rows.new_zeros((experts + 1, o.g.shape[1]))
    return y.index_add_(0, expert_of_row(o.offs, rows.shape[0]), rows)[:experts].to(o.g.dtype)


@library.kernel("estmm", "any")
def estmm_any(o: table.Estmm) -> Tensor:
    """Gather, grouped outer product."""
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    return _grouped_outer(g, x, o.offs) if o.layout == "nk" else _grouped_outer(x, g, o.offs)


@library.kernel("esfk", "any")
def esfk_any(o: table.Esfk) -> tuple[Tensor, Tensor, Tensor]:
    """Its three parts."""
    ops = _OPS
    dx = ops.esmm(o.g, o.weight, None, None, o.offs, 1, flip(o.layout))
    dw = ops.estmm(o.x, o.g, o.x_index, None, o.offs, o.top_k, o.layout)
    db = ops.ess(o.g, None, o.offs, 1, None) if o.has_bias else o.g.new_empty(0)
    return dx, dw, db


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """(n, N) of x (n, K) and weight (E, K, N). Rows without an expert are unspecified."""
    if takes_grouped_mm(x, weight):
        _log_once("esmm", x.device.type, "torch's grouped matmul")
        return grouped_mm(x, weight, offs=offs[1:].contiguous())
    if _capturing(x):
        _log_once("esmm", x.device.type, "every expert on every row, as a CUDA graph is being captured")
        expert = expert_of_row(offs, x.shape[0]).unsqueeze(1)
        y = x.new_zeros((x.shape[0], weight.shape[2]))
        for e in range(weight.shape[0]):
            y = torch.where(expert == e, x @ weight[e], y)
        return y
    if type(weight) is Tensor:  # a subclass is somebody's experiment
        _log_once("esmm", x.device.type, f"one matmul an expert, which reads the offsets on the host ({x.dtype})")
    y = x.new_zeros((x.shape[0], weight.shape[2]))
    for e, start, end in groups_of(offs.tolist()):
        torch.mm(x[start:end], weight[e], out=y[start:end])
    return y


def _grouped_outer(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """(E, K, N), the sum of ``x[p]^T g[p]`` over each expert's rows."""
    experts = offs.shape[0] - 1
    if takes_grouped_mm(x, g) and x.shape[0] > 0:
        _log_once("estmm", x.device.type, "torch's grouped matmul")
        return grouped_mm(x.t(), g, offs=offs[1:].contiguous())
    if _capturing(x):
        _log_once("estmm", x.device.type, "every expert on every row, as a CUDA graph is being captured")
        expert = expert_of_row(offs, x.shape[0]).unsqueeze(1)
        return torch.stack([torch.where(expert == e, x, 0).t() @ g for e in range(experts)])
    _log_once("estmm", x.device.type, f"one matmul an expert, which reads the offsets on the host ({x.dtype})")
    y = x.new_zeros((experts, x.shape[1], g.shape[1]))
    for e, start, end in groups_of(offs.tolist()):
        torch.mm(x[start:end].t(), g[start:end], out=y[e])
    return y


def takes_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Whether grouped_mm works without a host read: bfloat16 on Hopper or newer, all strides multiples of 16 bytes."""
    if a.device.type != "cuda" or a.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    if torch.cuda.get_device_capability(a.device) < (9, 0) or a.shape[0] == 0:
        return False
    return all(_aligned(t) for t in (a, b))


def _aligned(t: Tensor) -> bool:
    unit = 16 // t.element_size()
    inner = [s for s in t.stride() if s != 1]
    return t.data_ptr() % 16 == 0 and 1 in t.stride()[-2:] and all(s % unit == 0 for s in inner)


def _capturing(t: Tensor) -> bool:
    return t.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
