"""Lets dumps, logs and `hexa_fx.debug` see graphs between passes. Passes report here; without listeners that costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch.fx

from hexa_fx.contexts import set_to


@dataclass(frozen=True)
class PassEvent:
    """A pass is about to process a graph, or has done so.

    Args:
        name: one of `hexa_fx.passes.PASSES`.
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


def heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners.get())


@dataclass
class PassOutcome:
    """What listeners are told after a pass: the graph that it leaves, and how it went."""

    graph: torch.fx.Graph
    note: object = ""


@contextmanager
def announced(name: str, graph: torch.fx.Graph, note: object = "") -> Iterator[PassOutcome]:
    """A context around a pass over a graph, which tells listeners before and after. Not after an error."""
    notify(name, "before", graph, note)
    outcome = PassOutcome(graph, note)
    yield outcome
    notify(name, "after", outcome.graph, outcome.note)


def listening(*listeners: Listener) -> AbstractContextManager[None]:
    """A context in which the listeners see every pass of this thread."""
    return set_to(_listeners, (*_listeners.get(), *listeners))


def at_block(path: str, mode: str = "") -> AbstractContextManager[None]:
    """A context in which events belong to this block."""
    return set_to(_block, (path, mode))


def muted() -> AbstractContextManager[None]:
    """A context without listeners, for passes that only serve inspection or verification."""
    return set_to(_listeners, ())
