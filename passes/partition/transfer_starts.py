"""When the transfers of a partitioned graph start: what the critical path, and the slack that it leaves, say.

Slack is the latest minus the earliest start of a node, for the shortest total time. A device runs what does not move one node after
the other; transfers run beside it and share the link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import torch.fx as fx

from hexa_fx.distributed import nodes
from hexa_fx.distributed.collectives import all_gather_v

Times = Mapping[str, float]
"""Seconds of every node by name."""

TOKENS = (all_gather_v, nodes.token_counts, nodes.check_tokens, nodes.to_compute_dtype)
"""What gathers tokens or prepares that."""
TRANSFERS = (all_gather_v, nodes.cache_prefetch)


def is_movable(node: fx.Node) -> bool:
    """Whether a node starts a transfer or prepares one, and may therefore run earlier."""
    return node.target in TOKENS or node.target is nodes.cache_prefetch


def takes_no_time(node: fx.Node) -> bool:
    """Whether nothing is computed by a node."""
    return node.op in ("placeholder", "get_attr", "output") or node.target is nodes.local_weight


@dataclass(frozen=True)
class Starts:
    """By node name: the earliest start, the latest one that does not delay the end, and the one that was chosen."""

    earliest: dict[str, float]
    latest: dict[str, float]
    chosen: dict[str, float]

    def slack(self, name: str) -> float:
        """Seconds by which the node may start later without lengthening the critical path."""
        return self.latest[name] - self.earliest[name]


def timeline_of(graph: fx.Graph, dag: nx.DiGraph, times: Times) -> nx.DiGraph:
    """The dependencies, and that a device runs what does not move one after the other. ``weight`` is the seconds in between."""
    fixed = [node.name for node in graph.nodes if not is_movable(node) and not takes_no_time(node)]
    timeline = dag.copy()
    timeline.add_edges_from(pairwise(fixed), kind="stream")
    for u, _, edge in timeline.edges(data=True):
        edge["weight"] = 0.0 if edge["kind"] == "turn" else times[u]
    return timeline


def start_times(graph: fx.Graph, timeline: nx.DiGraph, times: Times) -> Starts:
    """When everything starts: as early as it can, but weights later where a more critical transfer needs the link."""
    order = list(nx.topological_sort(timeline))
    earliest: dict[str, float] = {}
    for name in order:
        before = timeline.in_edges(name, data="weight")
        earliest[name] = max((earliest[u] + weight for u, _, weight in before), default=0.0)
    end = max((earliest[name] + times[name] for name in order), default=0.0)
    latest: dict[str, float] = {}
    for name in reversed(order):
        after = timeline.out_edges(name, data="weight")
        latest[name] = min((latest[v] - weight for _, v, weight in after), default=end - times[name])
    return Starts(earliest, latest, {**earliest, **_yielding(graph, earliest, latest, times)})


def _yielding(graph: fx.Graph, earliest: Times, latest: Times, times: Times) -> dict[str, float]:
    """When weights start to travel: after transfers with less slack that they would share the link with, if their own allows it."""
    transfers = sorted((n.name for n in graph.nodes if n.target in TRANSFERS), key=earliest.__getitem__)
    chosen: dict[str, float] = {}
    start = 0.0
    for name in [node.name for node in graph.nodes if node.target is nodes.cache_prefetch]:
        start = max(earliest[name], start)
        for rival in transfers:
            begin, end = earliest[rival], earliest[rival] + times[rival]
            is_critical = latest[rival] - begin < latest[name] - earliest[name]
            if is_critical and begin < start + times[name] and start < end <= latest[name]:
                start = end
        chosen[name] = start
    return chosen
