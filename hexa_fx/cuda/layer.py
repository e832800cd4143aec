"""``hexa::moe_ffn``, its forward for training and its backward on CUDA: a call like an earlier one is replayed with new addresses.

For a small layer a device needs less time than the host, which chooses kernels, encodes their tensor maps and allocates what
they write. All of that follows from types, shapes, strides and alignment, so it is done once for each combination: the second
such call is recorded on the general path, and later ones replay the recording. A call that does more (a fallback, checked mode,
autotuning) stays on the general path, and so does one that the general path refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hexa_fx.cuda.choosing import collection, on_forget
from hexa_fx.cuda.fallback import falls_back
from hexa_fx.cuda.gemm_sm80 import math_of
from hexa_fx.cuda.launch import some_missing
from hexa_fx.cuda.record import record
from hexa_fx.cuda.replay import Replay
from hexa_fx.cuda.torch_calls import CannotReplay
from hexa_fx.cuda.tune import autotuning
from hexa_fx.errors import KernelError
from hexa_fx.ops import library

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Calls whose rows take more memory than this are not replayed: they keep the device busy for longer than the host."""
MOST_WORKSPACE = 512 << 20
"""How much memory a replay may take at once for all that lies between its launches."""

_OPERANDS = 9
_FOR_BACKWARD = 13
"""How many tensors `moe_ffn` and `moe_ffn_backward` take. They come first among the arguments."""
_MOST = 1024
"""Most kinds of call to keep."""

Key = tuple[Any, ...]
General = Callable[..., Any]
Operands = tuple[Tensor | None, ...]

_known: dict[Key, Replay | None] = {}
"""None: seen once, or not to be replayed. The latter are in `_general`, too."""
_general: set[Key] = set()


@on_forget
def forget() -> None:
    """Drops every recorded call."""
    _known.clear()
    _general.clear()


def moe_ffn(general: General, *args: Any) -> Tensor:
    """``hexa::moe_ffn`` on plain CUDA tensors where no gradient is wanted.

    Args:
        general: the general path, which checks its arguments.
        args: the operator's fifteen arguments, unchecked.
    """
    return _call("", general, args, args[1], args[3])  # type: ignore[no-any-return]


def moe_ffn_forward(general: General, *args: Any) -> tuple[Tensor, ...]:
    """``hexa::moe_ffn_forward`` on plain CUDA tensors; as `moe_ffn`."""
    return _call("forward", general, args, args[1], args[3])  # type: ignore[no-any-return]


def moe_ffn_backward(general: General, *args: Any) -> list[Tensor]:
    """``hexa::moe_ffn_backward`` on plain CUDA tensors; as `moe_ffn`. h may be in a list, which is empty afterwards.

    Args:
        args: the operator's twenty-one, then the buffers that gradients are added to, one or None for each operand after x, if any.
    """
    found: list[Tensor] = _call("backward", general, args, args[3], args[7])
    if isinstance(args[2], list):
        args[2].clear()
    return found


def _call(part: str, general: General, args: tuple[Any, ...], slots: Tensor, w1: Tensor) -> Any:
    about = slots.numel() * sum(w1.shape[1:]) * w1.element_size()
    if not 0 < about <= MOST_BYTES or falls_back() or collection() is not None:
        return general(*args)
    operands, static = _split(args) if part == "backward" else (args[:_OPERANDS], args[_OPERANDS:])
    try:
        key, addresses = _describe(part, operands, static)
    except RuntimeError:  # a tensor without strides
        return general(*args)
    replay = _known.get(key)
    if replay is None:
        return _first_calls(lambda: general(*args), operands, key)
    if replay.device != torch._C._cuda_getDevice():
        return general(*args)
    try:
        return replay(operands, addresses)
    except KernelError:  # the general path reports it and falls back
        _known.pop(key, None)
        return general(*args)


def _split(args: tuple[Any, ...]) -> tuple[Operands, tuple[Any, ...]]:
    """Tensors of a backward call, and its constants, of which ``activation, glu, params`` come first as in `moe_ffn`."""
    dy, x, h, *rest = args[:_FOR_BACKWARD]
    top_k, *static, needs = args[_FOR_BACKWARD : _FOR_BACKWARD + 8]
    buffers = args[_FOR_BACKWARD + 8 :]
    return (dy, x, h[0] if isinstance(h, list) else h, *rest, *buffers), (*static, top_k, *needs)


def _describe(part: str, operands: Operands, static: tuple[Any, ...]) -> tuple[Key, list[int]]:
    """Returns everything that a call's launches depend on except addresses, and the addresses."""
    x = operands[0]
    assert x is not None
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    tensors = [None if t is None else (t.dtype, t.shape, t.stride(), t.device) for t in operands]
    low = 0
    for address in addresses:
        low |= address
    low &= 15
    activation, glu, params, *rest = static
    key = (
        part,
        *tensors,
        low and tuple(address & 15 for address in addresses),
        activation,
        glu,
        tuple(params),
        *rest,
        math_of(x.dtype),
        library.kernel_generation,
    )
    return key, addresses


def _first_calls(general: Callable[[], Any], operands: Operands, key: Key) -> Any:
    """Runs the general path. Records the second call, since the first one builds kernels and makes programs."""
    if key in _general or some_missing() or autotuning() or torch.cuda.is_current_stream_capturing():
        return general()
    if key not in _known:
        if len(_known) >= _MOST:
            forget()
        _known[key] = None
        return general()
    x = operands[0]
    assert x is not None
    recording = record(general)
    if recording.provisional:
        return recording.result
    try:
        _known[key] = Replay(recording, operands, x.device.index, MOST_WORKSPACE)
    except CannotReplay as reason:
        log.debug("hexa::moe_ffn of %d tokens is launched kernel by kernel: %s", x.shape[0], reason)
        _general.add(key)
    return recording.result
