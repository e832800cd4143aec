"""``hexa::esmm_packed``: expert-specific matrix multiplication with packed weights, which are read expert by expert.

A packed weight is frozen: rows and biases have gradients, it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.formats import format_of
from hexa_fx.ops import checks, cpu, fixed_order, library
from hexa_fx.ops.rows import columns_of, flip, gather_rows, invert, row_count

_OPS = torch.ops.hexa

library.define(
    "esmm_packed(Tensor x, Tensor packed, Tensor[] scales, str format, Tensor? bias, Tensor? v, Tensor offs, SymInt top_k, "
    "str layout) -> Tensor"
)


class EsmmPacked(NamedTuple):
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]`` for every row p in expert order, as `hexa_fx.ops.esmm`.

    Args:
        x: (T, K) gathered by v, or (n, K) in expert order.
        packed, scales: W, as ``format`` (a name of `hexa_fx.formats.FORMATS`) stores (E, N, K) or (E, K, N).
        bias: (E, N) or None.
        v, offs, top_k: as in `hexa_fx.ops.esmm`.
        layout: ``nk`` or ``kn``, of the weight that is packed.
    """

    x: Tensor
    packed: Tensor
    scales: Sequence[Tensor]
    format: str
    bias: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    layout: str

    @property
    def rows(self) -> int:
        """n."""
        return row_count(self.x, self.v)

    @property
    def columns(self) -> int:
        """N."""
        return columns_of(shaped_as(self.x, self.packed, self.format), self.layout)


def shaped_as(x: Tensor, packed: Tensor, format: str) -> Tensor:
    """A stand-in for the weight that is packed, of its shape and x's dtype, without memory; for checks of shapes."""
    return x.new_empty(()).expand(format_of(format).shape_of(packed))


def check(*args: Any) -> None:
    """Checks shapes, dtypes and devices of the arguments."""
    o = EsmmPacked(*args)
    check_packed("esmm_packed", "packed", o.x, o.packed, o.scales, o.format)
    checks.check_floating("esmm_packed", ("x", "bias"), (o.x, o.bias))
    checks.check_index("esmm_packed", o.x, ("v", "offs"), (o.v, o.offs))
    weight = shaped_as(o.x, o.packed, o.format)
    experts, k, n = checks.check_weight("esmm_packed", "packed", weight, o.layout, o.offs)
    checks.check_rows("esmm_packed", "x", o.x, k, o.v, o.top_k)
    checks.check_bias("esmm_packed", "bias", o.bias, experts, n)


def check_packed(op: str, name: str, x: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str) -> None:
    """Checks that a packed weight is as its format says, frozen, and on x's device."""
    format_of(format).check(op, name, packed, scales)
    if packed.device != x.device:
        raise InputError(f"hexa::{op}: x is on {x.device} but {name} is on {packed.device}")
    if packed.requires_grad or any(scale.requires_grad for scale in scales):
        raise InputError(f"hexa::{op}: {name} is {format}, which has no gradient; freeze it (requires_grad_(False))")


def expert_by_expert(*args: Any) -> Tensor:
    """Kernel for any device: one expert's matrix exists at a time. Reads the offsets on the host."""
    o = EsmmPacked(*args)
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


def _fake(*args: Any) -> Tensor:
    o = EsmmPacked(*args)
    return o.x.new_empty((o.rows, o.columns))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    o = EsmmPacked(*inputs)
    ctx.save_for_backward(o.packed, *o.scales, o.v, o.offs)
    ctx.static = (o.format, o.top_k, o.layout)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    packed, *scales, v, offs = ctx.saved_tensors
    format, top_k, layout = ctx.static
    dx = db = None
    if ctx.needs_input_grad[0]:
        dx = _OPS.esmm_packed(g, packed, scales, format, None, None, offs, 1, flip(layout))
        dx = dx if v is None else _OPS.combine(dx, None, invert(v), offs, top_k)
    if ctx.needs_input_grad[4]:
        db = _OPS.ess(g, None, offs, 1, None)
    return dx, None, [None] * len(scales), None, db, None, None, None, None


library.register_fake("esmm_packed", _fake, check)
library.register_kernel("esmm_packed", "any", expert_by_expert)
library.register_autograd("esmm_packed", _backward, _setup_context)
library.register_autocast("esmm_packed", cast=(0, 4))
