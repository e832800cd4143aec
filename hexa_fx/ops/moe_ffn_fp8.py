"""``hexa::moe_ffn_fp8``: `hexa::moe_ffn` whose products multiply e4m3 with block scales, forward and backward.

Tokens are quantised once each, weights once for as long as they stay what they are (`hexa_fx.ops.fp8_weights`). The activation and
its gradient are computed in float32, and quantised from there (`hexa_fx.ops.fp8`). Of the pre-activation e4m3 is kept for backward.
A call that this cannot take runs `hexa::moe_ffn`, which is said once with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from hexa_fx.errors import InputError
from hexa_fx.formats.blocks import FP8_BLOCK
from hexa_fx.formats.fp8_scaling import BLOCK, padded
from hexa_fx.ops import checks, fp8_checks, library, main_grad, reindex
from hexa_fx.ops.direct_function import DirectFunction
from hexa_fx.ops.fp8_arguments import MoeFfnFp8, kernel
from hexa_fx.ops.fp8_quantizing import rows_and_scales
from hexa_fx.ops.moe_ffn import INPUTS, STATIC, WEIGHTS, check_shapes
from hexa_fx.ops.moe_ffn_fp8_backward import backward
from hexa_fx.ops.operands import MoeFfn
from hexa_fx.ops.projection import DENSE
from hexa_fx.torch_private import (
    DispatchKeySet,
    FakeTensor,
    FunctionalTensor,
    _any_requires_grad,
    _AutoDispatchBelowAutograd,
)

_OPS = torch.ops.hexa
_INPUTS = f"{INPUTS}, bool cached"
_KNOWN = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
"""Classes of tensors that lie in memory as they say, and of those that stand for them while a call is traced."""
log = logging.getLogger(__name__)

library.define(f"moe_ffn_fp8({_INPUTS}, Tensor? s1=None, Tensor? s2=None) -> Tensor")
library.define(
    f"moe_ffn_fp8_forward({_INPUTS}) "
    "-> (Tensor y, Tensor xq, Tensor xs, Tensor h, Tensor hs, Tensor v, Tensor inv, Tensor offs)"
)
library.define(
    "moe_ffn_fp8_backward(Tensor dy, Tensor? xq, Tensor? xs, Tensor? h, Tensor? hs, Tensor v, Tensor inv, Tensor offs, "
    f"Tensor? top_k_weights, {WEIGHTS}, {STATIC}, bool cached, SymInt top_k, bool[] needs) -> Tensor[]"
)


def say_once(message: str) -> None:
    """Logs a warning, once in a process."""
    if not torch.compiler.is_dynamo_compiling():
        _log_once(message)


@cache
def _log_once(message: str) -> None:
    log.warning("%s", message)


def _on_cpu(o: MoeFfnFp8) -> str:
    say_once("FP8 is emulated on a CPU: results are those of a GPU, the time is not")
    return ""


why_not_on: dict[str, Callable[[MoeFfnFp8], str]] = {"cpu": _on_cpu}
"""By device type: why its kernels cannot take a call, empty if they can. Looks at dtypes and sizes only."""


def why_not(o: MoeFfnFp8) -> str:
    """Why a call runs in its tensors' dtype; empty if it runs in FP8."""
    for name, t in o.floating.items():
        if t is not None and t.dtype not in fp8_checks.QUANTIZABLE:
            return f"{name} is {t.dtype}"
        if t is not None and type(t) not in _KNOWN:
            return f"{name} is of class {type(t).__name__}"
    ask = why_not_on.get(o.x.device.type)
    return f"there are no FP8 kernels for {o.x.device.type}" if ask is None else ask(o)


def is_whole(w1: Tensor, w2: Tensor, glu: str, layout1: str, layout2: str) -> bool:
    """Whether weights in blocks of 128 x 128 lie as products read them."""
    halves = {"none": 1, "concat": 2}.get(glu, 0)
    sizes = (*w1.shape[1:], *w2.shape[1:])
    blocks = halves and not any(size % BLOCK for size in sizes) and w1.shape[1] % (halves * BLOCK) == 0
    return bool(blocks) and (layout1, layout2) == ("nk", "nk")


def _exact_call(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator that runs a call which FP8 cannot take, and its arguments; None for others."""
    o = MoeFfnFp8(*args)
    reason = why_not(o)
    if not reason:
        return None
    dtype = o.x.dtype
    say_once(f"compute='fp8_block' runs in {dtype}: {reason}")
    if o.s1 is not None:
        formats = [FP8_BLOCK.name, DENSE, FP8_BLOCK.name]
        given: tuple[Any, ...] = (*args[:9], *[None] * 6, [1.0] * 3, [o.s1], [], [o.s2], formats, *args[9:15])
        return _OPS.moe_ffn_sources.default, given
    weights = (None if t is None else t.to(dtype) for t in args[3:9])
    return _OPS.moe_ffn.default, (*args[:3], *weights, *args[9:15])


def run(o: MoeFfnFp8, transposed: bool, keep_h: bool) -> tuple[Tensor, ...]:
    """y, tokens and h with their scales, and the routing. transposed: whether backward will need weights transposed."""
    x, top_k = o.x, o.top_k_index.shape[1]
    first, second = o.first(transposed), o.second(transposed)
    v, inv, offs = kernel("reindex", x)(o.top_k_index, o.w1.shape[0])
    xq, xs = kernel("quantize_rows_fp8", x)(x, True)
    h, hs, a, a_scales = kernel("esmm_act_fp8", x)(xq, xs, *first[:2], o.first_bias(), v, offs, top_k, *o.steps, keep_h)
    rows = kernel("esmm_fp8", x)(a, a_scales, *second[:2], o.second_bias(), offs)
    del a, a_scales
    y = kernel("combine_fp8", x)(*rows, o.top_k_weights, inv, offs, top_k, o.output_size, x.dtype)
    return y, xq, xs, h, hs, v, inv, offs


def _inference(*args: Any) -> Tensor:
    """Kernel for any device."""
    instead = _exact_call(args)
    if instead is None:
        return run(MoeFfnFp8(*args), transposed=False, keep_h=False)[0]
    operator, given = instead
    with _AutoDispatchBelowAutograd():
        return operator(*given)  # type: ignore[no-any-return]


def _training(*args: Any) -> tuple[Tensor, ...]:
    """Kernel for any device: the result, and what backward needs."""
    o = MoeFfnFp8(*args)
    return run(o, transposed=True, keep_h=not o.recompute_h)


class _MoeFfnFp8(DirectFunction):
    """What it keeps besides weights: x in FP8 if something needs it, so h unless it is computed again, and the routing."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            y, xq, xs, h, hs, *routing = _OPS.moe_ffn_fp8_forward.default(*args)
        o, wanted = MoeFfnFp8(*args), ctx.needs_input_grad
        needs = [wanted[0], *wanted[2:9]]
        none, kept = (None, None), main_grad.kept_operands(args[:9], o.recompute_h, wanted)
        tokens = (xq, xs) if needs[2] or needs[4] or o.recompute_h else none
        ctx.save_for_backward(*tokens, *(none if o.recompute_h else (h, hs)), *routing, *kept)
        ctx.static = (*args[9:], o.top_k_index.shape[1], needs)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        xq, xs, h, *saved = ctx.saved_tensors
        plain = library.is_plain_tensor(grads[0])
        if plain and h is not None:
            h = [h]  # backward pops it and frees it after its last use
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        run = partial(
            _run_backward if plain else _OPS.moe_ffn_fp8_backward.default, grads[0], xq, xs, h, *saved, *ctx.static
        )
        dx, *others = main_grad.gradients(run, saved[4:], ctx.static[-1], plain)
        return dx, None, *others, *(None,) * 7


def _autograd(keyset: DispatchKeySet, *args: Any) -> Any:
    instead = _exact_call(args)
    if instead is not None:
        operator, given = instead
        return operator(*given)
    if is_grad_enabled() and _any_requires_grad(*args):
        if MoeFfnFp8(*args).s1 is not None:
            raise InputError(
                "hexa::moe_ffn_fp8: weights that are quantised already have no gradient, nor has x with them"
            )
        return _MoeFfnFp8.apply(*args[:16])
    return library.below_autograd(_OPS.moe_ffn_fp8.default, keyset, args)


def _check(*args: Any) -> None:
    o = MoeFfnFp8(*args)
    for name, t in o.floating.items():
        if t is not None and (t.dtype not in checks.FLOATING or t.device != o.x.device):
            raise InputError(f"hexa::moe_ffn_fp8: {name} is {checks.shape(t)} on {t.device}; x is on {o.x.device}")
    check_shapes(MoeFfn(*args[:15]))
    if o.s1 is None and o.s2 is None:
        return
    if o.s1 is None or o.s2 is None or not is_whole(o.w1, o.w2, o.glu, o.layout1, o.layout2):
        raise InputError(
            "hexa::moe_ffn_fp8: quantised weights have layout nk, whole blocks, and gate and up as halves if any"
        )
    for weight, scales in ((o.w1, o.s1), (o.w2, o.s2)):
        fp8_checks.check_weight("moe_ffn_fp8", weight, scales)


def _fake(*args: Any) -> Tensor:
    o = MoeFfnFp8(*args)
    return o.x.new_empty((o.x.shape[0], o.output_size))


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    o = MoeFfnFp8(*args)
    n = o.top_k_index.shape[0] * o.top_k_index.shape[1]
    x, h = (
        rows_and_scales(o.x, o.x.shape[0], padded(o.input_size)),
        rows_and_scales(o.x, 0 if o.recompute_h else n, o.hidden),
    )
    routing = reindex.fake(o.top_k_index, o.w1.shape[0])
    return _fake(*args), *x, *h, *routing


def _fake_backward(dy: Tensor, *args: Any) -> list[Tensor]:
    *given, _, needs = args[7:]
    o = MoeFfnFp8(dy, dy, *given)
    like = (dy.new_empty((dy.shape[0], o.input_size)), *given[:7])
    return [t.new_empty(t.shape) for t, need in zip(like, needs, strict=True) if need]


library.register_fake("moe_ffn_fp8", _fake, _check)
library.register_kernel("moe_ffn_fp8", "any", _inference)
library.register_autocast("moe_ffn_fp8", cast=(0,))
library.register_fake("moe_ffn_fp8_forward", _fake_forward, _check)
library.register_kernel("moe_ffn_fp8_forward", "any", _training)
library.register_fake("moe_ffn_fp8_backward", _fake_backward)
_run_backward = library.register_kernel("moe_ffn_fp8_backward", "any", backward)
library.refuse_double_backward("moe_ffn_fp8_backward")
library.register_autograd_kernel("moe_ffn_fp8", _autograd)
