"""``hexa::moe_ffn_fp8``: `hexa::moe_ffn` whose products multiply e4m3 with block scales, forward and backward.

Tokens are quantised once each, weights once for as long as they stay what they are (`hexa_fx.ops.fp8_weights`). What is computed
with quantised weights is one program a direction, `forward_on` and `backward_on`, which devices may plan as a whole. The activation
and its gradient are computed in float32, and quantised from there (`hexa_fx.ops.table_fp8`). Of the pre-activation e4m3 is kept for
backward. A call that this cannot take runs `hexa::moe_ffn`, which is said once with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from hexa_fx.contexts import set_to
from hexa_fx.errors import InputError
from hexa_fx.formats.adapted_weight import AdaptedWeight
from hexa_fx.formats.blocks import FP8_BLOCK
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT, padded
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import library, moe_ffn_autograd
from hexa_fx.ops import table_fp8 as table
from hexa_fx.ops.activations import gate_and_up
from hexa_fx.ops.fp8_weights import Fp8Weight, is_new, quantized
from hexa_fx.ops.library import Kernels
from hexa_fx.ops.listed import Listed, dense, tensors_of
from hexa_fx.ops.moe_ffn_autograd import Layer, LayerFunction
from hexa_fx.ops.records import DENSE, Operands
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table_layers import OPERANDS, PARAMETERS, MoeFfn, MoeFfnSources, parameters
from hexa_fx.torch_private import (
    DispatchKeySet,
    FakeTensor,
    FunctionalTensor,
    _any_requires_grad,
    _AutoDispatchBelowAutograd,
)

_OPS = torch.ops.hexa
Call = table.MoeFfnFp8Forward | table.MoeFfnFp8Backward
Program = table.QuantizedFfn | table.QuantizedFfnBackward


def copies(o: Call, transposed: bool, forward: bool = True, first: bool = True) -> tuple[Fp8Weight | None, Fp8Weight]:
    """Both projections, gate and up in one. first: whether the first one is read. transposed, forward: as for `quantized`."""
    if isinstance(o, table.MoeFfnFp8) and o.s1 is not None and o.s2 is not None:
        return Fp8Weight(o.w1, o.s1, None, None), Fp8Weight(o.w2, o.s2, None, None)
    how = transposed, o.cached, forward
    of_first = quantized(o.w1, o.w3, o.layout1, o.glu, *how) if first else None
    return of_first, quantized(o.w2, None, o.layout2, "none", *how)


def of_forward(o: table.MoeFfnFp8Forward, w1: Fp8Weight | None, w2: Fp8Weight) -> table.QuantizedFfn:
    """What the forward program takes."""
    assert w1 is not None
    return o.to(table.QuantizedFfn, **_replaced(o), q1=w1.q, s1=w1.s, q2=w2.q, s2=w2.s)


def of_backward(o: table.MoeFfnFp8Backward, w1: Fp8Weight | None, w2: Fp8Weight) -> table.QuantizedFfnBackward:
    """What the backward program takes: of the copies what it reads, whatever they hold besides."""
    copies: dict[str, Any] = {"q2_t": w2.q_t, "s2_t": w2.s_t}
    if w1 is not None and o.h is None:
        copies |= {"q1": w1.q, "s1": w1.s}
    if w1 is not None and o.needs[0]:
        copies |= {"q1_t": w1.q_t, "s1_t": w1.s_t}
    return o.to(table.QuantizedFfnBackward, **_replaced(o), **copies)


def _replaced(o: Call) -> dict[str, Any]:
    """Weights, and biases that are listed, as a program takes them."""
    weights = {"w1": table.Replaced.of(o.w1), "w3": table.Replaced.of(o.w3), "w2": table.Replaced.of(o.w2)}
    if Listed in map(type, (o.b1, o.b3, o.b2)):
        weights |= {"b1": dense(o.b1), "b3": dense(o.b3), "b2": dense(o.b2)}
    return weights


def steps(o: Program) -> tuple[str, bool, Sequence[float]]:
    """What products are told of the activation."""
    return o.activation, o.glu != "none", o.params


def first_bias(o: Program) -> Tensor | None:
    """(E, H') float32: gate's bias, then up's."""
    halves: tuple[Tensor | None, ...] = (o.b1, o.b3) if o.glu == "split" else (o.b1,)
    if o.glu in ("concat", "interleaved") and o.b1 is not None:
        halves = gate_and_up(o.b1, o.glu)
    given = next((half for half in halves if half is not None), None)
    if given is None:
        return None
    none = given.new_zeros((o.experts, o.inner))
    return torch.cat([_filled_up(none if half is None else half) for half in halves], 1)


def _filled_up(bias: Tensor) -> Tensor:
    """In float32, its columns to a multiple of 128."""
    return torch.nn.functional.pad(bias.float(), (0, padded(bias.shape[1]) - bias.shape[1]))


def forward_on(device: str, training: bool, o: table.QuantizedFfn) -> Any:
    """The forward program by the kernels of a device type: y, for training also what backward needs. Arguments are not checked."""
    ops, top_k = Kernels(device), o.top_k
    v, inv, offs = ops.reindex(o.top_k_index, o.experts)
    xq, xs = ops.quantize_rows_fp8(o.x, True)
    keep_h = training and not o.recompute_h
    h, hs, a, a_scales = ops.esmm_act_fp8(xq, xs, o.q1, o.s1, first_bias(o), v, offs, top_k, *steps(o), keep_h)
    bias = None if o.b2 is None else _filled_up(o.b2)
    rows = ops.esmm_fp8(a, a_scales, o.q2, o.s2, bias, offs)
    del a, a_scales
    y = ops.combine_fp8(*rows, o.top_k_weights, inv, offs, top_k, o.output_size, o.x.dtype)
    return (y, xq, xs, h, hs, v, inv, offs) if training else y


Groups = Sequence[Tensor]
"""Rows transposed in groups, and their scales."""


def backward_on(device: str, record: type[table.QuantizedFfnBackward], args: Iterable[Any]) -> list[Tensor]:
    """The backward program by the kernels of a device type: gradients of the operands that ``needs`` marks.

    An h in a list is freed after its last use. Buffers to add gradients to may follow, one or None for each operand after x.
    These gradients are not among the results.
    """
    return _Backward(device, *record.split(tuple(args))).gradients()


class _Backward:
    def __init__(self, device: str, o: table.QuantizedFfnBackward, buffers: Sequence[Tensor | None]) -> None:
        self.ops, self.o = Kernels(device), o
        self.needs = dict(zip(OPERANDS, o.needs, strict=True))
        self.into = dict(zip_longest(OPERANDS[1:], buffers))
        self.found: dict[str, Tensor] = {}

    def gradients(self) -> list[Tensor]:
        o, ops, needs, rows = self.o, self.ops, self.needs, (self.o.v, self.o.offs, self.o.top_k)
        x, h, hs = (o.xq, o.xs), o.h, o.hs
        if h is None:
            h, hs = ops.esmm_act_fp8(*x, o.q1, o.s1, first_bias(o), *rows, *steps(o), True)[:2]
        wanted = needs["x"], any(needs[name] for name in ("w1", "b1", "w3", "b3")), needs["w2"], needs["top_k_weights"]
        dh, dhs, *columns, dots = ops.esmm_act_backward_fp8(
            *ops.quantize_rows_fp8(o.dy, False),
            *(o.q2_t, o.s2_t),
            *(h.pop() if isinstance(h, list) else h, hs, o.top_k_weights, *rows, *steps(o), wanted),
        )
        del h
        of_dh, of_a = columns[:2], columns[2:]
        del columns
        if needs["w2"]:
            self.product("w2", self.out("w2"), ops.quantize_columns_fp8(o.dy, *rows), of_a, o.layout2)
        del of_a
        if needs["b2"]:
            self.bias("b2", ops.ess(o.dy, *rows, o.top_k_weights))
        if needs["w1"] or needs["w3"]:
            self.first_weights(of_dh, ops.group_rows_fp8(*x, *rows))
        if needs["b1"] or needs["b3"]:
            self.first_biases(ops.ess_fp8(*of_dh, o.offs))
        del of_dh
        if needs["x"]:
            each = ops.esmm_fp8(dh, dhs, o.q1_t, o.s1_t, None, o.offs)
            self.found["x"] = ops.combine_fp8(*each, None, o.inv, o.offs, o.top_k, o.input_size, o.dy.dtype)
        if needs["top_k_weights"]:  # at last: functions of torch between launches would part them
            self.found["top_k_weights"] = _routing_gradient(ops, dots, o)
        return [self.found[name] for name in OPERANDS if name in self.found]

    def first_weights(self, of_dh: Groups, of_x: Groups) -> None:
        """Gradients of the weights of the first projection."""
        for name, out, part in self.parts(of_dh):
            self.product(name, out, part, of_x, self.o.layout1)

    def parts(self, of_dh: Groups) -> list[tuple[str, Tensor, Groups]]:
        """The products that make the gradients of the first projection: the operand, where in its gradient, columns of dh."""
        (q, s), o = of_dh, self.o
        if o.glu == "none" or (o.glu == "concat" and o.inner % BLOCK == 0):
            return [("w1", self.out("w1"), of_dh)]
        width = q.shape[1] // 2
        halves = [(q[:, begin : begin + width], s[:, begin : begin + width]) for begin in (0, width)]
        if o.glu == "split":
            return [(name, self.out(name), half) for name, half in zip(("w1", "w3"), halves) if self.needs[name]]
        dim = 1 if o.layout1 == "nk" else 2
        pair = (2, -1) if o.glu == "concat" else (-1, 2)
        places = self.out("w1").unflatten(dim, pair).unbind(dim + pair.index(2))
        return [("w1", place, half) for place, half in zip(places, halves)]

    def out(self, name: str) -> Tensor:
        """What the gradient of a weight is written or added to."""
        weight, buffer = getattr(self.o, name), self.into[name]
        if buffer is None:
            buffer = self.found[name] = self.o.dy.new_empty(weight.shape, dtype=weight.dtype)
        return buffer

    def product(self, name: str, out: Tensor, outputs: Groups, inputs: Groups, layout: str) -> None:
        """A weight's gradient, of the gradients of the projection's outputs and of its inputs, 128 of which share a scale."""
        pair = (*outputs, *inputs) if layout == "nk" else (*inputs, *outputs)
        self.ops.estmm_fp8(out, *pair, self.o.offs, layout == "nk", self.into[name] is not None)

    def first_biases(self, sums: Tensor) -> None:
        """Gradients of the biases of the first projection, of sums over the columns of dh."""
        halves = [half[:, : self.o.inner] for half in sums.chunk(1 if self.o.glu == "none" else 2, 1)]
        if self.o.glu == "concat":
            halves = [torch.cat(halves, 1)]
        elif self.o.glu == "interleaved":
            halves = [torch.stack(halves, 2).flatten(1)]
        for name, gradient in zip(("b1", "b3"), halves):
            if self.needs[name]:
                self.bias(name, gradient)

    def bias(self, name: str, gradient: Tensor) -> None:
        """Gives a bias's gradient in its dtype, or adds it to a buffer."""
        buffer = self.into[name]
        if buffer is None:
            self.found[name] = gradient.to(getattr(self.o, name).dtype).contiguous()
        else:
            buffer.add_(gradient)


def _routing_gradient(ops: Kernels, dots: Tensor, o: table.QuantizedFfnBackward) -> Tensor:
    """The routing weights' gradient (T, k) of every row's dots, (n, .); with <dy, b2[e]> where there is a bias."""
    assert o.top_k_weights is not None
    total = dots.sum(1)
    if o.b2 is not None:
        column = o.b2.to(o.dy.dtype).unsqueeze(1)
        total = total.add(ops.esmm(o.dy, column, None, o.v, o.offs, o.top_k, "nk").squeeze(1))
    return total.index_select(0, o.inv).view(o.top_k_weights.shape).to(o.top_k_weights.dtype)


_KNOWN = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor, Listed})
"""Classes of tensors that lie in memory as they say, and of those that stand for them while a call is traced."""
log = logging.getLogger(__name__)


def say_once(message: str) -> None:
    """Logs a warning, once in a process."""
    if not torch.compiler.is_dynamo_compiling():
        _log_once(message)


@cache
def _log_once(message: str) -> None:
    log.warning("%s", message)


def _on_cpu(o: table.MoeFfnFp8Forward) -> str:
    say_once("FP8 is emulated on a CPU: results are those of a GPU, the time is not")
    return ""


why_not_on: dict[str, Callable[[table.MoeFfnFp8Forward], str]] = {"cpu": _on_cpu}
"""By device type: why its kernels cannot take a call, empty if they can. Looks at dtypes and sizes only."""

is_few_on: dict[str, Callable[[table.MoeFfnFp8Forward, bool], bool]] = {}
"""By device type: whether a call without gradients has so few tokens that it is faster in the dtype of its tokens, and whether it
would be if a CUDA graph had it.
"""


_NUMBERS = ("x", *PARAMETERS)
_numbers = table.MoeFfnFp8Forward.pick(*_NUMBERS)


def why_not(o: table.MoeFfnFp8Forward) -> str:
    """Why a call runs in its tensors' dtype; empty if it runs in FP8."""
    for name, t in zip(_NUMBERS, _numbers(o)):
        if t is None or t.dtype == ELEMENT:
            continue
        if t.dtype not in table.QUANTIZABLE:
            return f"{name} is {t.dtype}"
        if type(t) not in _KNOWN:
            return f"{name} is of class {type(t).__name__}"
    ask = why_not_on.get(o.x.device.type)
    return f"there are no FP8 kernels for {o.x.device.type}" if ask is None else ask(o)


def _exact_call(o: table.MoeFfnFp8Forward) -> tuple[Any, Operands] | None:
    """As `_instead`, for what FP8 cannot take."""
    reason = why_not(o)
    if not reason:
        return None
    dtype = o.x.dtype
    say_once(f"compute='fp8_block' runs in {dtype}: {reason}")
    if isinstance(o, table.MoeFfnFp8) and o.s1 is not None:
        formats = [FP8_BLOCK.name, DENSE, FP8_BLOCK.name]
        scales = {"s1": [o.s1], "s3": [], "s2": [o.s2], "formats": formats, "alphas": [1.0] * 3}
        return _OPS.moe_ffn_sources.default, o.to(MoeFfnSources, **scales)
    weights = {name: None if t is None else t.to(dtype) for name, t in zip(PARAMETERS, parameters(o))}
    return _OPS.moe_ffn.default, o.to(MoeFfn, **weights)


def _run(o: table.MoeFfnFp8Forward, training: bool) -> Any:
    """y, for training also tokens and h with their scales, and the routing."""

    def general(*args: Any) -> Any:
        o.check("moe_ffn_fp8")  # a plan is of a kind of call that came here first
        return forward_on(o.x.device.type, training, table.QuantizedFfn._make(args))

    name = "quantized_ffn_forward" if training else "quantized_ffn"
    return moe_ffn_autograd.on_device(name, general, *of_forward(o, *copies(o, training)))


@library.kernel("moe_ffn_fp8", "any")
def on_packed(o: table.MoeFfnFp8) -> Any:
    """The layer without gradients, perhaps on weights that are quantised."""
    instead = _instead(o)
    with _AutoDispatchBelowAutograd():
        return _run(o, False) if instead is None else instead[0](*instead[1])


@library.kernel("moe_ffn_fp8_forward", "any")
def _training(o: table.MoeFfnFp8Forward) -> tuple[Tensor, ...]:
    """The result, and what backward needs."""
    return _run(o, True)  # type: ignore[no-any-return]


def backward(*args: Any) -> list[Tensor]:
    """Kernel for any device, as `backward_on`."""
    o, buffers = table.MoeFfnFp8Backward.split(args)
    given = of_backward(o, *copies(o, transposed=True, forward=False, first=o.needs[0] or o.h is None))

    def general(*args: Any) -> list[Tensor]:
        return backward_on(o.dy.device.type, table.QuantizedFfnBackward, args)

    return moe_ffn_autograd.on_device("quantized_ffn_backward", general, *given, *buffers)  # type: ignore[no-any-return]


LAYER = Layer("moe_ffn_fp8", table.MoeFfnFp8Forward, table.MoeFfnFp8Backward, one_by_one=False)


def _autograd(keyset: DispatchKeySet, *args: Any) -> Any:
    o = table.MoeFfnFp8(*args)
    if not (is_grad_enabled() and _any_requires_grad(*args)):
        return library.below_autograd(_OPS.moe_ffn_fp8.default, keyset, args)
    instead = _instead(o)
    if instead is not None:
        operator, given = instead
        return operator(*given)
    if o.s1 is not None:
        raise InputError("hexa::moe_ffn_fp8: weights that are quantised already have no gradient, nor has x with them")
    return LayerFunction.apply(LAYER, library.is_plain(keyset), *o.to(table.MoeFfnFp8Forward))


def plain(*args: Any) -> Any:
    """The layer past torch's dispatcher, on weights that may be listed."""
    o = table.MoeFfnFp8Forward._make(args)
    instead = _instead(o)
    if instead is None:
        return moe_ffn_autograd.listed(LAYER, *o)
    return moe_ffn_autograd.listed(moe_ffn_autograd.LAYERS["moe_ffn"], *instead[1])


def _instead(o: table.MoeFfnFp8Forward) -> tuple[Any, Operands] | None:
    """The operator that runs a call in the dtype of its tokens, and its operands; None for a call that runs in FP8."""
    return _few_call(o) or _exact_call(o)


def _few_call(o: table.MoeFfnFp8Forward) -> tuple[Any, Operands] | None:
    """As `_instead`, for few tokens. What a CUDA graph of such calls would read, which may be captured later, is made."""
    captured = o.x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not _is_few(o, captured):
        return None
    if o.cached and not captured and isinstance(o.w1, Tensor) and is_new(o.w1) and not (_is_few(o, True) or why_not(o)):
        copies(o, False)
    return _OPS.moe_ffn.default, o.to(MoeFfn)


def _is_few(o: table.MoeFfnFp8Forward, captured: bool) -> bool:
    ask = is_few_on.get(o.x.device.type)
    if ask is None or not ask(o, captured) or (not torch.compiler.is_dynamo_compiling() and _always.get()):
        return False
    return not (is_grad_enabled() and _any_requires_grad(*o, *tensors_of(o)))


_always: ContextVar[bool] = ContextVar("few_tokens_in_fp8", default=False)


def always() -> AbstractContextManager[None]:
    """A context in which this thread's calls of few tokens run in FP8, too."""
    return set_to(_always, True)


library.register_kernel("moe_ffn_fp8_backward", "any", backward)
library.register_autograd_kernel("moe_ffn_fp8", _autograd)
# On plain CUDA tensors; `why_not` was asked about them.
moe_ffn_autograd.register_on_cuda("moe_ffn_fp8", lambda _, *args: _run(table.MoeFfnFp8(*args), False))
moe_ffn_autograd.register_on_cuda(
    "moe_ffn_fp8_forward", lambda _, *args: _run(table.MoeFfnFp8Forward._make(args), True)
)
moe_ffn_autograd.register_on_cuda("moe_ffn_fp8_backward", lambda _, *args: backward(*args))


# On weights that are packed: checkpoints in FP8 blocks of 128 x 128 hold what products in FP8 multiply by, so that inference reads
# them as they lie. Other packed weights, and calls that need gradients, multiply in the dtype of the tokens.


def from_sources(o: table.MoeFfnFp8Forward) -> table.MoeFfnFp8 | None:
    """The operands with packed weights as quantised ones; None if they are multiplied in the dtype of the tokens."""
    found = _as_they_lie(o)
    if isinstance(found, table.MoeFfnFp8):
        return None if _is_few(o, False) else found
    say_once(f"compute='fp8_block' multiplies in {o.x.dtype} by weights that are packed or have adapters: {found}")
    return None


def _as_they_lie(o: table.MoeFfnFp8Forward) -> table.MoeFfnFp8 | str:
    """The operands with packed weights as quantised ones; or why that cannot be."""
    both = (o.w1, o.w2)
    if AdaptedWeight in map(type, (*both, o.w3)):
        return "products add what adapters add to a weight that stays as it is"
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
    if not table.is_whole(w1, w2, o.glu, *layouts):
        return "gate, up and down do not lie as blocks that products read"
    s1, s2 = (weight.scales[0] for weight in packed)
    biases = {"b1": dense(o.b1), "b2": dense(o.b2)}
    return o.to(table.MoeFfnFp8, **biases, w1=w1, w2=w2, layout1=layouts[0], layout2=layouts[1], s1=s1, s2=s2)
