"""The products on CUDA: the Hopper family where it takes the operands, gemm_sm80 everywhere else.

The choice looks at shapes, strides and types only. Arguments and results are those of the operators' own docstrings.
"""

from __future__ import annotations

from torch import Tensor

from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.codegen.spec import Glu, Layout
from hexa_fx.cuda import gemm_sm80 as sm80
from hexa_fx.cuda import gemm_sm90 as sm90
from hexa_fx.cuda.choosing import card_of
from hexa_fx.cuda.fallback import cuda_kernel
from hexa_fx.cuda.operands import Into, aligned, as_stored
from hexa_fx.cuda.rows import activate_backward, ess, ess_add, settle, substitute
from hexa_fx.ops.activations import ACTIVATIONS, inner_width
from hexa_fx.ops.rows import columns_of, flip, row_count

DECODE_BUCKET = 4
"""Up to 2^4 rows an expert a product only streams weights: the 16-row tiles of gemm_sm80 waste least there."""

SM80_ONLY = ("tanh",)
"""Activations without a Hopper epilogue."""


@cuda_kernel("esmm")
def esmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: Layout
) -> Tensor:
    """See hexa_fx.ops.esmm."""
    weight, layout = as_stored(weight, layout)
    if _few_rows(x, v, offs) or not _hopper(offs, (columns_of(weight, layout),), x, weight, *_stored(bias)):
        return sm80.esmm(x, weight, bias, v, offs, top_k, layout)
    return sm90.esmm(x, weight, bias, v, offs, top_k, layout)


@cuda_kernel("esmm_act")
def esmm_act(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w3: Tensor | None,
    b3: Tensor | None,
    v: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    activation: str,
    glu: Glu,
    params: tuple[float, ...] = (),
    keep_h: bool = True,
) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.esmm_act."""
    inner = inner_width(columns_of(w1, layout), glu)
    if w3 is not None and (b1 is None) != (b3 is None):  # kernels take both biases or none
        b1, b3 = (w1.new_zeros((w1.shape[0], inner)) if b is None else b for b in (b1, b3))
    if _only_sm80(activation, glu) or _few_rows(x, v, offs) or not _hopper(offs, (inner,), x, w1, w3, *_stored(b1, b3)):
        return sm80.esmm_act(x, w1, b1, w3, b3, v, offs, top_k, layout, activation, glu, params, keep_h)
    return sm90.esmm_act(x, w1, b1, w3, b3, v, offs, top_k, layout, activation, glu, _full(activation, params), keep_h)


@cuda_kernel("esmm_act_backward")
def esmm_act_backward(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    top_k_weights: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    activation: str,
    glu: Glu,
    params: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.esmm_act_backward. One launch on Hopper, two elsewhere."""
    stored, as_layout = as_stored(weight, layout)
    inner = columns_of(stored, as_layout)
    if _only_sm80(activation, glu) or _few_rows(dy, v, offs) or not _hopper(offs, (inner,), dy, stored, h):
        da = sm80.esmm(dy, stored, None, v, offs, top_k, as_layout)
        return activate_backward(da, h, top_k_weights, v, offs, activation, glu, params)  # type: ignore[no-any-return]
    scale = None if top_k_weights is None else top_k_weights.reshape(-1).float()
    dh, a_scaled, dots = sm90.esmm_act_backward(
        dy, stored, h, scale, v, offs, top_k, as_layout, activation, glu, _full(activation, params)
    )
    if top_k_weights is None:
        return dh, a_scaled, h.new_empty(0)
    return dh, a_scaled, dots.view(top_k_weights.shape).to(top_k_weights.dtype)


@cuda_kernel("estmm")
def estmm(
    x: Tensor, g: Tensor, x_index: Tensor | None, g_index: Tensor | None, offs: Tensor, top_k: int, layout: Layout
) -> Tensor:
    """See hexa_fx.ops.estmm."""
    both = x_index is not None and g_index is not None
    if both or not _hopper(offs, (x.shape[1], g.shape[1]), x, g):
        return sm80.estmm(x, g, x_index, g_index, offs, top_k, layout)
    return sm90.estmm(x, g, x_index, g_index, offs, top_k, layout)


@cuda_kernel("esfk")
def esfk(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    x_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See hexa_fx.ops.esfk. One launch, except where a Hopper tile says to split it, and on gemm_sm80 for few rows per expert,
    where dX wants lower tiles than dW.
    """
    if g.shape[0] and _hopper(offs, (x.shape[1], g.shape[1]), x, g, weight):
        dx, dw, db = sm90.esfk(x, g, weight, x_index, offs, top_k, layout, has_bias)
        return dx, dw, g.new_empty(0) if db is None else db
    if not _few_rows(g, None, offs) and weight.numel():
        dx, dw, db = sm80.esfk(x, g, weight, x_index, offs, top_k, layout, has_bias)
        return dx, dw, g.new_empty(0) if db is None else db
    dx = _input_gradient(g, weight, offs, layout)
    dw = sm80.estmm(x, g, x_index, None, offs, top_k, layout)
    return dx, dw, ess(g, None, offs, 1, None) if has_bias else g.new_empty(0)


@cuda_kernel("estmm_add")
def estmm_add(
    into: Tensor,
    x: Tensor,
    g: Tensor,
    x_index: Tensor | None,
    g_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
) -> None:
    """See hexa_fx.ops.adding. The epilogue of the weight tiles adds."""
    hopper = (x_index is None or g_index is None) and _hopper(offs, (x.shape[1], g.shape[1]), x, g)
    held, as_layout = _held(into, layout, hopper)
    family = sm90 if hopper else sm80
    family.estmm(x, g, x_index, g_index, offs, top_k, as_layout, into=held)
    settle(into, held)


@cuda_kernel("esfk_add")
def esfk_add(
    into: Tensor,
    into_bias: Tensor | None,
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    x_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: Layout,
) -> Tensor:
    """See hexa_fx.ops.adding. Launches as `esfk` does."""
    fits = _hopper(offs, (x.shape[1], g.shape[1]), x, g, weight)
    if not weight.numel() or (_few_rows(g, None, offs) and not fits):
        rows = _input_gradient(g, weight, offs, layout)
        estmm_add(into, x, g, x_index, None, offs, top_k, layout)
        if into_bias is not None:
            ess_add(into_bias, g, None, offs, 1, None)
        return rows
    held, as_layout = _held(into, layout, fits)
    bias = _held_bias(into_bias)
    family, target = sm90 if fits else sm80, Into(held, as_layout, bias)
    dx: Tensor = family.esfk(x, g, weight, x_index, offs, top_k, layout, bias is not None, into=target)[0]
    settle(into, held)
    settle(into_bias, bias)
    return dx


def _input_gradient(g: Tensor, weight: Tensor, offs: Tensor, layout: Layout) -> Tensor:
    """The rows of dX, by a launch of their own."""
    stored, transposed = as_stored(weight, flip(layout))
    return sm80.esmm(g, stored, None, None, offs, 1, transposed)


def _held(into: Tensor, layout: Layout, on_hopper: bool) -> tuple[Tensor, Layout]:
    """What a kernel adds to, with its layout: `into` as it lies, or zeros to add to it later if no kernel supports its strides."""
    stored, as_layout = as_stored(into, layout)
    by_expert, by_row, step = stored.stride()
    _, rows, columns = stored.shape
    nested = step == 1 and by_row >= columns and by_expert >= rows * by_row
    if nested and (aligned(stored) or not on_hopper):
        return stored, as_layout
    return substitute(into), layout


def _held_bias(into: Tensor | None) -> Tensor | None:
    return into if into is None or (into.is_contiguous() and aligned(into)) else substitute(into)


def _few_rows(x: Tensor, v: Tensor | None, offs: Tensor) -> bool:
    return row_bucket(row_count(x, v), offs.shape[0] - 1) <= DECODE_BUCKET


def _hopper(offs: Tensor, widths: tuple[int, ...], *operands: Tensor | None) -> bool:
    """Whether the Hopper family takes these operands and stores results of these widths."""
    card = card_of(offs.device.index)
    if card.family_arch != 90 or card.arch != 90 or any(width % 8 for width in widths):
        return False
    return not sm90.unsupported(*operands, experts=offs.shape[0] - 1)


def _only_sm80(activation: str, glu: Glu) -> bool:
    """Whether no Hopper epilogue computes this activation."""
    return activation in SM80_ONLY or (activation, glu) == ("none", "none")


def _stored(*biases: Tensor | None) -> list[Tensor]:
    """The biases that kernels read where they lie. Others are copied first, as those in a slot of the shared cache are."""
    return [b for b in biases if b is not None and b.is_contiguous()]


def _full(activation: str, params: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(params) or ACTIVATIONS[activation].params
