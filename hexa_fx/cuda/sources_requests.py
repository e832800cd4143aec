"""Has all kernels of a layer on weights that are no plain tensors built beside its first call: of layers that came to a device, or
were given adapters, after `optimize`.
"""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from hexa_fx import jit
from hexa_fx.cuda.choosing import Card, card_of, on_forget
from hexa_fx.cuda.kernel_set import frozen, kernel_set
from hexa_fx.cuda.layer import WHEN_NEW
from hexa_fx.errors import KernelError
from hexa_fx.ops.table_layers import MoeFfnSources

log = logging.getLogger(__name__)

_seen: set[tuple[object, ...]] = set()
on_forget(_seen.clear)


def _request_once(args: tuple[Any, ...]) -> None:
    o = MoeFfnSources._make(args)
    kind = o.x.device.index, *o.kind
    if kind not in _seen:
        _seen.add(kind)
        request(o, card_of(o.x.device.index))


WHEN_NEW |= dict.fromkeys(("moe_ffn_sources", "moe_ffn_sources_forward"), _request_once)


def request(call: MoeFfnSources, card: Card) -> Thread:
    """Requests every kernel that calls like this one launch, at any number of tokens. Returns the thread that finds out which.

    Args:
        call: of which only types, shapes and strides count; nothing of it is kept.
        card: what kernels are chosen for.
    """
    layer = frozen(MoeFfnSources._make(map(_without_data, call)))

    def find() -> None:
        try:
            jit.builder().request(kernel_set(layer, card))
        except (KernelError, OSError) as error:  # the operators fall back and say so
            log.debug("no kernels are built ahead: %s", error)

    thread = Thread(target=find, name="hexa_fx kernel set", daemon=True)
    thread.start()
    return thread


def _without_data(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_data(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
