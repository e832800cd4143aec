"""``hexa::estmm_add``, ``hexa::ess_add`` and ``hexa::esfk_add``: gradients of weights and biases added to a buffer.

The buffer has the accumulators' type, float32 (float64 for float64), so that a gradient is not rounded to the operands' type on its
way into a sum over micro-batches. The part of an expert without rows stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, esfk, ess, estmm, library, tiles
from hexa_fx.ops.operands import Esfk, Estmm
from hexa_fx.ops.rows import accumulate_dtype, gather_rows
from hexa_fx.ops.tiling import whole

library.define(
    "estmm_add(Tensor(a!) into, Tensor x, Tensor g, Tensor? x_index, Tensor? g_index, Tensor offs, SymInt top_k, "
    "str layout) -> ()"
)
library.define("ess_add(Tensor(a!) into, Tensor g, Tensor? v, Tensor offs, SymInt top_k, Tensor? scale) -> ()")
library.define(
    "esfk_add(Tensor(a!) into, Tensor(b!)? into_bias, Tensor x, Tensor g, Tensor weight, Tensor? x_index, Tensor offs, "
    "SymInt top_k, str layout) -> Tensor dx"
)


def estmm_add(
    into: Tensor,
    x: Tensor,
    g: Tensor,
    x_index: Tensor | None,
    g_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: str,
) -> None:
    """``into += estmm(x, g, ...)``, the product added before it is rounded.

    Args:
        into: (E, N, K) for ``nk``, (E, K, N) for ``kn``, in float32 (float64 for float64), any strides.

    Raises:
        InputError: the arguments do not fit together, or need a gradient.
    """
    torch.ops.hexa.estmm_add(into, x, g, x_index, g_index, offs, top_k, layout)


def ess_add(into: Tensor, g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None = None) -> None:
    """``into += ess(g, ...)``; into is (E, C) as for `estmm_add`."""
    torch.ops.hexa.ess_add(into, g, v, offs, top_k, scale)


def esfk_add(
    into: Tensor,
    into_bias: Tensor | None,
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    x_index: Tensor | None,
    offs: Tensor,
    top_k: int,
    layout: str,
) -> Tensor:
    """Returns dx of `esfk`, adds dW to into, and adds db to into_bias (E, N) unless that is None."""
    dx: Tensor = torch.ops.hexa.esfk_add(into, into_bias, x, g, weight, x_index, offs, top_k, layout)
    return dx


def _check_buffer(op: str, name: str, into: Tensor, x: Tensor, size: tuple[int, ...]) -> None:
    if tuple(into.shape) != size or into.dtype != accumulate_dtype(x.dtype) or into.device != x.device:
        raise InputError(
            f"hexa::{op}: {name} is {checks.shape(into)} on {into.device}; expected {accumulate_dtype(x.dtype)} {size} on "
            f"{x.device}"
        )


def _check_no_gradient(op: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise InputError(f"hexa::{op} has no gradient; call it under torch.no_grad()")


def check_estmm(into: Tensor, *args: Any) -> None:
    """Checks the arguments of estmm_add."""
    estmm.check(*args)
    o = Estmm(*args)
    columns = (o.g.shape[1], o.x.shape[1]) if o.layout == "nk" else (o.x.shape[1], o.g.shape[1])
    _check_buffer("estmm_add", "into", into, o.x, (o.experts, *columns))
    _check_no_gradient("estmm_add", into, o.x, o.g)


def check_ess(into: Tensor, g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> None:
    """Checks the arguments of ess_add."""
    ess.check(g, v, offs, top_k, scale)
    _check_buffer("ess_add", "into", into, g, (offs.shape[0] - 1, g.shape[1]))
    _check_no_gradient("ess_add", into, g, scale)


def check_esfk(into: Tensor, into_bias: Tensor | None, *args: Any) -> None:
    """Checks the arguments of esfk_add."""
    o = Esfk._make((*args, into_bias is not None))
    esfk.check(*o)
    _check_buffer("esfk_add", "into", into, o.x, tuple(o.weight.shape))
    if into_bias is not None:
        _check_buffer("esfk_add", "into_bias", into_bias, o.x, (o.experts, o.g.shape[1]))
    _check_no_gradient("esfk_add", into, into_bias, o.x, o.g, o.weight)


def estmm_add_cpu(into: Tensor, *args: Any) -> None:
    """CPU kernel."""
    o = Estmm(*args)
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    tile = whole(None, o.offs, 1, x)
    tiles.estmm_add(tile, into, tile.operand(x, None), tile.operand(g, None), False, False, o.layout)


def ess_add_cpu(into: Tensor, g: Tensor, v: Tensor | None, offs: Tensor, top_k: int, scale: Tensor | None) -> None:
    """CPU kernel."""
    tile = whole(v, offs, top_k, g)
    tiles.ess_add(tile, into, tile.operand(g, v), v is not None, scale)


def esfk_add_cpu(into: Tensor, into_bias: Tensor | None, *args: Any) -> Tensor:
    """CPU kernel."""
    o = Esfk._make((*args, into_bias is not None))
    tile = whole(o.x_index, o.offs, o.top_k, o.x)
    rows = (tile.operand(o.x, o.x_index), tile.operand(o.g, None))
    return tile.padded(tiles.esfk_add(tile, into, into_bias, *rows, o.weight, o.x_index is not None, o.layout))


def estmm_add_any(into: Tensor, *args: object) -> None:
    """Kernel for any device: torch adds the gradient, already rounded to the operands' type."""
    into.add_(torch.ops.hexa.estmm(*args))


def ess_add_any(into: Tensor, *args: object) -> None:
    """As `estmm_add_any`."""
    into.add_(torch.ops.hexa.ess(*args))


def esfk_add_any(into: Tensor, into_bias: Tensor | None, *args: object) -> Tensor:
    """As `estmm_add_any`."""
    dx, dw, db = torch.ops.hexa.esfk(*args, into_bias is not None)
    into.add_(dw)
    if into_bias is not None:
        into_bias.add_(db)
    return dx  # type: ignore[no-any-return]


def _fake(*_: object) -> None:
    """The operator only writes to its arguments, so it has no result."""


def _fake_esfk(into: Tensor, into_bias: Tensor | None, x: Tensor, g: Tensor, *_: object) -> Tensor:
    return g.new_empty((g.shape[0], x.shape[1]))


for _name, _check, _fake_of, _cpu, _any in (
    ("estmm_add", check_estmm, _fake, estmm_add_cpu, estmm_add_any),
    ("ess_add", check_ess, _fake, ess_add_cpu, ess_add_any),
    ("esfk_add", check_esfk, _fake_esfk, esfk_add_cpu, esfk_add_any),
):
    library.register_fake(_name, _fake_of, _check)
    library.register_kernel(_name, "cpu", _cpu)
    library.register_kernel(_name, "any", _any)
    library.register_mutation(_name, buffers=2 if _name == "esfk_add" else 1)
