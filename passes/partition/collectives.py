"""Inserts a plan's collectives around the canonical operator.

model-centric   x, ids, weights -> all-gather -> moe_ffn on this rank's slice h_i -> reduce-scatter (paper: all-reduce)
data-centric    w1 .. w2 -> cache_gather -> moe_ffn with all weights on this rank's tokens -> cache_release

The backward collectives are the transposes and come with autograd. Expert weights of the graph must already be this
rank's slices (`hexa_fx.distributed.shards`). The inserted nodes are the same on every rank, with different
sizes, so all ranks issue the same collectives in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from hexa_fx.distributed import collectives, nodes
from hexa_fx.distributed.compiled_layers import CompiledLayers, spread_experts
from hexa_fx.distributed.geometry import ROLES
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.ops.table_layers import MoeFfn
from hexa_fx.plan import LayerPlan, Plan
from hexa_fx.runtime.program import Program

FFN_ARGS = MoeFfn._fields
"""Arguments of `hexa::moe_ffn`, in order (docs/operators.md)."""


@dataclass(frozen=True)
class Placement:
    """Where a graph will run: rank, the name of its session, and the names of its process groups."""

    rank: int
    session: str
    main_group: str

    @classmethod
    def of(cls, session: PartitionSession) -> Placement:
        return cls(session.rank, session.name, session.groups.main_name)


def moe_ffns(graph: fx.Graph) -> list[fx.Node]:
    """The canonical nodes of a graph, in order: the operator as packet (symbolic tracing) or overload (make_fx, export)."""
    packet = torch.ops.hexa.moe_ffn
    return [node for node in graph.nodes if node.op == "call_function" and node.target in (packet, packet.default)]


def ffn_arguments(node: fx.Node) -> dict[str, Any]:
    """The canonical node's arguments by name."""
    given = dict(zip(FFN_ARGS, node.args, strict=False)) | node.kwargs
    missing = [name for name in FFN_ARGS if name not in given]
    if missing:
        raise PlanError(f"the canonical node {node.name!r} lacks {missing}: {node.format_node()}")
    return given


def partition_graph(graph: fx.Graph, layers: Sequence[LayerPlan], plan: Plan, placement: Placement) -> fx.Graph:
    """The graph with collectives around its canonical nodes, which belong to ``layers`` in order. Changes it in place.

    Raises:
        PlanError: the graph has another number of canonical nodes.
    """
    found = moe_ffns(graph)
    if len(found) != len(layers):
        raise PlanError(f"the graph has {len(found)} canonical nodes, the plan has {len(layers)} layers for it")
    for node, layer in zip(found, layers):
        insert = _insert_model_centric if layer.mode == "model_centric" else _insert_data_centric
        insert(graph, node, layer, plan, placement)
        node.meta["hexa_partition"] = {"layer": layer.path, "mode": layer.mode}
    graph.lint()
    return graph


def _insert_model_centric(graph: fx.Graph, node: fx.Node, layer: LayerPlan, plan: Plan, at: Placement) -> None:
    args = ffn_arguments(node)
    with graph.inserting_before(node):
        x = args["x"]
        if plan.tokens is None:
            tokens: Any = graph.call_function(nodes.token_counts, (x, at.session))
        else:
            tokens = list(plan.tokens)
            x = graph.call_function(nodes.check_tokens, (x, tokens, at.session))
        x = graph.call_function(nodes.to_compute_dtype, (x,))
        # Routing is gathered, never recomputed: a tie broken differently on two devices would be silently wrong.
        routing = {name: args[name] for name in ("top_k_index", "top_k_weights") if args[name] is not None}
        started = {
            name: graph.call_function(collectives.all_gather_v, (value, tokens, at.main_group))
            for name, value in {"x": x, **routing}.items()
        }
        for name, value in started.items():
            args[name] = graph.call_function(collectives.wait, (value,))
        if args["b2"] is not None:
            # One rank's partial sum carries the bias. A factor, so that the graph and its gradients exist on all ranks.
            owner = 1.0 if at.rank == layer.bias_owner else 0.0
            args["b2"] = graph.call_function(torch.mul, (args["b2"], owner))
        weights = [name for name in ROLES if args[name] is not None]
        for name in weights:
            args[name] = graph.call_function(nodes.in_dtype_of, (args[name], args["x"]))
        for name in weights if plan.grad_scale != 1.0 else ():
            args[name] = graph.call_function(nodes.scale_gradient, (args[name], plan.grad_scale))
    node.args, node.kwargs = tuple(args[name] for name in FFN_ARGS), {}
    if layer.shards[at.rank] == 0:
        node.target, node.args = nodes.no_channels, node.args[: FFN_ARGS.index("activation")]
    with graph.inserting_after(node):
        out = _reduce(graph, node, layer, tokens, at)
    node.replace_all_uses_with(out[-1], delete_user_cb=lambda user: user is not out[0])


def _reduce(graph: fx.Graph, node: fx.Node, layer: LayerPlan, tokens: Any, at: Placement) -> tuple[fx.Node, ...]:
    """First and last of the nodes that sum partial outputs and keep this rank's rows."""
    if layer.reduce == "all_reduce":
        first = graph.call_function(collectives.all_reduce, (node, at.main_group))
    else:
        first = graph.call_function(collectives.reduce_scatter_v, (node, tokens, at.main_group))
    with graph.inserting_after(first):
        waited = graph.call_function(collectives.wait, (first,))
    if layer.reduce != "all_reduce":
        return first, waited
    with graph.inserting_after(waited):
        return first, waited, graph.call_function(nodes.own_rows, (waited, tokens, at.session))


def _insert_data_centric(graph: fx.Graph, node: fx.Node, layer: LayerPlan, plan: Plan, at: Placement) -> None:
    args = ffn_arguments(node)
    with graph.inserting_before(node):
        local = tuple(args[name] for name in ROLES)
        gathered = graph.call_function(
            nodes.cache_gather, (*local, list(layer.shards), args["x"], layer.path, at.session)
        )
        gathered.meta["hexa_partition"] = {"layer": layer.path, "mode": layer.mode}
        gated = args["glu"] != "none"
        bias = args["b1"] is not None or args["b3"] is not None
        present = (True, bias, gated, bias and gated, True)
        for i, (name, there) in enumerate(zip(ROLES, present)):
            args[name] = graph.call_function(operator.getitem, (gathered, i)) if there else None
        # Rows of the cache hold gate, up and down of a channel side by side: whatever the user's layout was, the views
        # are these.
        args.update(glu="split" if gated else "none", layout1="nk", layout2="kn")
    node.args, node.kwargs = tuple(args[name] for name in FFN_ARGS), {}
    with graph.inserting_after(node):
        released = graph.call_function(nodes.cache_release, (node, layer.path, at.session))
    node.replace_all_uses_with(released, delete_user_cb=lambda user: user is not released)


_OF_MODE = {None: "", True: " (train)", False: " (eval)"}
_TENSORS = FFN_ARGS[: FFN_ARGS.index("activation")]


def compiled_form(
    block: RewrittenBlock,
    graph: fx.Graph,
    planned: Sequence[LayerPlan],
    plan: Plan,
    placement: Placement,
    layers: CompiledLayers,
) -> Program:
    """A program for tracing. What its operators run is noted in ``layers``.

    Args:
        graph: the block's, on this rank's slices, without collectives. Changed in place.
    """
    for node, layer in zip(moe_ffns(graph), planned):
        args = ffn_arguments(node)
        label = f"{layer.path}{_OF_MODE[block.training]}"
        layers.programs[label] = fx.GraphModule(nn.Module(), _alone(node, layer, plan, placement))
        with graph.inserting_before(node):
            given = (label, placement.session, *(args[name] for name in _TENSORS))
            spread = graph.call_function(spread_experts, given)
        node.replace_all_uses_with(spread)
        graph.erase_node(node)
    return Program.of(graph, block.path)


def _alone(node: fx.Node, layer: LayerPlan, plan: Plan, placement: Placement) -> fx.Graph:
    """One layer with its collectives, as a function of the canonical node's tensors."""
    args, graph = ffn_arguments(node), fx.Graph()
    given = {name: graph.placeholder(name) for name in _TENSORS}
    tensors = [None if args[name] is None else given[name] for name in _TENSORS]
    static = [args[name] for name in FFN_ARGS[len(_TENSORS) :]]
    copied = graph.call_function(node.target, (*tensors, *static))  # type: ignore[arg-type]
    copied.meta.update(node.meta)
    graph.output(copied)
    return partition_graph(graph, [layer], plan, placement)
