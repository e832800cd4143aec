"""Has the kernels of a layer of `hexa::moe_ffn_sources` built beside its first call: of a layer that came to a device, or was given
adapters, after `optimize`.
"""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from hexa_fx import jit
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.sources_kernel_set import sources_kernel_set
from hexa_fx.errors import KernelError
from hexa_fx.ops.sources_arguments import Arguments

log = logging.getLogger(__name__)


def request(call: Arguments, card: Card) -> Thread:
    """Requests every kernel that calls like this one launch, at any number of tokens. Returns the thread that finds out which.

    Args:
        call: of which only types, shapes and strides count; nothing of it is kept.
        card: what kernels are chosen for.
    """
    layer = Arguments(*map(_without_data, call))

    def find() -> None:
        try:
            jit.builder().request(sources_kernel_set(layer, card))
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
