"""Code that asks whether autocast is on: whether it computes the same where it is, but for casts.

In float64 autocast casts nothing. So the block runs there with autocast off and on, and if both runs show the same calls with the
same values, between other casts, what was recorded without autocast holds under it as for code that does not ask.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from hexa_fx.capture import CapturedBlock, capture
from hexa_fx.capture.perturb import Replacements
from hexa_fx.errors import CaptureError
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.precision import InFloat64
from hexa_fx.isolation.read_values import OneOf
from hexa_fx.isolation.torch_state import autocast_state
from hexa_fx.passes.detect.dropouts import expert_dropouts
from hexa_fx.passes.memory.float64_copy import float64_copy_or_none
from hexa_fx.passes.modes.same_run import same_but_for_casts
from hexa_fx.runtime.resolution import asks_autocast

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
"""Of autocast."""


def with_states_alike(
    captured: CapturedBlock, reads: Sequence[PythonRead], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PythonRead, ...]:
    """``reads``, of which those of autocast's state allow all states in which the code does the same.

    Args:
        captured: the recorded run, with autocast off.
        reads: of it.
        args, kwargs: what the block is called with.
    """
    if not any(map(asks_autocast, reads)):
        return tuple(reads)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = leaves[0].device.type if leaves else "cpu"
    states, alike, added = [autocast_state()], True, dict[_ReadPlace, PythonRead]()
    try:
        without = _run(captured, args, kwargs)
        known, asks_dtype = _by_place(without), True
        for dtype in DTYPES:
            with torch.autocast(device, dtype, cache_enabled=False):
                if asks_dtype:  # else what was found for one holds of the other
                    found = _run(captured, args, kwargs)
                    more = {place: read for place, read in _by_place(found).items() if place not in known}
                    alike = all(read.is_global for read in more.values()) and same_but_for_casts(without, found)
                    asks_dtype = any("dtype" in read.steps[1] for read in found.reads if asks_autocast(read))
                if alike:
                    states.append(autocast_state())
                    added |= more
    except (CaptureError, _NoCopy) as error:
        log.debug("%s in float64: %s", captured.path, error)
    allowed = (replace(read, value=OneOf(tuple(states))) if asks_autocast(read) else read for read in reads)
    return (*allowed, *added.values())


_ReadPlace: TypeAlias = tuple[bool, str, tuple[Any, ...]]


def _by_place(captured: CapturedBlock) -> dict[_ReadPlace, PythonRead]:
    """What a run read, without autocast's state."""
    reads = (read for read in captured.reads if not asks_autocast(read))
    return {(read.is_global, read.root, read.steps): read for read in reads}


class _NoCopy(Exception):
    """The block cannot be copied to float64."""


def _run(captured: CapturedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedBlock:
    """A recorded run in float64."""
    copied = float64_copy_or_none(captured.block, captured.analysis_bytes)
    if copied is None:
        raise _NoCopy("no copy")
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs)
    )
    own = next((p.dtype for p in captured.block.parameters() if p.is_floating_point()), torch.get_default_dtype())
    run = partial(capture, copied, args, kwargs, captured.path, captured.analysis_bytes)
    with InFloat64(own):
        found = run()
        idle = expert_dropouts(found)
        return run(Replacements(idle=idle)) if idle else found
