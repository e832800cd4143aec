"""The operators of `hexa_fx.ops.fp8` in plain torch, on any device: the reference of kernels.

Elements are read to float32 and multiplied there, which is what products with float32 accumulators do, but for the order of sums.
An expert's weight is read at a time. The offsets are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import (
    BLOCK,
    first_groups,
    padded,
    quantize_groups,
    quantize_rows,
    quantize_weight,
    read_groups,
    read_rows,
    read_weight,
)
from hexa_fx.ops import fp8, fp8_shapes, library  # noqa: F401  (fp8 defines the operators)
from hexa_fx.ops.activations import activation_backward, activation_forward, gate_and_up
from hexa_fx.ops.rows import expert_rows, gather_rows, routed_rows


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x)


def _columns(x: Tensor, v: Tensor | None, offs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return quantize_groups(gather_rows(x, v, top_k), offs)


def _weight(
    q: Tensor, s: Tensor, q_t: Tensor | None, s_t: Tensor | None, w: Tensor, w3: Tensor | None, layout: str, glu: str
) -> None:
    for expert in range(w.shape[0]):
        parts = [part[expert] if layout == "nk" else part[expert].t() for part in (w, w3) if part is not None]
        if glu in ("concat", "interleaved"):
            parts = [half.t() for half in gate_and_up(parts[0].t(), glu)]
        matrix = torch.cat([_filled_up(part) for part in parts])
        elements, scales = quantize_weight(matrix)
        q[expert].copy_(elements)
        s[expert].copy_(scales)
        if q_t is not None and s_t is not None:
            q_t[expert].copy_(elements.t())
            s_t[expert].copy_(scales.t())


def _filled_up(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return torch.nn.functional.pad(matrix, (0, padded(columns) - columns, 0, padded(rows) - rows))


def _product(x: Tensor, w: Tensor, ws: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
    """(n, N) in float32 of rows (n, K) in float32; zero where there is no expert."""
    y = x.new_zeros((x.shape[0], w.shape[1]))
    for expert, start, end in _ranges(offs):
        torch.mm(x[start:end], read_weight(w[expert], ws[expert]).t(), out=y[start:end])
    return y if bias is None else y.add_(expert_rows(bias, offs, y.shape[0]))


def _ranges(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    return ((e, start, end) for e, (start, end) in enumerate(pairwise(offs.tolist())) if start < end)


def _esmm_act(
    x: Tensor,
    xs: Tensor,
    w: Tensor,
    ws: Tensor,
    bias: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    activation: str,
    gated: bool,
    params: Sequence[float],
    keep_h: bool,
) -> tuple[Tensor, ...]:
    h = _product(gather_rows(read_rows(x, xs), v, top_k), w, ws, bias, offs)
    a = activation_forward(h, activation, "concat" if gated else "none", params)
    return *quantize_rows(h if keep_h else h[:0]), *quantize_rows(a)


def _esmm(
    x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, bias: Tensor | None, offs: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    return _product(read_rows(x, xs), w, ws, bias, offs)[:, :columns].to(dtype).contiguous()


def _esmm_act_backward(
    dy: Tensor,
    dys: Tensor,
    w: Tensor,
    ws: Tensor,
    h: Tensor,
    hs: Tensor,
    top_k_weights: Tensor | None,
    v: Tensor,
    offs: Tensor,
    top_k: int,
    activation: str,
    gated: bool,
    params: Sequence[float],
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    da = _product(gather_rows(read_rows(dy, dys), v, top_k), w, ws, None, offs)
    routed, wide, glu = routed_rows(offs, v.shape[0]), read_rows(h, hs), "concat" if gated else "none"
    wide = torch.where(routed, wide, 0)
    a = activation_forward(wide, activation, glu, params)
    dots = (da * a).view(a.shape[0], a.shape[1] // BLOCK, BLOCK).sum(2)
    if top_k_weights is not None:
        share = top_k_weights.reshape(-1).index_select(0, v).float().unsqueeze(1)
        da, a = da * share, a * share
    dh = activation_backward(da, wide, activation, glu, params)
    none = offs.new_zeros(offs.shape[0])
    of_dh, of_a = (
        quantize_groups(t, offs) if need else quantize_groups(t[:0], none) for t, need in zip((dh, a), needs[1:])
    )
    return *quantize_rows(dh if needs[0] else dh[:0]), *of_dh, *of_a, dots if needs[3] else dots[:0].clone()


def _estmm(out: Tensor, x: Tensor, xs: Tensor, g: Tensor, gs: Tensor, offs: Tensor, add: bool) -> None:
    for expert, (first, end) in enumerate(pairwise(first_groups(offs).tolist())):
        a, b = (read_groups(q[first:end], s[first:end]).transpose(0, 1).flatten(1) for q, s in ((x, xs), (g, gs)))
        product = (a @ b.t())[: out.shape[1], : out.shape[2]]
        out[expert].add_(product) if add else out[expert].copy_(product)


def _ess(g: Tensor, gs: Tensor, offs: Tensor) -> Tensor:
    y = gs.new_zeros((offs.shape[0] - 1, g.shape[1]))
    for expert, (first, end) in enumerate(pairwise(first_groups(offs).tolist())):
        y[expert] = read_groups(g[first:end], gs[first:end]).sum((0, 2))
    return y


library.register_fake(
    "quantize_rows_fp8", fp8_shapes.quantize_rows, lambda x: fp8_shapes.check_x("quantize_rows_fp8", "x", x)
)
library.register_fake("quantize_columns_fp8", fp8_shapes.quantize_columns, fp8_shapes.check_columns)
library.register_fake("quantize_weight_fp8", lambda *_: None, fp8_shapes.check_quantize_weight)
library.register_fake("esmm_act_fp8", fp8_shapes.esmm_act, fp8_shapes.check_esmm_act)
library.register_fake("esmm_fp8", fp8_shapes.esmm, fp8_shapes.check_esmm)
library.register_fake("esmm_act_backward_fp8", fp8_shapes.esmm_act_backward, fp8_shapes.check_esmm_act_backward)
library.register_fake("estmm_fp8", lambda *_: None, fp8_shapes.check_estmm)
library.register_fake("ess_fp8", fp8_shapes.ess, fp8_shapes.check_ess)
_KERNELS: dict[str, library.Kernel] = {
    "quantize_rows_fp8": _rows,
    "quantize_columns_fp8": _columns,
    "quantize_weight_fp8": _weight,
    "esmm_act_fp8": _esmm_act,
    "esmm_fp8": _esmm,
    "esmm_act_backward_fp8": _esmm_act_backward,
    "estmm_fp8": _estmm,
    "ess_fp8": _ess,
}
for _name, _kernel in _KERNELS.items():
    library.register_kernel(_name, "cpu", _kernel)
    library.register_kernel(_name, "any", _kernel)
library.register_mutation("quantize_weight_fp8", 4)
library.register_mutation("estmm_fp8", 1)
