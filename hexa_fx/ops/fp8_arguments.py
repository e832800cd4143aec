"""What the products of `hexa::moe_ffn_fp8` are given: weights and biases of a layer, quantised and filled up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import padded
from hexa_fx.ops import library
from hexa_fx.ops.activations import gate_and_up
from hexa_fx.ops.fp8_weights import Fp8Weight, quantized
from hexa_fx.ops.table_layers_fp8 import MoeFfnFp8, MoeFfnFp8Backward, MoeFfnFp8Forward

Call = MoeFfnFp8Forward | MoeFfnFp8Backward


def steps(o: Call) -> tuple[str, bool, Sequence[float]]:
    """What products are told of the activation."""
    return o.activation, o.glu != "none", o.params


def first(o: Call, transposed: bool, forward: bool = True) -> Fp8Weight:
    """The first projection, gate and up in one. transposed, forward: as for `quantized`."""
    if isinstance(o, MoeFfnFp8) and o.s1 is not None:
        return Fp8Weight(o.w1, o.s1, None, None)
    return quantized(o.w1, o.w3, o.layout1, o.glu, transposed, o.cached, forward)


def second(o: Call, transposed: bool, forward: bool = True) -> Fp8Weight:
    """The second projection."""
    if isinstance(o, MoeFfnFp8) and o.s2 is not None:
        return Fp8Weight(o.w2, o.s2, None, None)
    return quantized(o.w2, None, o.layout2, "none", transposed, o.cached, forward)


def first_bias(o: Call) -> Tensor | None:
    """(E, H') float32: gate's bias, then up's."""
    halves: tuple[Tensor | None, ...] = (o.b1, o.b3) if o.glu == "split" else (o.b1,)
    if o.glu in ("concat", "interleaved") and o.b1 is not None:
        halves = gate_and_up(o.b1, o.glu)
    if all(half is None for half in halves):
        return None
    none = o.w1.new_zeros((o.experts, o.inner))
    return torch.cat([_filled_up(none if half is None else half) for half in halves], 1)


def second_bias(o: Call) -> Tensor | None:
    """(E, D') float32."""
    return None if o.b2 is None else _filled_up(o.b2)


def _filled_up(bias: Tensor) -> Tensor:
    return torch.nn.functional.pad(bias.float(), (0, padded(bias.shape[1]) - bias.shape[1]))


def kernel(name: str, like: Tensor) -> library.Kernel:
    """An operator on the device of a tensor."""
    return library.kernel_for(name, like.device.type)
