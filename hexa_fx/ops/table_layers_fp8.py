"""The table of layers that compute in FP8 blocks: `hexa::moe_ffn_fp8`, for training and inference, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from hexa_fx.formats.fp8_scaling import ELEMENT, padded
from hexa_fx.ops.forms import FLOATING
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import Operands
from hexa_fx.ops.table import routing_of
from hexa_fx.ops.table_fp8 import is_whole, rows_and_scales, scale_faults
from hexa_fx.ops.table_layers import OPERANDS, PARAMETERS, Backward, Layer, MoeFfn, Static, Weights, gradients_of


class _Cached(Operands):
    cached: bool


@operator("moe_ffn_fp8_forward")
class MoeFfnFp8Forward(_Cached, MoeFfn):
    """`MoeFfn` whose products multiply e4m3 with block scales: y and what backward needs. All dtypes are floating, in any mixture.

    Args:
        cached: whether quantised weights are kept; not where other weights take turns in the same memory.
    """

    mixed = (*FLOATING, ELEMENT)
    returns = "(Tensor y, Tensor xq, Tensor xs, Tensor h, Tensor hs, Tensor v, Tensor inv, Tensor offs)"

    @property
    def floating(self) -> dict[str, Tensor]:
        """x, and weights and biases that are not quantised already, by name."""
        given = {name: getattr(self, name) for name in ("x", *PARAMETERS)}
        return {name: t for name, t in given.items() if t is not None and t.dtype != ELEMENT}

    def results(self) -> tuple[Tensor, ...]:
        x = rows_and_scales(self.x, self.x.shape[0], padded(self.input_size))
        halves = 1 if self.glu == "none" else 2
        h = rows_and_scales(self.x, 0 if self.recompute_h else self.rows, padded(self.inner) * halves)
        return MoeFfn.results(self), *x, *h, *routing_of(self.top_k_index, self.experts)


@operator("moe_ffn_fp8", autocast=True)
class MoeFfnFp8(MoeFfnFp8Forward):
    """The same without gradients, or differentiable.

    Args:
        s1, s2: scales of w1 and w2, which are quantised already, and frozen: (E, H', D') and (E, D', I') e4m3 as
            `quantize_weight_fp8` makes them. Nothing in such a call needs a gradient.
    """

    s1: Tensor | None
    s2: Tensor | None
    returns = "Tensor"
    defaults: ClassVar[dict[str, object]] = {"s1": None, "s2": None}

    def faults(self) -> str:
        quantised = [w is not None and w.dtype == ELEMENT for w in (self.x, self.w1, self.w3, self.w2)]
        if quantised != [False, self.s1 is not None, False, self.s2 is not None] or quantised[1] != quantised[3]:
            return "w1 and w2 are quantised, and have scales, or neither is"
        if quantised[1] and not is_whole(self.w1, self.w2, self.glu, self.layout1, self.layout2):
            return "quantised weights have layout nk, whole blocks, and gate and up as halves if any"
        return super().faults() or scale_faults(self.w1, self.s1) or scale_faults(self.w2, self.s2)

    def results(self) -> Any:
        return MoeFfn.results(self)


class _SavedInFp8(Operands):
    dy: Tensor
    xq: Tensor | None
    xs: Tensor | None
    h: Tensor | None
    hs: Tensor | None
    v: Tensor
    inv: Tensor
    offs: Tensor


@operator("moe_ffn_fp8_backward", differentiable=False)
class MoeFfnFp8Backward(Backward, _Cached, Static, Weights, _SavedInFp8, Layer):
    """Of `MoeFfnFp8`, from dy and what forward kept."""

    top_k: int
    needs: Sequence[bool]

    def results(self) -> list[Tensor]:
        return gradients_of(self, OPERANDS)
