"""Gradients of weights and biases: ``hexa::estmm``, ``hexa::ess``, ``hexa::esfk`` (paper, section 3.3, Algorithms 3 and 4), and the
same added to a buffer: ``hexa::estmm_add``, ``hexa::ess_add``, ``hexa::esfk_add``.

A buffer of the accumulators' type, float32 (float64 for float64), takes a gradient that was not rounded to the operands' type on
its way into a sum over micro-batches. One of the operands' type, such as ``.grad``, takes what torch would add to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.rows import accumulate_dtype, expert_rows, flip, gather_rows, invert, row_count
from hexa_fx.ops.table import Esfk, EsfkAdd, Ess, EssAdd, Estmm, EstmmAdd
from hexa_fx.ops.tiles import at_once

Rows = TypeVar("Rows", bound=Estmm)

estmm = library.wrapper("estmm")


def gathered(o: Rows) -> Rows:
    """The same of rows in expert order."""
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    return o._replace(x=x, g=g, x_index=None, g_index=None)


@library.kernel("estmm", "cpu")
def estmm_cpu(o: Estmm) -> Tensor:
    """CPU kernel."""
    return at_once("estmm", gathered(o))  # type: ignore[no-any-return]


def _setup_estmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, top_k, layout = inputs
    ctx.save_for_backward(*tensors)
    ctx.static = (top_k, layout)


def _backward_of_estmm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, g, x_index, g_index, offs = ctx.saved_tensors
    top_k, layout = ctx.static
    needs = Estmm.marks(ctx.needs_input_grad)
    dx = dg = None
    if needs.x:
        rows = torch.ops.hexa.esmm(g, grad, None, g_index, offs, top_k if g_index is not None else 1, flip(layout))
        dx = rows if x_index is None else torch.ops.hexa.combine(rows, None, invert(x_index), offs, top_k)
    if needs.g:
        rows = torch.ops.hexa.esmm(x, grad, None, x_index, offs, top_k if x_index is not None else 1, layout)
        dg = rows if g_index is None else torch.ops.hexa.combine(rows, None, invert(g_index), offs, top_k)
    return Estmm.by_argument(x=dx, g=dg)


library.register_autograd("estmm", _backward_of_estmm, _setup_estmm)


ess = library.wrapper("ess", scale=None)


def _setup_ess(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    o, needs = Ess._make(inputs), Ess.marks(ctx.needs_input_grad)
    ctx.save_for_backward(o.g if needs.scale else None, o.v, o.offs, o.scale)
    ctx.static = (o.top_k, row_count(o.g, o.v))


def _backward_of_ess(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    g, v, offs, scale = ctx.saved_tensors
    top_k, n = ctx.static
    rows = expert_rows(grad, offs, n)
    if v is None:
        return Ess.by_argument(g=rows)
    inv = invert(v)
    weights = None if scale is None else scale.reshape(-1, top_k)
    dg = torch.ops.hexa.combine(rows, weights, inv, offs, top_k) if Ess.marks(ctx.needs_input_grad).g else None
    if g is None:
        return Ess.by_argument(g=dg)
    wide = accumulate_dtype(grad.dtype)
    dots = (g.repeat_interleave(top_k, 0).to(wide) * rows.index_select(0, inv).to(wide)).sum(1)
    return Ess.by_argument(g=dg, scale=dots.view(scale.shape).to(scale.dtype))


library.register_autograd("ess", _backward_of_ess, _setup_ess)


esfk = library.wrapper("esfk")


estmm_add = library.wrapper("estmm_add")
ess_add = library.wrapper("ess_add", scale=None)
esfk_add = library.wrapper("esfk_add")


@library.kernel("estmm_add", "cpu")
def estmm_add_cpu(o: EstmmAdd) -> None:
    """CPU kernel."""
    at_once("estmm_add", gathered(o))


for _name in ("ess", "esfk", "ess_add", "esfk_add"):
    library.kernel(_name, "cpu")(partial(at_once, _name))


@library.kernel("estmm_add", "any")
@library.kernel("ess_add", "any")
def added_any(o: EstmmAdd | EssAdd) -> None:
    """Kernel for any device: torch adds the gradient, already rounded to the operands' type."""
    ops = torch.ops.hexa
    o.into.add_(ops.estmm(*o.to(Estmm)) if isinstance(o, EstmmAdd) else ops.ess(*o.to(Ess)))


@library.kernel("esfk_add", "any")
def esfk_add_any(o: EsfkAdd) -> Tensor:
    """As `added_any`."""
    dx, dw, db = torch.ops.hexa.esfk(*o.to(Esfk, has_bias=o.into_bias is not None))
    o.into.add_(dw)
    if o.into_bias is not None:
        o.into_bias.add_(db)
    return dx  # type: ignore[no-any-return]
