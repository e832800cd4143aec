"""Starts communication early and waits late, in the graph of a block or of a whole model.

Transfers of tokens (model-centric gathers, with the small nodes that prepare them) and of weights (`cache_prefetch`, one for every
data-centric gather) may start anywhere between what they need and who needs them. Everything else keeps its order. A networkx graph
of the dependencies (data, "weights are read after their gather started", "written after read" of a cache slot) says where:

* every transfer starts as soon as it may; of those that may start at the same point, the one with the least slack goes first;
* a transfer that would share the link with a more critical one starts after it instead, if its slack allows that.

The slack is worked out first. Values stay the same. Nothing here depends on times measured locally, so all ranks issue
collectives in the same order. In backward, the shared cache prefetches on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx as nx
import torch.fx as fx

from hexa_fx.distributed import nodes
from hexa_fx.distributed.collectives import all_gather_v
from hexa_fx.errors import PlanError
from hexa_fx.observers import announced

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


Seconds = Callable[[fx.Node], float]


@dataclass(frozen=True)
class OverlapReport:
    """What the pass did.

    Args:
        held: layers whose weights start to travel later than they could, so that a more critical transfer has the link.
        critical_path: names of the nodes of the longest chain, by seconds (or by count).
    """

    held: tuple[str, ...]
    critical_path: tuple[str, ...]


def overlap(graph: fx.Graph, slots: int, seconds: Seconds | None = None) -> OverlapReport:
    """Reorders communication of a partitioned graph in place.

    Args:
        slots: slots of the shared cache of the plan.
        seconds: estimated time of a node, of a transfer from its start to its end, equal on all ranks; without it every call counts
            one.

    Raises:
        PlanError: the dependencies contradict each other; the cycle is named.
    """
    with announced("overlap", graph):
        _insert_prefetches(graph)
        dag = dependency_graph(graph, slots)
        _check_cycles(dag)
        seconds = seconds or (lambda node: float(not takes_no_time(node)))
        times = {node.name: seconds(node) for node in graph.nodes}
        timeline = timeline_of(graph, dag, times)
        starts = start_times(graph, timeline, times)
        _reorder(graph, dag, starts)
        graph.lint()
        check_schedule(graph, dag)
    prefetches = [node for node in graph.nodes if node.target is nodes.cache_prefetch]
    return OverlapReport(
        tuple(_layer_of(node) for node in prefetches if starts.chosen[node.name] > starts.earliest[node.name]),
        tuple(nx.dag_longest_path(timeline, weight="weight")),
    )


# --- data-centric gathers --------------------------------------------------------------------------------------------


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is nodes.cache_gather]


def _layer_of(node: fx.Node) -> str:
    return str(node.args[-2])


def _insert_prefetches(graph: fx.Graph) -> None:
    """Puts a prefetch in front of every data-centric gather. It reads parameters by nodes of its own, which can move with it."""
    for gather in _gathers(graph):
        with graph.inserting_before(gather):
            weights = [_read_again(graph, value) for value in gather.args[:5]]
            graph.call_function(nodes.cache_prefetch, (*weights, *gather.args[-2:]))


def _read_again(graph: fx.Graph, value: Any) -> Any:
    stored = value.args[0] if isinstance(value, fx.Node) and value.target is nodes.local_weight else value
    return graph.get_attr(str(stored.target)) if isinstance(stored, fx.Node) and stored.op == "get_attr" else value


# --- dependencies ----------------------------------------------------------------------------------------------------


def dependency_graph(graph: fx.Graph, slots: int) -> nx.DiGraph:
    """Nodes by name; edges say what must come before what, with ``kind`` data, read, slot or turn.

    ``slot``: a gather into a slot comes after the release of the slot's tenant before. ``read``: a layer's weights are
    read after its gather started. ``turn``: gathers start in the order of layers.
    """
    dag = nx.DiGraph()
    for node in graph.nodes:
        dag.add_node(node.name)
        dag.add_edges_from(((source.name, node.name) for source in node.all_input_nodes), kind="data")
    gathers = _gathers(graph)
    starts = {_layer_of(node): node for node in graph.nodes if node.target is nodes.cache_prefetch}
    releases = {_layer_of(node): node for node in graph.nodes if node.target is nodes.cache_release}
    previous: fx.Node | None = None
    for i, gather in enumerate(gathers):
        start = starts.get(_layer_of(gather), gather)
        if start is not gather:
            dag.add_edge(start.name, gather.name, kind="read")
        tenant = releases.get(_layer_of(gathers[i - slots])) if i >= slots else None
        if tenant is not None:
            dag.add_edge(tenant.name, start.name, kind="slot")
        if previous is not None:
            dag.add_edge(previous.name, start.name, kind="turn")
        previous = start
    return dag


def _check_cycles(dag: nx.DiGraph) -> None:
    if not nx.is_directed_acyclic_graph(dag):
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(dag))
        raise PlanError(f"the schedule cannot be met, its dependencies form a cycle: {cycle}")


def check_schedule(graph: fx.Graph, dag: nx.DiGraph) -> None:
    """Raises `PlanError` if the dependencies form a cycle, or if the graph's order breaks one of them."""
    _check_cycles(dag)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    broken = [(u, v, kind) for u, v, kind in dag.edges(data="kind") if order[u] > order[v]]
    if broken:
        u, v, kind = broken[0]
        raise PlanError(f"{v!r} runs before {u!r}, which must come first ({kind} dependency)")


# --- the schedule ----------------------------------------------------------------------------------------------------


def _reorder(graph: fx.Graph, dag: nx.DiGraph, starts: Starts) -> None:
    """Puts every movable node before the first node that runs no earlier than its start, those with the least slack first."""
    by_name = {node.name: node for node in graph.nodes}
    movable = sorted((n.name for n in graph.nodes if is_movable(n)), key=starts.slack)  # stable
    waiting = dict.fromkeys(movable)
    order: list[fx.Node] = []
    placed: set[str] = set()

    def place(node: fx.Node) -> None:
        parameters = [value for value in node.all_input_nodes if value.op == "get_attr" and value.name not in placed]
        for each in (*parameters, node):
            order.append(each)
            placed.add(each.name)
            waiting.pop(each.name, None)

    def place_needed(name: str) -> None:
        for needed in [u for u in dag.predecessors(name) if u in waiting]:
            place_needed(needed)
            place(by_name[needed])

    def due(clock: float) -> str | None:
        for name in waiting:
            needed = (u for u in dag.predecessors(name) if by_name[u].op != "get_attr")
            if starts.chosen[name] <= clock and placed.issuperset(needed):
                return str(name)
        return None

    for node in [n for n in graph.nodes if n.name not in waiting]:
        if node.name in placed:
            continue
        while node.op != "placeholder" and (name := due(starts.earliest[node.name])) is not None:
            place(by_name[name])
        place_needed(node.name)
        place(node)
    for node in order[:-1]:
        order[-1].prepend(node)
