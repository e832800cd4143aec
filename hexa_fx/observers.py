"""Lets dumps, logs and `hexa_fx.debug` see graphs between passes. Passes report here; without listeners that costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch.fx

PASSES = {
    "capture": "the block runs once on the example and is recorded as a graph",
    "canonicalize": "fused expressions are taken apart",
    "detect": "the mixture of experts is found, or refused; changes no graph",
    "rewrite": "the block's new forward, with one hexa::moe_ffn",
    "verify": "original against rewritten; changes no graph",
    "partition": "collectives are inserted, if experts are spread over devices",
    "lower": "hexa::moe_ffn as expert-specific operators, forward and backward",
    "fuse_activation": "activations go into the products before them",
    "tile_rows": "row operators become the body that a CPU runs tile by tile",
    "bind_kernels": "operators become the kernels of a device",
}
"""Every pass by name, in order."""


@dataclass(frozen=True)
class PassEvent:
    """A pass is about to process a graph, or has done so.

    Args:
        name: one of `PASSES`.
        when: ``before`` or ``after`` it.
        graph: the graph at this moment. Later passes change it, so a listener must read it at once.
        path, mode: the block, and whether it is analysed for ``eval`` or ``train``; empty where a pass does not know.
        note: what the pass says about its result.
    """

    name: str
    when: Literal["before", "after"]
    graph: torch.fx.Graph
    path: str = ""
    mode: str = ""
    note: str = ""


Listener = Callable[[PassEvent], None]

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("hexa_fx_listeners", default=())
_block: ContextVar[tuple[str, str]] = ContextVar("hexa_fx_block", default=("", ""))


def notify(name: str, when: Literal["before", "after"], graph: torch.fx.Graph, note: object = "") -> None:
    """Tells every listener. ``note`` is only turned into text if there is one."""
    listeners = _listeners.get()
    if not listeners:
        return
    path, mode = _block.get()
    event = PassEvent(name, when, graph, path, mode, str(note))
    for listener in listeners:
        listener(event)


@contextmanager
def listening(*listeners: Listener) -> Iterator[None]:
    """A context in which the listeners see every pass of this thread."""
    token = _listeners.set((*_listeners.get(), *listeners))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextmanager
def at_block(path: str, mode: str = "") -> Iterator[None]:
    """A context in which events belong to this block."""
    token = _block.set((path, mode))
    try:
        yield
    finally:
        _block.reset(token)


@contextmanager
def muted() -> Iterator[None]:
    """A context without listeners, for passes that only serve inspection or verification."""
    token = _listeners.set(())
    try:
        yield
    finally:
        _listeners.reset(token)
