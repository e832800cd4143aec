"""Starts communication early and waits late, in the graph of a block or of a whole model.

There are two rewrites, both safe for autograd because values stay the same:

* a model-centric gather starts as soon as its input exists, so that tokens travel while the router runs;
* a data-centric gather starts (`cache_prefetch`) as soon as its cache slot is free, so that weights travel while
  attention and router of the layer run (one slot), and the experts of the layer before (two slots).

The order of the graph's nodes stays the source of truth. A networkx graph of the dependencies (data, and "written after read" of a
slot) finds cycles and gives the critical path and every gather's slack. Nothing here depends on times measured locally, so all
ranks issue collectives in the same order. In backward, the shared cache prefetches on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx as nx
import torch.fx as fx

from hexa_fx.distributed import nodes
from hexa_fx.distributed.collectives import all_gather_v
from hexa_fx.errors import PlanError
from hexa_fx.observers import announced

Seconds = Callable[[fx.Node], float]


@dataclass(frozen=True)
class GatherSlot:
    """Where one data-centric gather went.

    Args:
        layer: path of the layer.
        slot: the cache slot it fills.
        moved: nodes between its start and the use of its result.
        window: seconds of computation between the two, if node times are known.
        slack: seconds it could take without lengthening the critical path.
    """

    layer: str
    slot: int
    moved: int
    window: float
    slack: float


@dataclass(frozen=True)
class OverlapReport:
    """What the pass did. ``critical_path`` are node names, longest chain by seconds (or by count)."""

    hoisted: int
    gathers: tuple[GatherSlot, ...]
    critical_path: tuple[str, ...]


def overlap(graph: fx.Graph, slots: int, seconds: Seconds | None = None) -> OverlapReport:
    """Reorders communication of a partitioned graph in place.

    Args:
        slots: slots of the shared cache of the plan.
        seconds: estimated time of a node, equal on all ranks; without it every call counts one.

    Raises:
        PlanError: the dependencies contradict each other; the cycle is named.
    """
    with announced("overlap", graph):
        hoisted = _hoist_starts(graph)
        _insert_prefetches(graph, slots)
        graph.lint()
    dag = dependency_graph(graph, slots)
    check_schedule(graph, dag)
    return _report(graph, dag, slots, hoisted, seconds or _count_calls)


def _count_calls(node: fx.Node) -> float:
    return 0.0 if node.op in ("placeholder", "get_attr", "output") else 1.0


# --- model-centric ---------------------------------------------------------------------------------------------------


_MOVABLE = (all_gather_v, nodes.token_counts, nodes.check_tokens, nodes.to_compute_dtype)


def _hoist_starts(graph: fx.Graph) -> int:
    """Moves gathers, and the small nodes that prepare them, right after the last node they need."""
    movable = [node for node in graph.nodes if node.target in _MOVABLE]
    return sum(_hoist(graph, node) for node in movable)


def _hoist(graph: fx.Graph, node: fx.Node) -> bool:
    """Moves a node after its last input, and after what was hoisted there before, to keep the order of collectives."""
    anchor = _last(graph, node.all_input_nodes)
    if anchor is None:
        return False
    place = anchor
    while _is_hoisted_chain(place.next) and place.next is not node:
        place = place.next
    if place.next is node:
        return False
    place.append(node)
    return True


def _is_hoisted_chain(node: fx.Node) -> bool:
    return node.target in _MOVABLE or node.op in ("placeholder", "get_attr")


def _last(graph: fx.Graph, found: Iterable[fx.Node]) -> fx.Node | None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    return max(found, key=lambda node: order[node], default=None)


# --- data-centric ----------------------------------------------------------------------------------------------------


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is nodes.cache_gather]


def _layer_of(node: fx.Node) -> str:
    return str(node.args[-2])


def _insert_prefetches(graph: fx.Graph, slots: int) -> None:
    gathers = _gathers(graph)
    releases = {_layer_of(node): node for node in graph.nodes if node.target is nodes.cache_release}
    first = next((node for node in graph.nodes if node.op not in ("placeholder", "get_attr")), None)
    previous: fx.Node | None = None
    for i, gather in enumerate(gathers):
        tenant = releases.get(_layer_of(gathers[i - slots])) if i >= slots else None
        weights = [value for value in gather.args[:5] if isinstance(value, fx.Node)]
        computed = [value for value in weights if value.op not in ("placeholder", "get_attr")]
        anchor = _last(graph, [node for node in (tenant, previous, *computed) if node is not None])
        previous = _prefetch_at(graph, gather, anchor, first)


def _prefetch_at(graph: fx.Graph, gather: fx.Node, anchor: fx.Node | None, first: fx.Node | None) -> fx.Node:
    assert first is not None
    with graph.inserting_after(anchor) if anchor is not None else graph.inserting_before(first):
        weights = []
        for value in gather.args[:5]:  # a parameter is read again here: its own node may come later
            is_late = isinstance(value, fx.Node) and value.op == "get_attr"
            weights.append(graph.get_attr(str(value.target)) if is_late else value)  # type: ignore[union-attr]
    last = _last(graph, [node for node in (anchor, *weights) if isinstance(node, fx.Node)])
    with graph.inserting_after(last) if last is not None else graph.inserting_before(first):
        return graph.call_function(nodes.cache_prefetch, (*weights, *gather.args[-2:]))


# --- dependencies ----------------------------------------------------------------------------------------------------


def dependency_graph(graph: fx.Graph, slots: int) -> nx.DiGraph:
    """Nodes by name; edges say what must come before what, with ``kind`` data, read or slot.

    ``slot``: a gather into a slot comes after the release of the slot's tenant before. ``read``: a layer's weights are
    read after its gather started.
    """
    dag = nx.DiGraph()
    for node in graph.nodes:
        dag.add_node(node.name)
        dag.add_edges_from(((source.name, node.name) for source in node.all_input_nodes), kind="data")
    gathers = _gathers(graph)
    starts = {_layer_of(node): node for node in graph.nodes if node.target is nodes.cache_prefetch}
    releases = {_layer_of(node): node for node in graph.nodes if node.target is nodes.cache_release}
    for i, gather in enumerate(gathers):
        start = starts.get(_layer_of(gather), gather)
        if start is not gather:
            dag.add_edge(start.name, gather.name, kind="read")
        tenant = releases.get(_layer_of(gathers[i - slots])) if i >= slots else None
        if tenant is not None:
            dag.add_edge(tenant.name, start.name, kind="slot")
    return dag


def check_schedule(graph: fx.Graph, dag: nx.DiGraph) -> None:
    """Raises `PlanError` if the dependencies form a cycle, or if the graph's order breaks one of them."""
    if not nx.is_directed_acyclic_graph(dag):
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(dag))
        raise PlanError(f"the schedule cannot be met, its dependencies form a cycle: {cycle}")
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    broken = [(u, v, kind) for u, v, kind in dag.edges(data="kind") if order[u] > order[v]]
    if broken:
        u, v, kind = broken[0]
        raise PlanError(f"{v!r} runs before {u!r}, which must come first ({kind} dependency)")


def _report(graph: fx.Graph, dag: nx.DiGraph, slots: int, hoisted: int, seconds: Seconds) -> OverlapReport:
    order = {node: i for i, node in enumerate(graph.nodes)}
    listed = list(graph.nodes)
    times = {node.name: seconds(node) for node in graph.nodes}
    slack = _slack(dag, times)
    starts = {_layer_of(node): node for node in graph.nodes if node.target is nodes.cache_prefetch}
    gathers = []
    for i, gather in enumerate(_gathers(graph)):
        start = starts.get(_layer_of(gather), gather)
        between = listed[order[start] + 1 : order[gather]]
        window = sum(times[node.name] for node in between if node.target is not nodes.cache_prefetch)
        gathers.append(GatherSlot(_layer_of(gather), i % slots, len(between), window, slack[start.name]))
    for u, _, data in dag.edges(data=True):
        data["weight"] = times[u]
    return OverlapReport(hoisted, tuple(gathers), tuple(nx.dag_longest_path(dag, weight="weight")))


def _slack(dag: nx.DiGraph, times: dict[str, float]) -> dict[str, float]:
    """Latest minus earliest start of every node, for the shortest total time."""
    order = list(nx.topological_sort(dag))
    earliest: dict[str, float] = {}
    for name in order:
        earliest[name] = max((earliest[u] + times[u] for u in dag.predecessors(name)), default=0.0)
    end = max((earliest[name] + times[name] for name in order), default=0.0)
    latest: dict[str, float] = {}
    for name in reversed(order):
        latest[name] = min((latest[v] for v in dag.successors(name)), default=end) - times[name]
    return {name: latest[name] - earliest[name] for name in order}
