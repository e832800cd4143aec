"""The arguments of `hexa::moe_ffn_fp8`, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import padded
from hexa_fx.ops import library
from hexa_fx.ops.activations import gate_and_up, inner_width
from hexa_fx.ops.fp8_weights import Fp8Weight, quantized
from hexa_fx.ops.rows import columns_of


class MoeFfnFp8(NamedTuple):
    """As `hexa_fx.ops.moe_ffn.moe_ffn` has them. x and every weight may be bfloat16, float16 or float32.

    Args:
        cached: whether quantised weights are kept; not where other weights take turns in the same memory.
        s1, s2: scales of w1 and w2, which are quantised already, and frozen: (E, H', D') and (E, D', I') e4m3 as
            `quantize_weight_fp8` makes them. Nothing in such a call needs a gradient.
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
    activation: str
    glu: str
    params: Sequence[float]
    layout1: str
    layout2: str
    recompute_h: bool
    cached: bool
    s1: Tensor | None = None
    s2: Tensor | None = None

    @property
    def floating(self) -> dict[str, Tensor | None]:
        """x, and weights and biases that are not quantised already, by name."""
        found = {"x": self.x, "b1": self.b1, "b3": self.b3, "b2": self.b2}
        return found if self.s1 is not None else {**found, "w1": self.w1, "w3": self.w3, "w2": self.w2}

    @property
    def input_size(self) -> int:
        """Columns of x."""
        return self.w1.shape[2] if self.layout1 == "nk" else self.w1.shape[1]

    @property
    def output_size(self) -> int:
        """Columns of the result."""
        return columns_of(self.w2, self.layout2)

    @property
    def inner(self) -> int:
        """I."""
        return inner_width(columns_of(self.w1, self.layout1), self.glu)

    @property
    def hidden(self) -> int:
        """H', the columns of the quantised pre-activation."""
        return padded(self.inner) * (1 if self.glu == "none" else 2)

    @property
    def steps(self) -> tuple[str, bool, Sequence[float]]:
        """What products are told of the activation."""
        return self.activation, self.glu != "none", self.params

    def first(self, transposed: bool, forward: bool = True) -> Fp8Weight:
        """The first projection, gate and up in one. transposed, forward: as for `quantized`."""
        if self.s1 is not None:
            return Fp8Weight(self.w1, self.s1, None, None)
        return quantized(self.w1, self.w3, self.layout1, self.glu, transposed, self.cached, forward)

    def second(self, transposed: bool, forward: bool = True) -> Fp8Weight:
        """The second projection."""
        if self.s2 is not None:
            return Fp8Weight(self.w2, self.s2, None, None)
        return quantized(self.w2, None, self.layout2, "none", transposed, self.cached, forward)

    def first_bias(self) -> Tensor | None:
        """(E, H') float32: gate's bias, then up's."""
        halves: tuple[Tensor | None, ...] = (self.b1, self.b3) if self.glu == "split" else (self.b1,)
        if self.glu in ("concat", "interleaved") and self.b1 is not None:
            halves = gate_and_up(self.b1, self.glu)
        if all(half is None for half in halves):
            return None
        none = self.w1.new_zeros((self.w1.shape[0], self.inner))
        return torch.cat([_filled_up(none if half is None else half) for half in halves], 1)

    def second_bias(self) -> Tensor | None:
        """(E, D') float32."""
        return None if self.b2 is None else _filled_up(self.b2)


def _filled_up(bias: Tensor) -> Tensor:
    return torch.nn.functional.pad(bias.float(), (0, padded(bias.shape[1]) - bias.shape[1]))


def kernel(name: str, like: Tensor) -> library.Kernel:
    """An operator on the device of a tensor."""
    return library.kernel_for(name, like.device.type)
