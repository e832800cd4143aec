"""esmm, esmm_act, estmm and esfk on CUDA: the Hopper family where it takes the operands, gemm_sm80 everywhere else."""

from __future__ import annotations

from torch import Tensor

from hexa_fx.codegen.spec import Glu, Layout
from hexa_fx.runtime import cuda_gemm_sm80 as sm80
from hexa_fx.runtime.cuda_launch import cuda_kernel
from hexa_fx.runtime.cuda_rows import ess


@cuda_kernel("esmm")
def esmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: Layout
) -> Tensor:
    """See hexa_fx.ops.esmm."""
    return sm80.esmm(x, weight, bias, v, offs, top_k, layout)


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
    return sm80.esmm_act(x, w1, b1, w3, b3, v, offs, top_k, layout, activation, glu, params, keep_h)


@cuda_kernel("estmm")
def estmm(
    x: Tensor, g: Tensor, x_index: Tensor | None, g_index: Tensor | None, offs: Tensor, top_k: int, layout: Layout
) -> Tensor:
    """See hexa_fx.ops.estmm."""
    return sm80.estmm(x, g, x_index, g_index, offs, top_k, layout)


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
    """See hexa_fx.ops.esfk. In three launches where there is no fused kernel."""
    dx = sm80.esmm(g, weight, None, None, offs, 1, "kn" if layout == "nk" else "nk")
    dw = sm80.estmm(x, g, x_index, None, offs, top_k, layout)
    db: Tensor = ess(g, None, offs, 1, None) if has_bias else g.new_empty(0)
    return dx, dw, db
