"""Who wants to see graphs between passes: dumps, logs, `hexa_fx.debug`. Passes report here; without listeners that is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch.fx

PASSES = {
    "capture": "the block runs once on the example and is written down",
    "canonicalize": "fused ways of writing are taken apart",
    "detect": "the mixture of experts is found, or refused; changes no graph",
    "rewrite": "the block's new forward, with one hexa::moe_ffn",
    "verify": "original against rewritten; changes no graph",
    "partition": "collectives are put in, where experts are spread over devices",
    "lower": "hexa::moe_ffn as expert-specific operators, forward and backward",
    "fuse_activation": "activations go into the products before them",
    "tile_rows": "row operators become the body that a CPU runs tile by tile",
    "bind_kernels": "operators become the kernels of a device",
}
"""Every pass by name, in order."""


@dataclass(frozen=True)
class PassEvent:
    """A pass is about to see a graph, or has left one.

    Args:
        name: of `PASSES`. when: ``before`` or ``after``. graph: the graph as it is now; it changes later, so look at it at once.
        path, mode: the block, and whether it is analysed for ``eval`` or ``train``; empty where a pass does not know.
        note: what the pass says.
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
    """Tells everyone who listens; ``note`` is only made into text if there is somebody."""
    listeners = _listeners.get()
    if not listeners:
        return
    path, mode = _block.get()
    event = PassEvent(name, when, graph, path, mode, str(note))
    for listener in listeners:
        listener(event)


@contextmanager
def listening(*listeners: Listener) -> Iterator[None]:
    """Inside, the listeners see every pass of this thread."""
    token = _listeners.set((*_listeners.get(), *listeners))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextmanager
def at_block(path: str, mode: str = "") -> Iterator[None]:
    """Inside, events are of this block."""
    token = _block.set((path, mode))
    try:
        yield
    finally:
        _block.reset(token)


@contextmanager
def muted() -> Iterator[None]:
    """Inside, nobody listens: for passes that only serve looking or checking."""
    token = _listeners.set(())
    try:
        yield
    finally:
        _listeners.reset(token)
