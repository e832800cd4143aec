"""A projection of experts: a weight, dense or packed, with or without a low-rank addition: ``x @ W^T + s (x @ A^T) @ C^T``.

Neither ``W + s C A`` nor a packed W as a whole ever exists. Products with A and C are expert-specific products of their own, with
the rank as their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.ops.rows import flip

_OPS = torch.ops.hexa

DENSE = "dense"
"""The format of a weight that is a tensor of numbers."""


class Projection(NamedTuple):
    """One projection of all experts.

    Args:
        weight: (E, N, K) or (E, K, N), as ``layout`` says; or such a weight as ``format`` packs it.
        scales: that go with a packed weight.
        format: a name of `hexa_fx.formats.FORMATS`, or `DENSE`.
        bias: (E, N) or None.
        a, c: (E, r, K) and (E, N, r), any strides; both None where there is no addition.
        scale: s.
        layout: of the weight.
    """

    weight: Tensor
    scales: Sequence[Tensor]
    format: str
    bias: Tensor | None
    a: Tensor | None
    c: Tensor | None
    scale: float
    layout: str


class Rows(NamedTuple):
    """Where rows are read: in expert order if v is None, else gathered from tokens with top_k slots each."""

    v: Tensor | None
    offs: Tensor
    top_k: int

    @property
    def own(self) -> Rows:
        """Rows in expert order."""
        return Rows(None, self.offs, 1)


def _product(x: Tensor, p: Projection, bias: Tensor | None, rows: Rows, layout: str) -> Tensor:
    """``x @ W^T + b`` with the weight read as ``layout`` says."""
    if p.format == DENSE:
        dense: Tensor = _OPS.esmm(x, p.weight, bias, *rows, layout)
        return dense
    packed: Tensor = _OPS.esmm_packed(x, p.weight, p.scales, p.format, bias, *rows, layout)
    return packed


def project(x: Tensor, p: Projection, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """(n, N) and ``x @ A^T`` (n, r), None without an addition."""
    y = _product(x, p, p.bias, rows, p.layout)
    if p.a is None or p.c is None:
        return y, None
    u = _OPS.esmm(x, p.a, None, *rows, "nk")
    return y.add_(_OPS.esmm(u, p.c, None, *rows.own, "nk"), alpha=p.scale), u


def input_gradient(g: Tensor, p: Projection, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """(n, K) of the gradient g (n, N), and ``g @ C`` (n, r), None without an addition."""
    dx = _product(g, p, None, rows, flip(p.layout))
    if p.a is None or p.c is None:
        return dx, None
    t = _OPS.esmm(g, p.c, None, *rows, "kn")
    return dx.add_(_OPS.esmm(t, p.a, None, *rows.own, "kn"), alpha=p.scale), t


def factor_gradients(
    x: Tensor,
    u: Tensor | None,
    g: Tensor,
    t: Tensor | None,
    p: Projection,
    of_x: Rows,
    of_g: Rows,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """(dA, dC), each where ``needs`` asks for it.

    Args:
        x, u: rows that the projection was given, and their products with A.
        g, t: the gradient of what it gave, and its products with C.
        of_x, of_g: how rows of x and of g are read; u and t are in expert order.
    """
    da = dc = None
    top_k = max(of_x.top_k, of_g.top_k)
    if needs[0] and t is not None:
        da = _OPS.estmm(x, t, of_x.v, None, of_x.offs, top_k, "nk").mul_(p.scale)
    if needs[1] and u is not None:
        dc = _OPS.estmm(u, g, None, of_g.v, of_g.offs, top_k, "nk").mul_(p.scale)
    return da, dc
