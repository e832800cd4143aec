"""The table of operators on whole layers: `hexa::moe_ffn` and its variants, for training and inference, and their backwards.

T tokens, k slots a token, n = T k, E experts, D and I as in a layer; N is I, or 2I for glu ``concat`` and ``interleaved``.
Weights lie as ``layout1`` (w1 and w3) and ``layout2`` (w2) say. What ends in ``_fixed`` gives a token the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec, Layout
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import DENSE, Derived, Operands, experts_last, floating, integers, numbers
from hexa_fx.ops.rows import columns_of, flip
from hexa_fx.ops.table import Activated, Bias, gate_and_up_faults, routing_of, width_of
from hexa_fx.ops.table_variants import check_packed, shaped_as

READ_WITH_X = frozenset({"w1", "w3", "a1", "a3"})
"""Those whose gradients are made of x."""


class _Tokens(Operands):
    x: Annotated[Tensor, floating("T D")]
    top_k_index: Annotated[Tensor, integers("T k")]


class Weights(Operands):
    top_k_weights: Annotated[Tensor | None, numbers("T k")]
    w1: Annotated[Tensor, floating("E N D", layout="layout1")]
    b1: Bias
    w3: Annotated[Tensor | None, floating("E N D", layout="layout1")]
    b3: Bias
    w2: Annotated[Tensor, floating("E O .inner", layout="layout2")]
    b2: Annotated[Tensor | None, floating("E O")]


_, *_parameters = Weights._fields
PARAMETERS = tuple(_parameters)
OPERANDS = ("x", "top_k_weights", *PARAMETERS)
"""The differentiable operands of moe_ffn, in the order of its schema."""
FACTORS = ("a1", "c1", "a3", "c3", "a2", "c2")
SOURCES_OPERANDS = (*OPERANDS, *FACTORS)
"""Those of moe_ffn_sources."""


class Static(Activated):
    layout1: Layout
    layout2: Layout
    recompute_h: bool


def _static(o: Any) -> tuple[Any, ...]:
    return o.activation, o.glu, tuple(o.params), o.layout1, o.layout2, o.recompute_h


class Layer(Operands):
    """What follows from a layer's weights."""

    differentiable: ClassVar[tuple[str, ...]] = OPERANDS
    """In the order of the schema."""

    static = Derived(_static)
    """What decides its programs besides tensors."""
    experts = Derived(lambda o: o.w1.shape[0])
    """E."""
    width = Derived(lambda o: width_of(o.w1, o.layout1, o.glu))
    """Columns of h."""
    inner = Derived(lambda o: inner_width(columns_of(o.w1, o.layout1), o.glu))
    """I."""
    input_size = Derived(lambda o: columns_of(o.w1, flip(o.layout1)))
    """Columns of x."""
    output_size = Derived(lambda o: columns_of(o.w2, o.layout2))
    """Columns of y."""


class Forward(Operands):
    """What follows from the routing, too."""

    top_k = Derived(lambda o: o.top_k_index.shape[1])
    """k."""
    rows = Derived(lambda o: o.top_k_index.shape[0] * o.top_k_index.shape[1])
    """n."""

    def keeps_x(self: Any, needs: Any) -> bool:
        """Whether backward reads x. needs: of every operand, by name, whether it needs a gradient."""
        return self.recompute_h or any(getattr(needs, name, False) for name in READ_WITH_X)

    def hidden(self: Any) -> Tensor:
        """The pre-activation that is kept, empty."""
        return self.x.new_empty((0 if self.recompute_h else self.rows, self.width))  # type: ignore[no-any-return]

    def faults(self: Any) -> str:
        none = "top_k_index names no expert a token; expected at least one" if self.top_k < 1 else ""
        return none or super().faults() or gate_and_up_faults(self, self.layout1)


def static_of(spec: FfnSpec) -> tuple[Any, ...]:
    """The operators' arguments behind their operands; raises `InputError` if that is no `FfnSpec`."""
    if not isinstance(spec, FfnSpec):
        raise InputError(f"spec is a {type(spec).__name__}; expected FfnSpec(activation, glu, ...)")
    return tuple(getattr(spec, name) for name in Static._fields)


@operator("moe_ffn", autocast=True, or_float32=True)
@operator("moe_ffn_fixed", autocast=True)
class MoeFfn(Forward, Static, Weights, _Tokens, Layer):
    """See `hexa_fx.ops.moe_ffn.moe_ffn`."""

    def results(self) -> Any:
        return self.x.new_empty((self.x.shape[0], self.output_size))


@operator("moe_ffn_forward")
@operator("moe_ffn_fixed_forward")
class MoeFfnForward(MoeFfn):
    """`MoeFfn`, whose results are y and what backward needs."""

    returns = "(Tensor y, Tensor h, Tensor v, Tensor inv, Tensor offs)"

    def results(self) -> tuple[Tensor, ...]:
        return super().results(), self.hidden(), *routing_of(self.top_k_index, self.experts)


class Backward(Operands):
    """Operands of a layer's backward, which forward has checked.

    ``needs``: of each differentiable operand, if its gradient is wanted.

    An h in a list is freed after its last use. Buffers to add gradients to may follow the operands, one or None for each
    differentiable operand after x, where kernels are called directly; these gradients are not among the results.
    """

    returns = "Tensor[]"
    checked = False


def gradients_of(o: Any, differentiable: Sequence[str]) -> list[Tensor]:
    """The gradients that are needed, empty."""
    needed = [name for name, need in zip(differentiable, o.needs, strict=True) if need]
    rows = (o.dy.shape[0], o.input_size)
    return [o.dy.new_empty(rows) if name == "x" else _gradient(name, getattr(o, name)) for name in needed]


def _gradient(name: str, t: Tensor) -> Tensor:
    """A gradient, empty; of a factor as PEFT stores it, if it lies so."""
    return torch.empty_like(t) if name[0] == "c" and experts_last(t) else t.new_empty(t.shape)


class _Saved(Operands):
    dy: Tensor
    x: Tensor | None
    h: Tensor | None
    v: Tensor
    inv: Tensor
    offs: Tensor


class _TopK(Operands):
    top_k: int


@operator("moe_ffn_backward")
class MoeFfnBackward(Backward, Static, _TopK, Weights, _Saved, Layer):
    """Of `MoeFfn`, from dy and what forward kept: x and h if they are needed."""

    needs: Sequence[bool]

    def results(self) -> list[Tensor]:
        return gradients_of(self, OPERANDS)


parameters = MoeFfn.pick(*PARAMETERS)
"""Weights and biases, of the arguments of a layer's forward."""


class _Sources(Operands):
    a1: Annotated[Tensor | None, numbers("E r1 D", cast=True)]
    c1: Annotated[Tensor | None, numbers("E N r1", cast=True)]
    a3: Annotated[Tensor | None, numbers("E r3 D", cast=True)]
    c3: Annotated[Tensor | None, numbers("E N r3", cast=True)]
    a2: Annotated[Tensor | None, numbers("E r2 .inner", cast=True)]
    c2: Annotated[Tensor | None, numbers("E O r2", cast=True)]
    alphas: Sequence[float]
    s1: Sequence[Tensor]
    s3: Sequence[Tensor]
    s2: Sequence[Tensor]
    formats: Sequence[str]


class Sources(Operands):
    """What follows from a layer's weights that may be packed."""

    differentiable: ClassVar[tuple[str, ...]] = SOURCES_OPERANDS

    static = Derived(lambda o: (*_static(o), tuple(o.formats), tuple(o.alphas)))
    """What decides its programs besides tensors."""

    def hidden(self: Any) -> Tensor:
        """The pre-activation that is kept, empty."""
        return MoeFfn.hidden(self.shaped(self.x))

    def shaped(self, like: Tensor) -> Self:
        """The same with stand-ins for packed weights that have the shapes of what they hold."""
        o: Any = self
        weights = zip(("w1", "w3", "w2"), (o.w1, o.w3, o.w2), o.formats, strict=True)
        return self._replace(**{n: shaped_as(like, w, f) for n, w, f in weights if w is not None and f != DENSE})


@operator("moe_ffn_sources", autocast=True)
@operator("moe_ffn_sources_fixed", autocast=True)
class MoeFfnSources(Sources, Forward, Static, _Sources, Weights, _Tokens, Layer):
    """`MoeFfn` on weights that are packed, have low-rank additions, or both.

    Args:
        w1, w3, w2: as in `hexa_fx.ops.moe_ffn`, or packed.
        a1 to c2: factors A (E, r, K) and C (E, N, r) of each projection's addition, in any floating dtype.
        alphas: what the three additions (of w1, w3, w2) are multiplied by.
        s1, s3, s2: scale tensors of packed weights, otherwise empty.
        formats: of w1, w3 and w2, a name of `hexa_fx.formats.FORMATS`, or ``dense``.
    """

    def check(self, op: str) -> None:
        if len(self.alphas) != 3 or len(self.formats) != 3:
            counts = f"alphas has {len(self.alphas)} numbers, formats {len(self.formats)} names"
            raise InputError(f"hexa::{op}: {counts}; expected three, for w1, w3 and w2")
        weights = ("w1", self.w1, self.s1), ("w3", self.w3, self.s3), ("w2", self.w2, self.s2)
        for (name, weight, scales), format in zip(weights, self.formats, strict=True):
            if weight is not None and format != DENSE:
                check_packed(op, name, self.x, weight, scales, format)
        for weight, a, c in ((self.w1, self.a1, self.c1), (self.w3, self.a3, self.c3), (self.w2, self.a2, self.c2)):
            if (a is None) != (c is None) or (a is not None and weight is None):
                raise InputError(f"hexa::{op}: a low-rank addition needs both of its factors, and a weight")
        Operands.check(self.shaped(self.x), op)

    def results(self) -> Any:
        return self.x.new_empty((self.x.shape[0], self.shaped(self.x).output_size))


@operator("moe_ffn_sources_forward")
@operator("moe_ffn_sources_fixed_forward")
class MoeFfnSourcesForward(MoeFfnSources):
    """`MoeFfnSources`, whose results are y and what backward needs."""

    returns = "(Tensor y, Tensor h, Tensor u1, Tensor u3, Tensor u2, Tensor v, Tensor inv, Tensor offs)"

    def results(self) -> tuple[Tensor, ...]:
        ranks = [None if a is None else a.shape[1] for a in (self.a1, self.a3, self.a2)]
        u = [self.x.new_empty((0, 0) if rank is None else (self.rows, rank)) for rank in ranks]
        return super().results(), self.hidden(), *u, *routing_of(self.top_k_index, self.experts)


class _SavedOfSources(Operands):
    dy: Tensor
    x: Tensor | None
    h: Tensor | None
    u1: Tensor
    u3: Tensor
    u2: Tensor
    v: Tensor
    inv: Tensor
    offs: Tensor


@operator("moe_ffn_sources_backward", differentiable=False)
class MoeFfnSourcesBackward(Sources, Backward, Static, _Sources, Weights, _SavedOfSources, Layer):
    """Of `MoeFfnSources`, from dy and what forward kept."""

    top_k: int
    needs: Sequence[bool]

    def results(self) -> list[Tensor]:
        return gradients_of(self.shaped(self.dy), SOURCES_OPERANDS)
