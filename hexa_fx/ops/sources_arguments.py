"""The arguments of ``hexa::moe_ffn_sources``, which are those of `hexa::moe_ffn` and what a weight may be besides a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks
from hexa_fx.ops.esmm_packed import check_packed, shaped_as
from hexa_fx.ops.moe_ffn import check as check_moe_ffn
from hexa_fx.ops.projection import DENSE, Projection

OP = "moe_ffn_sources"
SOURCES = (
    "Tensor? a1, Tensor? c1, Tensor? a3, Tensor? c3, Tensor? a2, Tensor? c2, float[] alphas, "
    "Tensor[] s1, Tensor[] s3, Tensor[] s2, str[] formats"
)
OPERANDS = ("x", "top_k_weights", "w1", "b1", "w3", "b3", "w2", "b2", "a1", "c1", "a3", "c3", "a2", "c2")
"""The differentiable operands, in the order of the schema."""


class MoeFfnSources(NamedTuple):
    """Of the operator. In backward, x may be None, and top_k_index is.

    Args:
        w1, w3, w2: as in `hexa_fx.ops.moe_ffn`, or packed.
        a1 to c2: factors A (E, r, K) and C (E, N, r) of each projection's addition, in any floating dtype.
        alphas: what the three additions (of w1, w3, w2) are multiplied by.
        s1, s3, s2: scale tensors of packed weights, otherwise empty.
        formats: of w1, w3 and w2, a name of `hexa_fx.formats.FORMATS`, or ``dense``.
    """

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w3: Tensor | None
    b3: Tensor | None
    w2: Tensor
    b2: Tensor | None
    a1: Tensor | None
    c1: Tensor | None
    a3: Tensor | None
    c3: Tensor | None
    a2: Tensor | None
    c2: Tensor | None
    alphas: Sequence[float]
    s1: Sequence[Tensor]
    s3: Sequence[Tensor]
    s2: Sequence[Tensor]
    formats: Sequence[str]
    activation: str
    glu: str
    params: Sequence[float]
    layout1: str
    layout2: str
    recompute_h: bool

    @property
    def first(self) -> tuple[Projection, ...]:
        """The first projection, and that of up for glu ``split``."""
        one = Projection(self.w1, self.s1, self.formats[0], self.b1, self.a1, self.c1, self.alphas[0], self.layout1)
        if self.w3 is None:
            return (one,)
        other = (self.w3, self.s3, self.formats[1], self.b3, self.a3, self.c3, self.alphas[1], self.layout1)
        return one, Projection(*other)

    @property
    def second(self) -> Projection:
        """The second projection."""
        return Projection(self.w2, self.s2, self.formats[2], self.b2, self.a2, self.c2, self.alphas[2], self.layout2)

    @property
    def steps(self) -> tuple[str, str, Sequence[float]]:
        """What the activation operators are told."""
        return self.activation, self.glu, self.params

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything but tokens and data: what a layer's kernels follow from."""
        weights = [None if t is None else (t.shape, t.dtype, t.stride()) for t in self[3:15]]
        gates = None if self.top_k_weights is None else self.top_k_weights.dtype
        rows = (self.x.dtype, self.x.shape[1], self.top_k_index.dtype, self.top_k_index.shape[1], gates)
        return *rows, *weights, *self.formats, *self.steps[:2], *self.params, *self[-3:]

    def shaped(self, like: Tensor) -> MoeFfnSources:
        """The same with stand-ins for packed weights that have the shapes of what they hold."""
        weights = zip((self.w1, self.w3, self.w2), self.formats, strict=True)
        w1, w3, w2 = (w if w is None or f == DENSE else shaped_as(like, w, f) for w, f in weights)
        assert w1 is not None
        assert w2 is not None
        return self._replace(w1=w1, w3=w3, w2=w2)


def check(*args: object) -> None:
    """Checks shapes, dtypes and devices of the arguments."""
    o = MoeFfnSources(*args)  # type: ignore[arg-type]
    if len(o.alphas) != 3 or len(o.formats) != 3:
        raise InputError(
            f"hexa::{OP}: alphas has {len(o.alphas)} numbers, formats {len(o.formats)} names; expected three, for w1, w3 and w2"
        )
    for name, weight, scales, format in zip(
        ("w1", "w3", "w2"), (o.w1, o.w3, o.w2), (o.s1, o.s3, o.s2), o.formats, strict=True
    ):
        if weight is not None and format != DENSE:
            check_packed(OP, name, o.x, weight, scales, format)
    shaped = o.shaped(o.x)
    check_moe_ffn(*shaped[:9], *shaped[20:])
    for name, factor in zip(OPERANDS[8:], o[9:15], strict=True):
        if factor is not None and (factor.dtype not in checks.FLOATING or factor.device != o.x.device):
            raise InputError(
                f"hexa::{OP}: {name} is {factor.dtype} on {factor.device}; expected numbers on {o.x.device}"
            )
    weights = (shaped.w1, o.a1, o.c1, o.layout1), (shaped.w3, o.a3, o.c3, o.layout1), (shaped.w2, o.a2, o.c2, o.layout2)
    for weight, a, c, layout in weights:
        _check_factors(weight, a, c, layout)


def _check_factors(weight: Tensor | None, a: Tensor | None, c: Tensor | None, layout: str) -> None:
    if (a is None) != (c is None) or (a is not None and weight is None):
        raise InputError(f"hexa::{OP}: a low-rank addition needs both of its factors, and a weight")
    if a is None or c is None or weight is None:
        return
    experts, k, n = checks.check_weight(OP, "weight", weight, layout)
    if a.shape != (experts, a.shape[1], k) or c.shape != (experts, n, a.shape[1]):
        raise InputError(
            f"hexa::{OP}: the factors are {checks.shape(a)} and {checks.shape(c)}; expected ({experts}, r, {k}) and "
            f"({experts}, {n}, r)"
        )
