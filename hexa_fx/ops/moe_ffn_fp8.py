"""``hexa::moe_ffn_fp8``: `hexa::moe_ffn` whose products multiply e4m3 with block scales, forward and backward.

Tokens are quantised once each, weights once for as long as they stay what they are (`hexa_fx.ops.fp8_weights`). The activation and
its gradient are computed in float32, and quantised from there (`hexa_fx.ops.fp8`). Of the pre-activation e4m3 is kept for backward.
A call that this cannot take runs `hexa::moe_ffn`, which is said once with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from hexa_fx.errors import InputError
from hexa_fx.formats.blocks import FP8_BLOCK
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import library, sources
from hexa_fx.ops.forms import DENSE
from hexa_fx.ops.fp8_arguments import first, first_bias, kernel, second, second_bias, steps
from hexa_fx.ops.moe_ffn_autograd import Layer, LayerFunction
from hexa_fx.ops.moe_ffn_fp8_backward import backward
from hexa_fx.ops.records import Operands
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_fp8 import QUANTIZABLE, is_whole
from hexa_fx.ops.table_layers import PARAMETERS, MoeFfn, MoeFfnSources, parameters
from hexa_fx.ops.table_layers_fp8 import MoeFfnFp8, MoeFfnFp8Backward, MoeFfnFp8Forward
from hexa_fx.torch_private import (
    DispatchKeySet,
    FakeTensor,
    FunctionalTensor,
    _any_requires_grad,
    _AutoDispatchBelowAutograd,
)

_OPS = torch.ops.hexa
_KNOWN = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
"""Classes of tensors that lie in memory as they say, and of those that stand for them while a call is traced."""
log = logging.getLogger(__name__)


def say_once(message: str) -> None:
    """Logs a warning, once in a process."""
    if not torch.compiler.is_dynamo_compiling():
        _log_once(message)


@cache
def _log_once(message: str) -> None:
    log.warning("%s", message)


def _on_cpu(o: MoeFfnFp8Forward) -> str:
    say_once("FP8 is emulated on a CPU: results are those of a GPU, the time is not")
    return ""


why_not_on: dict[str, Callable[[MoeFfnFp8Forward], str]] = {"cpu": _on_cpu}
"""By device type: why its kernels cannot take a call, empty if they can. Looks at dtypes and sizes only."""


def why_not(o: MoeFfnFp8Forward) -> str:
    """Why a call runs in its tensors' dtype; empty if it runs in FP8."""
    for name, t in o.floating.items():
        if t.dtype not in QUANTIZABLE:
            return f"{name} is {t.dtype}"
        if type(t) not in _KNOWN:
            return f"{name} is of class {type(t).__name__}"
    ask = why_not_on.get(o.x.device.type)
    return f"there are no FP8 kernels for {o.x.device.type}" if ask is None else ask(o)


def _exact_call(o: MoeFfnFp8) -> tuple[Any, Operands] | None:
    """The operator that runs a call which FP8 cannot take, and its operands; None for others."""
    reason = why_not(o)
    if not reason:
        return None
    dtype = o.x.dtype
    say_once(f"compute='fp8_block' runs in {dtype}: {reason}")
    if o.s1 is not None:
        formats = [FP8_BLOCK.name, DENSE, FP8_BLOCK.name]
        scales = {"s1": [o.s1], "s3": [], "s2": [o.s2], "formats": formats, "alphas": [1.0] * 3}
        return _OPS.moe_ffn_sources.default, o.to(MoeFfnSources, **scales)
    weights = {name: None if t is None else t.to(dtype) for name, t in zip(PARAMETERS, parameters(o))}
    return _OPS.moe_ffn.default, o.to(MoeFfn, **weights)


def run(o: MoeFfnFp8Forward, transposed: bool, keep_h: bool) -> tuple[Tensor, ...]:
    """y, tokens and h with their scales, and the routing. transposed: whether backward will need weights transposed."""
    x, top_k = o.x, o.top_k
    (w1, s1, *_), (w2, s2, *_) = first(o, transposed), second(o, transposed)
    v, inv, offs = kernel("reindex", x)(o.top_k_index, o.experts)
    xq, xs = kernel("quantize_rows_fp8", x)(x, True)
    h, hs, a, a_scales = kernel("esmm_act_fp8", x)(xq, xs, w1, s1, first_bias(o), v, offs, top_k, *steps(o), keep_h)
    rows = kernel("esmm_fp8", x)(a, a_scales, w2, s2, second_bias(o), offs)
    del a, a_scales
    y = kernel("combine_fp8", x)(*rows, o.top_k_weights, inv, offs, top_k, o.output_size, x.dtype)
    return y, xq, xs, h, hs, v, inv, offs


@library.kernel("moe_ffn_fp8", "any")
def _inference(o: MoeFfnFp8) -> Tensor:
    """Kernel for any device."""
    instead = _exact_call(o)
    if instead is None:
        y, *_ = run(o, transposed=False, keep_h=False)
        return y
    operator, given = instead
    with _AutoDispatchBelowAutograd():
        return operator(*given)  # type: ignore[no-any-return]


@library.kernel("moe_ffn_fp8_forward", "any")
def _training(o: MoeFfnFp8Forward) -> tuple[Tensor, ...]:
    """Kernel for any device: the result, and what backward needs."""
    return run(o, transposed=True, keep_h=not o.recompute_h)


LAYER = Layer("moe_ffn_fp8", MoeFfnFp8Forward, MoeFfnFp8Backward, ("xq", "xs", "h", "hs", "v", "inv", "offs"))


def _autograd(keyset: DispatchKeySet, *args: Any) -> Any:
    o = MoeFfnFp8(*args)
    instead = _exact_call(o)
    if instead is not None:
        operator, given = instead
        return operator(*given)
    if is_grad_enabled() and _any_requires_grad(*args):
        if o.s1 is not None:
            raise InputError(
                "hexa::moe_ffn_fp8: weights that are quantised already have no gradient, nor has x with them"
            )
        return LayerFunction.apply(LAYER, library.is_plain(keyset), *o.to(MoeFfnFp8Forward))
    return library.below_autograd(_OPS.moe_ffn_fp8.default, keyset, args)


library.register_kernel("moe_ffn_fp8_backward", "any", backward)
library.register_autograd_kernel("moe_ffn_fp8", _autograd)


# On weights that are packed: checkpoints in FP8 blocks of 128 x 128 hold what products in FP8 multiply by, so that inference reads
# them as they lie. Other packed weights, and calls that need gradients, multiply in the dtype of the tokens.


def with_sources(*args: Any) -> Any:
    """The layer, of arguments of which some weights are packed."""
    o = MoeFfnFp8Forward._make(args)
    found = _as_they_lie(o)
    if isinstance(found, MoeFfnFp8):
        return torch.ops.hexa.moe_ffn_fp8.default(*found)
    say_once(f"compute='fp8_block' multiplies by packed weights in {o.x.dtype}: {found}")
    return torch.ops.hexa.moe_ffn_sources.default(*sources.operands(tuple(o.to(MoeFfn))))


def _as_they_lie(o: MoeFfnFp8Forward) -> MoeFfnFp8 | str:
    """The operands with packed weights as quantised ones; or why that cannot be."""
    both = (o.w1, o.w2)
    if o.w3 is not None or not all(isinstance(w, QuantizedWeight) and w.format == FP8_BLOCK.name for w in both):
        return "they are not all in FP8 blocks, with gate and up in one"
    if is_grad_enabled() and _any_requires_grad(*o):
        return "gradients are wanted"
    packed, layouts = [], []
    for weight, layout in zip(both, (o.layout1, o.layout2), strict=True):
        assert isinstance(weight, QuantizedWeight)
        packed.append(weight)
        layouts.append(flip(layout) if weight.transposed else layout)
    w1, w2 = (weight.packed for weight in packed)
    if not is_whole(w1, w2, o.glu, *layouts):
        return "gate, up and down do not lie as blocks that products read"
    s1, s2 = (weight.scales[0] for weight in packed)
    return o.to(MoeFfnFp8, w1=w1, w2=w2, layout1=layouts[0], layout2=layouts[1], s1=s1, s2=s2)
