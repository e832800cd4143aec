"""``hexa::esmm_packed``: products with packed weights, which are read expert by expert.

A packed weight is frozen: rows and biases have gradients, it has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.formats import format_of
from hexa_fx.ops import cpu, fixed_order, library
from hexa_fx.ops.rows import flip, gather_rows, invert
from hexa_fx.ops.table_variants import EsmmPacked

_OPS = torch.ops.hexa


@library.kernel("esmm_packed", "any")
def expert_by_expert(o: EsmmPacked) -> Tensor:
    """Kernel for any device: one expert's matrix exists at a time. Reads the offsets on the host."""
    x = gather_rows(o.x, o.v, o.top_k)
    y = x.new_zeros((x.shape[0], o.columns))
    wide = x.to(cpu.compute_dtype(x.dtype)) if x.device.type == "cpu" else x
    multiply = fixed_order.multiply_groups_into if fixed_order.is_fixed() else cpu.multiply_groups_into
    for expert, start, end in cpu.groups_of(o.offs.tolist()):
        matrix = format_of(o.format).expert(o.packed, o.scales, expert, x.dtype)
        bias = None if o.bias is None else o.bias[expert : expert + 1]
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
