"""Quantised copies of expert weights, made once for as long as the weights stay what they are.

A copy is found by the memory that its weight lies in, and holds while the version counters of these tensors do. Torch's fused
optimizers do not count, and others write to ``.data``; so a step of any `torch.optim.Optimizer` ends all copies, too. Whoever
writes to the ``.data`` of a weight by other means says so with `torch.autograd.graph.increment_version`.

A copy that no longer holds is written anew in its memory, which a captured CUDA graph may read. While a graph is captured for
training, weights are quantised as a part of it.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from hexa_fx.contexts import set_to
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT
from hexa_fx.ops import library
from hexa_fx.ops.listed import Listed, readable, tensors_of
from hexa_fx.ops.table_fp8 import weight_sizes

Weight = Tensor | Listed


class Fp8Weight(NamedTuple):
    """What `quantize_weight_fp8` makes of a projection's weight; the transposed part only where backward needs it."""

    q: Tensor
    s: Tensor
    q_t: Tensor | None
    s_t: Tensor | None


@dataclass
class _Copy:
    """A quantised weight, what it was made of, and when."""

    weight: Fp8Weight
    storages: tuple[StorageWeakRef, ...]
    state: tuple[int, ...] | None


_copies: dict[tuple[Any, ...], _Copy] = {}
_storage, _offset, _strides = Tensor.untyped_storage, Tensor.storage_offset, Tensor.stride
_address, _version = attrgetter("_cdata"), attrgetter("_version")
_lock = Lock()
_keeps: ContextVar[bool] = ContextVar("keeps_quantized_weights", default=True)
_seen: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...]]] = {}
"""Weights that were asked about, and their state then."""
_MOST = 4096
_steps: list[int] = []
"""How many steps optimizers have made, once somebody counts them."""


def quantized(
    w: Weight, w3: Weight | None, layout: str, glu: str, transposed: bool, cached: bool, forward: bool = True
) -> Fp8Weight:
    """The quantised copy of a projection's weight.

    Args:
        w, w3, layout, glu: as `quantize_weight_fp8` takes them.
        transposed: whether the transposed part is needed.
        cached: whether the copy may be kept; not where other weights take turns in the same memory.
        forward: whether forward asks: backward takes what forward of the same captured CUDA graph has made.
    """
    if not (cached and _keeps.get()):
        return _written(empty(w, layout, glu, transposed), w, w3, layout, glu)
    key = layout, glu, _place(w), None if w3 is None else _place(w3)
    capturing = w.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    state = _state(w, w3)
    with _lock:
        found = _copies.get(key)
        complete = found is not None and (not transposed or found.weight.q_t is not None)
        if found is not None and complete and (not forward if capturing and transposed else found.state == state):
            return found.weight
        if found is None:
            _forget()
            storages = tuple([StorageWeakRef(t.untyped_storage()) for t in _tensors(w, w3)])
            found = _Copy(empty(w, layout, glu, transposed), storages, None)
            _copies[key] = found
        elif not complete:
            found.weight = _with_transposed(found.weight)
        _written(found.weight, w, w3, layout, glu)
        found.state = None if capturing else state  # what is captured has not run
        return found.weight


def _place(weight: Weight) -> tuple[Any, ...]:
    """Where a weight lies, and how."""
    if isinstance(weight, Listed):
        parts = weight.tensors  # there are hundreds
        storages, lie = map(_storage, parts), (*map(_offset, parts), *map(_strides, parts))
        return weight.turned, weight.shape, weight.dtype, *map(_address, storages), *lie
    storage = weight.untyped_storage()._cdata
    return storage, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


def _tensors(*weights: Weight | None) -> list[Tensor]:
    return [*tensors_of(weights), *[each for each in weights if isinstance(each, Tensor)]]


def nothing_kept() -> AbstractContextManager[None]:
    """A context in which this thread's copies are not kept: kernels are only listed, and results hold nothing."""
    return set_to(_keeps, False)


def clear() -> None:
    """Forgets all copies."""
    with _lock:
        _copies.clear()
        _seen.clear()


def is_new(w: Tensor) -> bool:
    """Whether nobody asked about a weight in its state before, where copies are kept."""
    if not _keeps.get():
        return False
    state, before = _state(w, None), _seen.get(id(w))
    if before is not None and before[0]() is w and before[1] == state:
        return False
    if len(_seen) >= _MOST:
        _seen.clear()
    _seen[id(w)] = weakref.ref(w), state
    return True


def _state(w: Weight, other: Weight | None) -> tuple[int, ...]:
    try:
        if other is None and isinstance(w, Tensor):
            return w._version, _optimizer_steps()
        return *map(_version, _tensors(w, other)), _optimizer_steps()
    except RuntimeError:  # an inference tensor has none
        return *[0 if t.is_inference() else t._version for t in _tensors(w, other)], _optimizer_steps()


def _optimizer_steps() -> int:
    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(_count_step)
    return _steps[0]


def _count_step(*_: Any) -> None:
    _steps[0] += 1


def _forget() -> None:
    """Drops copies of weights that are gone."""
    gone = [key for key, copy in _copies.items() if any(storage.expired() for storage in copy.storages)]
    for key in gone:
        del _copies[key]


def empty(w: Weight, layout: str, glu: str, transposed: bool) -> Fp8Weight:
    """What the copy of a projection's weight is written to."""
    experts, rows, columns = weight_sizes(w, layout, glu)
    q, s = _pair(w.tensors[0] if type(w) is Listed else w, experts, rows, columns)
    made = Fp8Weight(q, s, None, None)
    return _with_transposed(made) if transposed else made


def _with_transposed(weight: Fp8Weight) -> Fp8Weight:
    experts, rows, columns = weight.q.shape
    q_t, s_t = _pair(weight.q, experts, columns, rows)
    return weight._replace(q_t=q_t, s_t=s_t)


def _pair(like: Any, experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    scales = like.new_empty((experts, rows // BLOCK, columns // BLOCK), dtype=torch.float32)
    return like.new_empty((experts, rows, columns), dtype=ELEMENT), scales


def _written(weight: Fp8Weight, w: Weight, w3: Weight | None, layout: str, glu: str) -> Fp8Weight:
    device = w.device.type
    parts = readable([None if each is None else each.detach() for each in (w, w3)], device)
    library.kernel_for("quantize_weight_fp8", device)(*weight, *parts, layout, glu)
    return weight
