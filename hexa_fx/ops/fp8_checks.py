"""What the operators of `hexa_fx.ops.fp8` check of their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, padded
from hexa_fx.ops import checks, fp8, fp8_quantizing, library
from hexa_fx.ops.activations import check_activation

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def weight_sizes(w: Tensor, layout: str, glu: str) -> tuple[int, int, int]:
    """E, and the rows and columns of what `quantize_weight_fp8` makes of a weight."""
    experts, k, n = checks.check_weight("quantize_weight_fp8", "w", w, layout)
    if glu == "none":
        return experts, padded(n), padded(k)
    return experts, 2 * padded(n if glu == "split" else n // 2), padded(k)


def check_weight(op: str, q: Tensor, s: Tensor, offs: Tensor | None = None) -> None:
    """Checks elements (E, N, K) and their scales (E, N / 128, K / 128)."""
    if q.ndim != 3 or q.shape[1] % BLOCK or q.shape[2] % BLOCK:
        raise InputError(f"hexa::{op}: w is {checks.shape(q)}; expected (E, N, K) with multiples of {BLOCK}")
    experts = q.shape[0] if offs is None else offs.shape[0] - 1
    _check(op, "w", q, ELEMENT, (experts, *q.shape[1:]))
    _check(op, "w's scales", s, torch.float32, (experts, q.shape[1] // BLOCK, q.shape[2] // BLOCK))


def _check(op: str, name: str, t: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if t.dtype != dtype or tuple(t.shape) != tuple(shape):
        raise InputError(f"hexa::{op}: {name} is {checks.shape(t)}; expected {dtype} {tuple(shape)}")


def _check_x(op: str, x: Tensor) -> None:
    checks.check_matrix(op, "x", x)
    if x.dtype not in QUANTIZABLE:
        raise InputError(f"hexa::{op}: x has dtype {x.dtype}; expected one of {QUANTIZABLE}")


def _check_rows(op: str, name: str, q: Tensor, s: Tensor, width: int) -> None:
    """Elements (R, C) and their scales (R, C / 128)."""
    checks.check_matrix(op, name, q)
    _check(op, name, q, ELEMENT, (q.shape[0], width))
    _check(op, f"{name}'s scales", s, torch.float32, (q.shape[0], width // BLOCK))


def _check_groups(op: str, name: str, q: Tensor, s: Tensor) -> None:
    """Elements (G, C, 128) and their scales (G, C)."""
    if q.ndim != 3:
        raise InputError(f"hexa::{op}: {name} is {checks.shape(q)}; expected (groups, columns, {BLOCK})")
    _check(op, name, q, ELEMENT, (*q.shape[:2], BLOCK))
    _check(op, f"{name}'s scales", s, torch.float32, q.shape[:2])


def _check_bias(op: str, bias: Tensor | None, w: Tensor) -> None:
    if bias is not None:
        _check(op, "bias", bias, torch.float32, w.shape[:2])


def _quantize_rows(op: str, o: fp8_quantizing.QuantizeRowsFp8) -> None:
    _check_x(op, o.x)


def _quantize_columns(op: str, o: fp8_quantizing.QuantizeColumnsFp8) -> None:
    _check_x(op, o.x)
    checks.check_index(op, o.x, ("v", "offs"), (o.v, o.offs))
    checks.check_rows(op, "x", o.x, o.x.shape[1], o.v, o.top_k)


def _group_rows(op: str, o: fp8_quantizing.GroupRowsFp8) -> None:
    _check_rows(op, "x", o.x, o.xs, padded(o.x.shape[-1]))
    checks.check_index(op, o.x, ("v", "offs"), (o.v, o.offs))
    checks.check_rows(op, "x", o.x, o.x.shape[1], o.v, o.top_k)


def _quantize_weight(op: str, o: fp8_quantizing.QuantizeWeightFp8) -> None:
    w, w3 = o.w, o.w3
    if w.dtype not in QUANTIZABLE:
        raise InputError(f"hexa::{op}: w has dtype {w.dtype}; expected one of {QUANTIZABLE}")
    if (w3 is not None) != (o.glu == "split") or (w3 is not None and (w3.shape, w3.dtype) != (w.shape, w.dtype)):
        raise InputError(f"hexa::{op}: w3 is {None if w3 is None else checks.shape(w3)}; only 'split' has one, like w")
    experts, rows, columns = weight_sizes(w, o.layout, o.glu)
    check_weight(op, o.q, o.s)
    _check(op, "q", o.q, ELEMENT, (experts, rows, columns))
    if o.q_t is not None and o.s_t is not None:
        check_weight(op, o.q_t, o.s_t)
        _check(op, "q_t", o.q_t, ELEMENT, (experts, columns, rows))


def _check_gathered(
    op: str, name: str, rows: Tensor, scales: Tensor, o: fp8.EsmmActFp8 | fp8.EsmmActBackwardFp8
) -> None:
    """What both products with an activation ask of the rows that they gather, their weight and the activation."""
    check_activation(o.activation, fp8.glu_of(o.gated), o.params)
    checks.check_index(op, rows, ("v", "offs"), (o.v, o.offs))
    check_weight(op, o.w, o.ws, o.offs)
    _check_rows(op, name, rows, scales, o.w.shape[2])
    checks.check_rows(op, name, rows, o.w.shape[2], o.v, o.top_k)


def _esmm_act(op: str, o: fp8.EsmmActFp8) -> None:
    _check_gathered(op, "x", o.x, o.xs, o)
    _check_bias(op, o.bias, o.w)


def _esmm(op: str, o: fp8.EsmmFp8) -> None:
    checks.check_index(op, o.x, ("offs",), (o.offs,))
    check_weight(op, o.w, o.ws, o.offs)
    _check_rows(op, "x", o.x, o.xs, o.w.shape[2])
    _check_bias(op, o.bias, o.w)


def _combine(op: str, o: fp8.CombineFp8) -> None:
    checks.check_index(op, o.y, ("inv", "offs"), (o.inv, o.offs))
    _check(op, "y", o.y, torch.uint8, (o.inv.shape[0], padded(o.columns)))
    _check(op, "y's scales", o.ys, torch.float32, (o.inv.shape[0], padded(o.columns) // BLOCK))
    if o.top_k_weights is not None and o.top_k_weights.numel() != o.inv.shape[0]:
        raise InputError(f"hexa::{op}: top_k_weights is {checks.shape(o.top_k_weights)} of {o.inv.shape[0]} rows")


def _esmm_act_backward(op: str, o: fp8.EsmmActBackwardFp8) -> None:
    _check_gathered(op, "dy", o.dy, o.dys, o)
    _check_rows(op, "h", o.h, o.hs, o.w.shape[1] * (2 if o.gated else 1))
    n = o.v.shape[0]
    if o.h.shape[0] != n or len(o.needs) != 4:
        raise InputError(f"hexa::{op}: h is {checks.shape(o.h)} of {n} rows, needs has {len(o.needs)} of 4 marks")
    if o.top_k_weights is not None and o.top_k_weights.numel() != n:
        raise InputError(f"hexa::{op}: top_k_weights is {checks.shape(o.top_k_weights)} of {n} rows")


def _estmm(op: str, o: fp8.EstmmFp8) -> None:
    checks.check_index(op, o.x, ("offs",), (o.offs,))
    _check_groups(op, "x", o.x, o.xs)
    _check_groups(op, "g", o.g, o.gs)
    out, given = o.out, (o.x, o.g)
    sizes = (o.offs.shape[0] - 1, padded(out.shape[1]), padded(out.shape[2])) if out.ndim == 3 else ()
    if o.x.shape[0] != o.g.shape[0] or sizes != (out.shape[0], *(t.shape[1] for t in given)):
        raise InputError(
            f"hexa::{op}: {checks.shape(out)} is no product of {checks.shape(o.x)} and {checks.shape(o.g)}"
        )
    if out.dtype not in ((torch.float32,) if o.add else QUANTIZABLE):
        raise InputError(
            f"hexa::{op}: out is {out.dtype}; sums are added in torch.float32, else rounded to 16 bits or none"
        )


def _ess(op: str, o: fp8.EssFp8) -> None:
    checks.check_index(op, o.g, ("offs",), (o.offs,))
    _check_groups(op, "g", o.g, o.gs)


def _register(op: str, record: Any, check: Callable[[str, Any], None], in_place: bool = False) -> None:
    def fake(*args: Any) -> Any:
        return None if in_place else record(*args).results()

    library.register_fake(op, fake, lambda *args: check(op, record(*args)))


_register("quantize_rows_fp8", fp8_quantizing.QuantizeRowsFp8, _quantize_rows)
_register("quantize_columns_fp8", fp8_quantizing.QuantizeColumnsFp8, _quantize_columns)
_register("group_rows_fp8", fp8_quantizing.GroupRowsFp8, _group_rows)
_register("quantize_weight_fp8", fp8_quantizing.QuantizeWeightFp8, _quantize_weight, in_place=True)
_register("esmm_act_fp8", fp8.EsmmActFp8, _esmm_act)
_register("esmm_fp8", fp8.EsmmFp8, _esmm)
_register("combine_fp8", fp8.CombineFp8, _combine)
_register("esmm_act_backward_fp8", fp8.EsmmActBackwardFp8, _esmm_act_backward)
_register("estmm_fp8", fp8.EstmmFp8, _estmm, in_place=True)
_register("ess_fp8", fp8.EssFp8, _ess)
