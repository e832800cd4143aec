"""A projection of experts: a weight, dense or packed, with or without a low-rank addition: ``x @ W^T + s (x @ A^T) @ C^T``.

Neither ``W + s C A`` nor a packed W as a whole ever exists. ``x @ A^T`` is an expert-specific product with the rank as its width;
that with C is added in the accumulators of ``x @ W^T`` (`hexa_fx.ops.low_rank`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.ops.rows import columns_of, flip

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
        a, c: (E, r, K) and (E, N, r), any strides and dtype; both None where there is no addition.
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

    def left(self, rows: Tensor) -> Tensor:
        """``s C`` for products with these rows."""
        assert self.c is not None
        return _multiplied_with(rows, self.c, self.scale)

    def added(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u (n, r) = ``x @ A^T``, and ``s C`` as the weight lies."""
        c = self.left(u)
        return u, c if self.layout == "nk" else c.transpose(1, 2)


class Rows(NamedTuple):
    """Where rows are read: in expert order if v is None, else gathered from tokens with top_k slots each."""

    v: Tensor | None
    offs: Tensor
    top_k: int

    @property
    def own(self) -> Rows:
        """Rows in expert order."""
        return Rows(None, self.offs, 1)


def _multiplied_with(rows: Tensor, factor: Tensor, scale: float = 1.0) -> Tensor:
    """A factor in the rows' dtype, contiguous, scaled. Copies are made where they are read, so that none is kept for backward."""
    if experts_last(factor):
        matrix = factor.permute(1, 2, 0).flatten(0, 1)
        transposed: Tensor = _OPS.scaled_transpose(matrix, rows.dtype, scale)
        return transposed.view(factor.shape)
    cast = factor.to(rows.dtype, memory_format=torch.contiguous_format).contiguous()
    return cast if scale == 1 else cast * scale


def experts_last(factor: Tensor) -> bool:
    """Whether a factor (E, N, r) lies as (N, r, E), which is how PEFT stores those of its second linear layer."""
    experts, _, rank = factor.shape
    return experts > 1 and factor.stride() == (1, rank * experts, experts)


def narrowed(x: Tensor, p: Projection, rows: Rows) -> Tensor | None:
    """``x @ A^T`` (n, r); None without an addition."""
    return None if p.a is None else _OPS.esmm(x, _multiplied_with(x, p.a), None, *rows, "nk")


def project(x: Tensor, p: Projection, rows: Rows, u: Tensor | None) -> Tensor:
    """(n, N), of rows and their products with A."""
    return _product(x, p, p.bias, rows, p.layout, None if u is None else p.added(u))


def narrowed_gradient(g: Tensor, p: Projection, rows: Rows) -> Tensor | None:
    """The gradient of `narrowed` from that of the projection's result, ``g @ (s C)`` (n, r); None without an addition."""
    return None if p.c is None else _OPS.esmm(g, p.left(g), None, *rows, "kn")


def added_gradient(p: Projection, t: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """What the rows' gradient has besides ``g @ W``: t (n, r), and A as the weight is read there."""
    if t is None or p.a is None:
        return None
    a = _multiplied_with(t, p.a)
    return t, a if p.layout == "nk" else a.transpose(1, 2)


def input_gradient(g: Tensor, p: Projection, rows: Rows, t: Tensor | None) -> Tensor:
    """(n, K), of the gradient g (n, N) and its products with C."""
    return _product(g, p, None, rows, flip(p.layout), added_gradient(p, t))


def _product(
    x: Tensor, p: Projection, bias: Tensor | None, rows: Rows, layout: str, added: tuple[Tensor, Tensor] | None
) -> Tensor:
    """``x @ W^T + b`` with the weight read as ``layout`` says, and the product of ``added``."""
    if p.format == DENSE:
        operands = (x, p.weight, bias, *rows, layout)
        dense: Tensor = _OPS.esmm(*operands) if added is None else _OPS.esmm_low_rank(*operands, *added)
        return dense
    packed = (x, p.weight, p.scales, p.format, bias, *rows, layout)
    found: Tensor = _OPS.esmm_packed(*packed) if added is None else _OPS.esmm_packed_low_rank(*packed, *added)
    return found


def side_by_side(
    first: Sequence[Projection], u: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The additions of a first projection, or of gate and up, as one: U of both, and each C with zeros where U is the other's."""
    given = [each for each in u if each is not None]
    if not given:
        return None
    if len(first) == 1:
        return *first[0].added(given[0]), None
    before, width, wide = 0, sum(each.shape[1] for each in given), []
    for p, each in zip(first, u, strict=True):
        rank = 0 if each is None else each.shape[1]
        c = p.left(given[0]) if rank else p.weight.new_zeros((p.weight.shape[0], columns_of(p.weight, p.layout), 0))
        c = torch.nn.functional.pad(c, (before, width - before - rank))
        wide.append(c if p.layout == "nk" else c.transpose(1, 2))
        before += rank
    return torch.cat(given, 1), wide[0], wide[1]


def a_gradient(x: Tensor, t: Tensor, p: Projection, rows: Rows) -> Tensor:
    """dA (E, r, K), of rows that the projection was given and of t, its result's gradient times s C."""
    assert p.a is not None
    da: Tensor = _OPS.low_rank_gradients(x, t, None, None, *rows, "nk", p.a.dtype, 1.0, False)[1]
    return da


def c_gradient(u: Tensor, g: Tensor, p: Projection, rows: Rows) -> Tensor:
    """dC (E, N, r), of u, the given rows' products with A, and of the result's gradient, whose rows are read as ``rows`` says."""
    return _of_c(u, g, p, rows, None, None)[1]


def narrowed_and_c_gradient(
    u: Tensor, g: Tensor, p: Projection, rows: Rows, top_k_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`narrowed_gradient` and `c_gradient` of one reading of g. The latter is of rows of u times routing weights, if given."""
    return _of_c(u, g, p, rows, p.left(g), top_k_weights)


def _of_c(
    u: Tensor, g: Tensor, p: Projection, rows: Rows, scaled: Tensor | None, top_k_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same without the former if s C is not given. dC is in C's dtype and memory order."""
    assert p.c is not None
    last = experts_last(p.c)
    t, dc = _OPS.low_rank_gradients(g, u, scaled, top_k_weights, *rows, "kn", p.c.dtype, p.scale, last)
    return t, dc.permute(2, 0, 1) if last else dc
