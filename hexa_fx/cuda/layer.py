"""Layers (`hexa::moe_ffn`, `hexa::moe_ffn_sources`, and what `hexa::moe_ffn_fp8` computes once its weights are quantised), their
forward for training and their backward on CUDA: planned as a whole when a call of a kind comes again, or at once where its tokens
are few.

For a small layer a device needs less time than the host, which runs a program of operators and allocates what each of them writes.
All of that follows from types, shapes, strides and alignment. A call that does more (a fallback, checked mode, autotuning) stays on
the general path, operator by operator, and so does one that the general path refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from hexa_fx.cuda.calls import chosen, float32_math, kind_of, on_device, planned
from hexa_fx.cuda.choosing import card_of, collection, on_forget
from hexa_fx.cuda.decode import are_wanted, few_tokens, is_few
from hexa_fx.cuda.fallback import some_fall_back_for_good
from hexa_fx.cuda.kernel import NotBuilt
from hexa_fx.cuda.packed import streamed_layer, streams
from hexa_fx.cuda.places import readable
from hexa_fx.cuda.plan import CallPlan
from hexa_fx.cuda.planning import CannotPlan
from hexa_fx.cuda.product import autotuning
from hexa_fx.errors import KernelError
from hexa_fx.ops import library
from hexa_fx.ops import moe_ffn_fp8 as fp8
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.moe_ffn import backward_on, forward_on
from hexa_fx.ops.table_fp8 import QuantizedFfn, QuantizedFfnBackward
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnBackward, MoeFfnSources, MoeFfnSourcesBackward

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Calls whose rows take more memory than this are not planned as a whole: they keep the device busy for longer than the host."""
MOST_WORKSPACE = 512 << 20
"""How much memory a plan may take at once for all that lies between its launches."""
_MOST = 1024
"""Most kinds of call to keep."""

General = Callable[..., Any]
Sizes = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class _Layer(NamedTuple):
    """A layer that is planned as a whole.

    Args:
        name: of its forward for inference.
        record, gradients: of its operands, and of its backward's.
        few: gives the result where tokens or rows are few, which then take launches of their own; None elsewhere.
        forward_on, backward_on: its programs.
    """

    name: str
    record: Any
    gradients: Any
    few: Callable[[Any], Tensor | None]
    forward_on: General = forward_on
    backward_on: General = backward_on

    def inference(self, *args: Any) -> Any:
        o = self.record._make(args)
        y = self.few(o)
        return self.forward_on("cuda", False, o) if y is None else y

    def training(self, *args: Any) -> Any:
        return self.forward_on("cuda", True, self.record._make(args))

    def backward(self, *args: Any) -> Any:
        return self.backward_on("cuda", self.gradients, args)


WHEN_NEW: dict[str, Callable[[tuple[Any, ...]], None]] = {}
"""What is told the operands of calls of a kind that was not seen before, by operator."""

_known: dict[tuple[Any, ...], CallPlan | Literal[False] | None] = {}
"""None: seen once. False: not to be planned."""
on_forget(_known.clear)


def _call_forward(name: str, sizes: Sizes, general: General, *given: Any) -> Any:
    args = readable(given)
    return _call(name, general, args, args, *sizes(args))


def _call_backward(name: str, read: Sizes, general: General, *given: Any) -> Any:
    args = readable(given)
    v, w1, h = read(args)
    if not _is_small(v, w1):
        return general(*args)  # before anything else refers to h, which is freed on the way
    in_list = isinstance(h, list)
    flat = tuple(h[0] if each is h else each for each in args) if in_list else args
    found = _call(name, general, args, flat, v, w1)
    if in_list:
        h.clear()
    return found


PROGRAMS: dict[str, General] = {}
"""What runs a layer by operators, on tensors or on stand-ins for them. Arguments are not checked."""
LAYERS: dict[str, Callable[..., Any]] = {}
"""What runs a layer on plain CUDA tensors. It takes the general path, which checks its arguments where nothing has before, and then
the layer's arguments, unchecked: of backward, h may be in a list, which is empty afterwards, and buffers may follow that gradients
are added to, one or None for each differentiable operand after x.
"""
for _layer in (
    _Layer("moe_ffn", MoeFfn, MoeFfnBackward, few_tokens),
    _Layer("moe_ffn_sources", MoeFfnSources, MoeFfnSourcesBackward, streamed_layer),
    _Layer("quantized_ffn", QuantizedFfn, QuantizedFfnBackward, lambda _: None, fp8.forward_on, fp8.backward_on),
):
    _sizes = _layer.record.pick("top_k_index", "w1")
    for _end, _run in (("", _layer.inference), ("_forward", _layer.training)):
        PROGRAMS[_layer.name + _end] = _run
        LAYERS[_layer.name + _end] = partial(_call_forward, _layer.name + _end, _sizes)
    _name = f"{_layer.name}_backward"
    PROGRAMS[_name] = _layer.backward
    LAYERS[_name] = partial(_call_backward, _name, _layer.gradients.pick("v", "w1", "h"))


def _is_small(slots: Tensor, w1: Tensor) -> bool:
    return 0 < slots.numel() * sum(w1.shape[1:]) * w1.element_size() <= MOST_BYTES


def _call(name: str, general: General, args: Any, flat: tuple[Any, ...], slots: Tensor, w1: Tensor) -> Any:
    if not _is_small(slots, w1) or some_fall_back_for_good() or collection() is not None:
        return general(*args)
    try:
        kind, tensors, addresses = kind_of(flat)
    except RuntimeError:  # a tensor without strides
        return general(*args)
    devices = tuple([t.device for t in tensors])
    key = (name, devices, float32_math(tensors[0].dtype), is_fixed(), library.kernel_generation, *kind)
    plan = _known.get(key)
    if not plan:
        if key not in _known and name in WHEN_NEW:
            WHEN_NEW[name](args)
        plan = _planned(name, flat, key)
        if plan is None:
            found = general(*args)
            _known.setdefault(key)
            return found
    try:
        return on_device(plan, tensors, addresses, devices[0])
    except KernelError:  # the general path reports it and falls back
        _known.pop(key, None)
        return general(*args)


def _planned(name: str, args: tuple[Any, ...], key: tuple[Any, ...]) -> CallPlan | None:
    """The plan of a call, if it can be planned and its kernels are there; of a kind that was not seen before only with few tokens,
    which have kernels of their own (`hexa_fx.cuda.decode`): the first call gives the same bits as all others.
    """
    if _known.get(key) is False or (key not in _known and not _has_few_tokens(name, args)) or autotuning():
        if len(_known) >= _MOST:
            _known.clear()
        return None
    try:
        first, *_ = args
        plan = planned(PROGRAMS[name], args, card_of(first.device.index), chosen())
        if plan.workspace > MOST_WORKSPACE:
            raise CannotPlan(f"it would hold {plan.workspace >> 20} MiB")
        plan.load()
    except NotBuilt:
        return None
    except KernelError as reason:
        log.debug("%s is launched operator by operator: %s", name, reason)
        _known[key] = False
        return None
    _known[key] = plan
    return plan


def _has_few_tokens(name: str, args: tuple[Any, ...]) -> bool:
    if name == "moe_ffn" and are_wanted():
        o = MoeFfn._make(args)
        o.check(name)
        return is_few(card_of(o.x.device.index), o.top_k_index, o.experts)
    if name != "moe_ffn_sources":
        return False
    of_sources = MoeFfnSources._make(args)
    of_sources.check(name)
    return streams(of_sources)
