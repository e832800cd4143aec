"""Turns any graph between passes into data, with what changed since the previous one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.fx

from hexa_fx.inspection.operators import op_count_difference
from hexa_fx.inspection.view import GraphView, view_of
from hexa_fx.observers import PassEvent


@dataclass(frozen=True)
class Seen:
    """What a listener saw.

    Args:
        name, when, path, mode, note: see `PassEvent`.
        graph: the graph at that moment.
        difference: operators removed and added since the last graph seen of this block and mode.
    """

    name: str
    when: str
    path: str
    mode: str
    note: str
    graph: GraphView
    difference: str

    @property
    def title(self) -> str:
        """``after rewrite, model.layers.0.mlp (eval)``."""
        mode = f" ({self.mode})" if self.mode else ""
        return f"{self.when} {self.name}, {self.path or 'the model'}{mode}"

    def __str__(self) -> str:
        lines = [f"# {self.title}: {self.graph.size}"]
        lines += [f"# changed: {self.difference}"] if self.difference else []
        lines += [f"# says: {self.note}"] if self.note else []
        return "\n".join([*lines, self.graph.readable()])


@dataclass
class EventReader:
    """Turns events into `Seen`, remembering the operators of every block's last graph."""

    _counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def see(self, event: PassEvent) -> Seen:
        """Reads the graph of an event, at once, because passes change it later."""
        view = graph_view(event.graph)
        key = (event.path, event.mode)
        before = self._counts.get(key)
        self._counts[key] = view.counts
        difference = "" if before is None else op_count_difference(before, view.counts)
        return Seen(event.name, event.when, event.path, event.mode, event.note, view, difference)


def graph_view(graph: torch.fx.Graph) -> GraphView:
    """The graph as data: a recorded one with values and source lines, any other with what its nodes carry."""
    values: dict[torch.fx.Node, Any] = {}
    for node in graph.nodes:
        record = node.meta.get("hexa")
        if hasattr(record, "storage"):
            values[node] = record.value
        elif "val" in node.meta:
            values[node] = node.meta["val"]
    return view_of(graph, values, graph.python_code("self").src, _where)


def _where(node: torch.fx.Node) -> Any:
    record = node.meta.get("hexa")
    return getattr(record, "location", None) or node.meta.get("location")
