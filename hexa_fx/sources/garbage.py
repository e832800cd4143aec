"""What analyses leave: recorded graphs refer to themselves, and last until Python happens to collect.

They would hold memory, a block's numbers among it, and what autograd keeps of a parameter, which remembers the stream that it first
ran on: a step of the model could not be recorded as a CUDA graph.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hexa_fx.sources.packed_parameters import packed_parameters

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class _Aside:
    """Who has set aside what was there: an analysis that runs, or somebody else, asked until it is so, as Python counts all."""

    ours: bool = False
    others: bool = False


_aside = _Aside()


@contextmanager
def collected_after(model: nn.Module, earlier: bool = False) -> Iterator[None]:
    """A context after which an analysis' garbage is collected at once where a device is in use, or weights of the model are packed.

    What was there before is not looked at for garbage meanwhile, which takes most of a collection's time.

    Args:
        earlier: whether to collect what was garbage before as well.
    """
    aside = gc.isenabled() and not (_aside.ours or _aside.others)
    if aside:
        _aside.others = gc.get_freeze_count() > 0
        aside = _aside.ours = not _aside.others
    if aside:
        gc.freeze()
    try:
        yield
    finally:
        if aside and earlier:
            gc.unfreeze()
        packed = isinstance(model, nn.Module) and packed_parameters(model)  # else the call says what is wrong
        if packed or (gc.isenabled() and torch.cuda.is_initialized()):
            gc.collect()
        if aside:
            gc.unfreeze()
            _aside.ours = False


def collecting(function: F) -> F:
    """Decorates what analyses a model or packs it: as `collected_after`. Earlier graphs may hold the numbers that were packed."""

    @functools.wraps(function)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with collected_after(model, earlier=True):
            return function(model, *args, **kwargs)

    return cast(F, run)


def collect_all() -> None:
    """Collects what an analysis has left so far, and what was garbage before it: memory is short."""
    if _aside.ours:
        gc.unfreeze()
    gc.collect()
