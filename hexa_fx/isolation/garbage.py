"""How often Python's garbage collector walks objects while a model is analysed, and which."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hexa_fx.contexts import set_to

_frozen: ContextVar[bool] = ContextVar("hexa_fx_frozen", default=False)
_MOST = 2**31 - 1
"""The largest threshold that Python takes."""


@contextmanager
def collections_are_cheap() -> Iterator[None]:
    """Inside, collections pass over what was there before, and they are a thirtieth as frequent, in the whole process.

    Analysis makes so many objects that full collections come several times in a row, each through everything that torch and the
    model hold: a sixth of its time for a list of 256 experts. Where something is frozen already it stays so, and nothing else is.

    A full one follows where a device is in use. It takes a third of a second in a process with transformers, and would come in one
    of the next calls of the model, which take milliseconds.
    """
    before, freezes = gc.get_threshold(), not gc.get_freeze_count()
    gc.set_threshold(min(30 * before[0], _MOST), *before[1:])
    if freezes:
        gc.freeze()
    try:
        with set_to(_frozen, freezes or _frozen.get()):
            yield
    finally:
        if freezes:
            gc.unfreeze()
        gc.set_threshold(*before)
        if gc.isenabled() and torch.cuda.is_initialized():
            gc.collect()


def collect(everything: bool = False) -> None:
    """Collects the garbage of an analysis, which graphs make by referring to themselves; or also what was garbage before."""
    if everything and _frozen.get():
        gc.unfreeze()
    gc.collect()
