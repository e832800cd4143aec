"""Argument checks of the operators: shapes, dtypes and devices, before anything runs. Each failure is one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.errors import InputError

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def shape(t: Tensor) -> str:
    """``torch.float32 (4, 8)`` for an error message."""
    return f"{t.dtype} {tuple(t.shape)}"


def check_floating(op: str, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Checks that all given tensors have the same supported floating-point dtype and device. The first one is given."""
    first = tensors[0]
    assert first is not None
    dtype, device = first.dtype, first.device
    if dtype not in FLOATING:
        raise InputError(f"hexa::{op}: {names[0]} has dtype {dtype}; expected one of {FLOATING}")
    for name, t in zip(names, tensors, strict=True):
        if t is None:
            continue
        if t.dtype != dtype:
            raise InputError(
                f"hexa::{op}: {names[0]} is {dtype} but {name} is {t.dtype}; cast one of them, or run under "
                "torch.autocast"
            )
        if t.device != device:
            raise InputError(f"hexa::{op}: {names[0]} is on {device} but {name} is on {t.device}")


def check_index(op: str, like: Tensor, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Checks that all given tensors are int32 vectors on the device of ``like``, as `hexa::reindex` makes them."""
    for name, t in zip(names, tensors, strict=True):
        if t is None:
            continue
        if t.dtype != torch.int32 or t.ndim != 1:
            raise InputError(f"hexa::{op}: {name} is {shape(t)}; expected an int32 vector, as hexa::reindex returns it")
        if t.device != like.device:
            raise InputError(f"hexa::{op}: {name} is on {t.device}, the data on {like.device}")


def check_matrix(op: str, name: str, t: Tensor) -> None:
    """Checks that t has two dimensions."""
    if t.ndim != 2:
        raise InputError(f"hexa::{op}: {name} is {shape(t)}; expected a matrix")


def check_routing(op: str, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None) -> None:
    """Checks that top_k_index is integer (T, k) and top_k_weights None or floating (T, k), both on x's device."""
    index = top_k_index
    if index.ndim != 2 or index.dtype not in INTEGER or index.shape[0] != x.shape[0]:
        raise InputError(
            f"hexa::{op}: top_k_index is {shape(index)}; expected integer ({x.shape[0]}, experts per token), as x is "
            f"{shape(x)}"
        )
    if index.shape[1] < 1:
        raise InputError(f"hexa::{op}: top_k_index is {shape(index)}; expected at least one expert per token")
    if index.device != x.device:
        raise InputError(f"hexa::{op}: top_k_index is on {index.device}, x on {x.device}")
    if top_k_weights is None:
        return
    if top_k_weights.shape != index.shape or top_k_weights.dtype not in FLOATING:
        raise InputError(f"hexa::{op}: top_k_weights is {shape(top_k_weights)}; expected floating {tuple(index.shape)}")
    if top_k_weights.device != x.device:
        raise InputError(f"hexa::{op}: top_k_weights is on {top_k_weights.device}, x on {x.device}")


def check_layout(op: str, layout: str) -> None:
    """Checks that the layout is ``nk`` or ``kn``."""
    if layout not in ("nk", "kn"):
        raise InputError(f"hexa::{op}: unknown layout {layout!r}; expected 'nk' (E, out, in) or 'kn' (E, in, out)")


def check_rows(op: str, name: str, t: Tensor, width: int, index: Tensor | None = None, top_k: int = 1) -> None:
    """Checks that t is a matrix of ``width`` columns, which has n / top_k rows if an index vector of n rows is given."""
    if t.ndim != 2 or t.shape[1] != width:
        raise InputError(f"hexa::{op}: {name} is {shape(t)}; expected (rows, {width})")
    if top_k < 1:
        raise InputError(f"hexa::{op}: top_k is {top_k}; expected 1 or more")
    if index is not None and t.shape[0] * top_k != index.shape[0]:
        raise InputError(
            f"hexa::{op}: {name} is {shape(t)}, so with top_k = {top_k} its index needs {t.shape[0] * top_k} entries, "
            f"not {index.shape[0]}"
        )


def check_weight(op: str, name: str, weight: Tensor, layout: str, offs: Tensor | None = None) -> tuple[int, int, int]:
    """Checks that weight is (E, N, K) for ``nk`` or (E, K, N) for ``kn``. Returns the sizes (E, K, N)."""
    check_layout(op, layout)
    if weight.ndim != 3:
        raise InputError(f"hexa::{op}: {name} is {shape(weight)}; expected 3 dimensions, experts first")
    experts, rows, columns = weight.shape
    if offs is not None and offs.shape[0] != experts + 1:
        raise InputError(
            f"hexa::{op}: {name} has {experts} experts, so offs needs {experts + 1} entries, not {offs.shape[0]}"
        )
    return (experts, columns, rows) if layout == "nk" else (experts, rows, columns)


def check_bias(op: str, name: str, bias: Tensor | None, experts: int, width: int) -> None:
    """Checks that bias is None or (E, width)."""
    if bias is not None and tuple(bias.shape) != (experts, width):
        raise InputError(f"hexa::{op}: {name} is {shape(bias)}; expected ({experts}, {width})")
