"""What the operators of `hexa_fx.ops.fp8` check of their operands, and the shapes of their results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, group_count, padded
from hexa_fx.ops import checks
from hexa_fx.ops.activations import check_activation
from hexa_fx.ops.rows import row_count

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def rows_and_scales(like: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Empty elements (rows, width) and scales (rows, width / 128)."""
    return like.new_empty((rows, width), dtype=ELEMENT), like.new_empty((rows, width // BLOCK), dtype=torch.float32)


def groups_and_scales(like: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Empty elements (groups, width, 128) and scales (groups, width)."""
    return like.new_empty((groups, width, BLOCK), dtype=ELEMENT), like.new_empty((groups, width), dtype=torch.float32)


def check_x(op: str, name: str, x: Tensor) -> None:
    """Checks that x is a matrix that can be quantised."""
    checks.check_matrix(op, name, x)
    if x.dtype not in QUANTIZABLE:
        raise InputError(f"hexa::{op}: {name} has dtype {x.dtype}; expected one of {QUANTIZABLE}")


def _check(op: str, name: str, t: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if t.dtype != dtype or tuple(t.shape) != tuple(shape):
        raise InputError(f"hexa::{op}: {name} is {checks.shape(t)}; expected {dtype} {tuple(shape)}")


def check_rows(op: str, name: str, q: Tensor, s: Tensor, width: int | None = None) -> None:
    """Checks elements (R, C) and their scales (R, C / 128)."""
    checks.check_matrix(op, name, q)
    width = padded(q.shape[1]) if width is None else width
    _check(op, name, q, ELEMENT, (q.shape[0], width))
    _check(op, f"{name}'s scales", s, torch.float32, (q.shape[0], width // BLOCK))


def check_weight(op: str, q: Tensor, s: Tensor, offs: Tensor | None = None) -> None:
    """Checks elements (E, N, K) and their scales (E, N / 128, K / 128)."""
    if q.ndim != 3 or q.shape[1] % BLOCK or q.shape[2] % BLOCK:
        raise InputError(f"hexa::{op}: w is {checks.shape(q)}; expected (E, N, K) with multiples of {BLOCK}")
    experts = q.shape[0] if offs is None else offs.shape[0] - 1
    _check(op, "w", q, ELEMENT, (experts, *q.shape[1:]))
    _check(op, "w's scales", s, torch.float32, (experts, q.shape[1] // BLOCK, q.shape[2] // BLOCK))


def check_groups(op: str, name: str, q: Tensor, s: Tensor) -> None:
    """Checks elements (G, C, 128) and their scales (G, C)."""
    if q.ndim != 3:
        raise InputError(f"hexa::{op}: {name} is {checks.shape(q)}; expected (groups, columns, {BLOCK})")
    _check(op, name, q, ELEMENT, (*q.shape[:2], BLOCK))
    _check(op, f"{name}'s scales", s, torch.float32, q.shape[:2])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return rows_and_scales(x, x.shape[0], padded(x.shape[1]))


def check_columns(x: Tensor, v: Tensor | None, offs: Tensor, top_k: int) -> None:
    op = "quantize_columns_fp8"
    check_x(op, "x", x)
    checks.check_index(op, x, ("v", "offs"), (v, offs))
    checks.check_rows(op, "x", x, x.shape[1], v, top_k)


def quantize_columns(x: Tensor, v: Tensor | None, offs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return groups_and_scales(x, group_count(row_count(x, v), offs.shape[0] - 1), padded(x.shape[1]))


def weight_sizes(w: Tensor, layout: str, glu: str) -> tuple[int, int, int]:
    """E, and the rows and columns of what `quantize_weight_fp8` makes of a weight."""
    experts, k, n = checks.check_weight("quantize_weight_fp8", "w", w, layout)
    if glu == "none":
        return experts, padded(n), padded(k)
    return experts, 2 * padded(n if glu == "split" else n // 2), padded(k)


def check_quantize_weight(
    q: Tensor, s: Tensor, q_t: Tensor | None, s_t: Tensor | None, w: Tensor, w3: Tensor | None, layout: str, glu: str
) -> None:
    op = "quantize_weight_fp8"
    if w.dtype not in QUANTIZABLE:
        raise InputError(f"hexa::{op}: w has dtype {w.dtype}; expected one of {QUANTIZABLE}")
    if (w3 is not None) != (glu == "split") or (w3 is not None and (w3.shape, w3.dtype) != (w.shape, w.dtype)):
        raise InputError(f"hexa::{op}: w3 is {None if w3 is None else checks.shape(w3)}; only 'split' has one, like w")
    experts, rows, columns = weight_sizes(w, layout, glu)
    check_weight(op, q, s)
    _check(op, "q", q, ELEMENT, (experts, rows, columns))
    if q_t is not None and s_t is not None:
        check_weight(op, q_t, s_t)
        _check(op, "q_t", q_t, ELEMENT, (experts, columns, rows))


def check_esmm_act(
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
) -> None:
    op = "esmm_act_fp8"
    check_activation(activation, "concat" if gated else "none", params)
    checks.check_index(op, x, ("v", "offs"), (v, offs))
    check_weight(op, w, ws, offs)
    check_rows(op, "x", x, xs, w.shape[2])
    checks.check_rows(op, "x", x, w.shape[2], v, top_k)
    if bias is not None:
        _check(op, "bias", bias, torch.float32, w.shape[:2])


def esmm_act(
    x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, bias: Tensor | None, v: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    *_, gated, _, keep_h = rest
    n, width = v.shape[0], w.shape[1]
    return *rows_and_scales(x, n if keep_h else 0, width), *rows_and_scales(x, n, width // 2 if gated else width)


def check_esmm(
    x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, bias: Tensor | None, offs: Tensor, columns: int, dtype: torch.dtype
) -> None:
    op = "esmm_fp8"
    checks.check_index(op, x, ("offs",), (offs,))
    check_weight(op, w, ws, offs)
    check_rows(op, "x", x, xs, w.shape[2])
    if bias is not None:
        _check(op, "bias", bias, torch.float32, w.shape[:2])
    if padded(columns) != w.shape[1] or dtype not in QUANTIZABLE:
        raise InputError(f"hexa::{op}: {columns} columns of {dtype} of a weight {checks.shape(w)}")


def esmm(
    x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, bias: Tensor | None, offs: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    return x.new_empty((x.shape[0], columns), dtype=dtype)


def check_esmm_act_backward(
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
) -> None:
    op = "esmm_act_backward_fp8"
    check_activation(activation, "concat" if gated else "none", params)
    checks.check_index(op, dy, ("v", "offs"), (v, offs))
    check_weight(op, w, ws, offs)
    check_rows(op, "dy", dy, dys, w.shape[2])
    checks.check_rows(op, "dy", dy, w.shape[2], v, top_k)
    check_rows(op, "h", h, hs, w.shape[1] * (2 if gated else 1))
    if h.shape[0] != v.shape[0] or len(needs) != 4:
        raise InputError(f"hexa::{op}: h is {checks.shape(h)} of {v.shape[0]} rows, needs has {len(needs)} of 4 marks")
    if top_k_weights is not None and top_k_weights.numel() != v.shape[0]:
        raise InputError(f"hexa::{op}: top_k_weights is {checks.shape(top_k_weights)} of {v.shape[0]} rows")


def esmm_act_backward(
    dy: Tensor,
    dys: Tensor,
    w: Tensor,
    ws: Tensor,
    h: Tensor,
    hs: Tensor,
    top_k_weights: Tensor | None,
    v: Tensor,
    offs: Tensor,
    *rest: object,
) -> tuple[Tensor, ...]:
    needs = rest[-1]
    assert isinstance(needs, Sequence)
    n, width, inner = v.shape[0], h.shape[1], w.shape[1]
    groups = group_count(n, offs.shape[0] - 1)
    rows, columns, activations, dots = needs
    return (
        *rows_and_scales(h, n if rows else 0, width),
        *groups_and_scales(h, groups if columns else 0, width),
        *groups_and_scales(h, groups if activations else 0, inner),
        h.new_empty((n if dots else 0, inner // BLOCK), dtype=torch.float32),
    )


def check_estmm(out: Tensor, x: Tensor, xs: Tensor, g: Tensor, gs: Tensor, offs: Tensor, add: bool) -> None:
    op = "estmm_fp8"
    checks.check_index(op, x, ("offs",), (offs,))
    check_groups(op, "x", x, xs)
    check_groups(op, "g", g, gs)
    sizes = (offs.shape[0] - 1, padded(out.shape[1]), padded(out.shape[2])) if out.ndim == 3 else ()
    if x.shape[0] != g.shape[0] or sizes != (out.shape[0], x.shape[1], g.shape[1]):
        raise InputError(f"hexa::{op}: {checks.shape(out)} is no product of {checks.shape(x)} and {checks.shape(g)}")
    if out.dtype not in ((torch.float32,) if add else QUANTIZABLE):
        raise InputError(
            f"hexa::{op}: out is {out.dtype}; sums are added in torch.float32, else rounded to 16 bits or none"
        )


def check_ess(g: Tensor, gs: Tensor, offs: Tensor) -> None:
    checks.check_index("ess_fp8", g, ("offs",), (offs,))
    check_groups("ess_fp8", "g", g, gs)


def ess(g: Tensor, gs: Tensor, offs: Tensor) -> Tensor:
    return g.new_empty((offs.shape[0] - 1, g.shape[1]), dtype=torch.float32)
