"""Factors of low-rank additions to weights, as a layer's programs read them: ``x @ W^T + s (x @ A^T) @ C^T``.

Neither ``W + s C A`` nor a packed W as a whole ever exists. ``u = x @ A^T`` is an expert-specific product with the rank r as its
width; that with C is added in the accumulators of ``x @ W^T`` (`hexa_fx.ops.products`). A is (E, r, K) and C (E, N, r), of any
strides and dtype. Copies of them are made where they are read, so that none is kept for backward.

Functions here are nodes of programs, by other operators, which `hexa_fx.passes.lowering.graph_pass` makes those of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.records import experts_last
from hexa_fx.ops.rows import columns_of


def composed(function: Callable[..., Any]) -> Any:
    """Decorates a function whose first argument holds the operators. ``on``: the same by the kernels of a device type."""

    @wraps(function)
    def run(*args: Any) -> Any:
        return function(torch.ops.hexa, *args)

    def on(device: str) -> Callable[..., Any]:
        kernels = library.Kernels(device)

        @wraps(function)
        def bound(*args: Any) -> Any:
            return function(kernels, *args)

        return bound

    run.on = on  # type: ignore[attr-defined]
    return run


def _multiplied_with(by: Any, rows: Tensor, factor: Tensor, scale: float = 1.0) -> Tensor:
    """A factor in the rows' dtype, contiguous, scaled."""
    if experts_last(factor):
        matrix = factor.permute(1, 2, 0).flatten(0, 1)
        transposed: Tensor = by.scaled_transpose(matrix, rows.dtype, scale)
        return transposed.view(factor.shape)
    cast = factor.to(rows.dtype, memory_format=torch.contiguous_format).contiguous()
    return cast if scale == 1 else cast.mul(scale)


@composed
def narrowed(by: Any, x: Tensor, a: Tensor, *rows: Any) -> Tensor:
    """``x @ A^T`` (n, r). rows: v, offs and top_k."""
    return by.esmm(x, _multiplied_with(by, x, a), None, *rows, "nk")  # type: ignore[no-any-return]


@composed
def left(by: Any, u: Tensor, c: Tensor, scale: float, layout: str) -> Tensor:
    """``s C`` for products with u, as a weight of the layout lies."""
    scaled = _multiplied_with(by, u, c, scale)
    return scaled if layout == "nk" else scaled.transpose(1, 2)


@composed
def right(by: Any, t: Tensor, a: Tensor, layout: str) -> Tensor:
    """A for products with t, likewise."""
    cast = _multiplied_with(by, t, a)
    return cast if layout == "nk" else cast.transpose(1, 2)


@composed
def narrowed_gradient(by: Any, g: Tensor, c: Tensor, scale: float, *rows: Any) -> Tensor:
    """t (n, r), the gradient of `narrowed` from that of the projection's result: ``g @ (s C)``."""
    return by.esmm(g, _multiplied_with(by, g, c, scale), None, *rows, "kn")  # type: ignore[no-any-return]


@composed
def a_gradient(by: Any, x: Tensor, t: Tensor, a: Tensor, *rows: Any) -> Tensor:
    """dA (E, r, K), of the rows that the projection was given and of t."""
    return by.low_rank_gradients(x, t, None, None, *rows, "nk", a.dtype, 1.0, False)[1]  # type: ignore[no-any-return]


@composed
def c_gradient(
    by: Any, u: Tensor, g: Tensor, c: Tensor, scale: float, both: bool, top_k_weights: Tensor | None, *rows: Any
) -> tuple[Tensor, Tensor]:
    """t, if both are wanted, and dC (E, N, r) in C's dtype and memory order, of one reading of g.

    Args:
        u: rows in expert order, which count as often as routing weights say, if given.
    """
    scaled, last = _multiplied_with(by, g, c, scale) if both else None, experts_last(c)
    t, dc = by.low_rank_gradients(g, u, scaled, top_k_weights, *rows, "kn", c.dtype, scale, last)
    return t, dc.permute(2, 0, 1) if last else dc


def side_by_side(
    layout: str, w1: Tensor, u1: Tensor | None, c1: Tensor | None, u3: Tensor | None, c3: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The additions of gate and up as one: u of both, and each C with zeros where u is the other's; as weights like w1 lie."""
    given = [each for each in (u1, u3) if each is not None]
    first, width, wide = 0, sum(each.shape[1] for each in given), []
    for u, c in ((u1, c1), (u3, c3)):
        rank, columns = 0 if u is None else u.shape[1], columns_of(w1, layout)
        if c is None:
            c = given[0].new_zeros((w1.shape[0], columns, 0) if layout == "nk" else (w1.shape[0], 0, columns))
        around = (first, width - first - rank)
        wide.append(torch.nn.functional.pad(c, around if layout == "nk" else (0, 0, *around)))
        first += rank
    return torch.cat(given, 1), wide[0], wide[1]
