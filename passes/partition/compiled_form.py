"""What torch.compile traces of a partitioned block: its graph with one operator in the place of each layer's experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx
from torch import nn

from hexa_fx.distributed.compiled_layers import CompiledLayers, spread_experts
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition.collectives import FFN_ARGS, Placement, ffn_arguments, is_moe_ffn, partition_graph
from hexa_fx.plan import LayerPlan, Plan
from hexa_fx.runtime.program import Program

_TENSORS = FFN_ARGS[: FFN_ARGS.index("activation")]


def compiled_form(
    block: RewrittenBlock,
    mode: str,
    graph: fx.Graph,
    planned: Sequence[LayerPlan],
    plan: Plan,
    placement: Placement,
    layers: CompiledLayers,
) -> Program:
    """A program for tracing. What its operators run is noted in ``layers``.

    Args:
        mode: of the block: train or eval.
        graph: the block's, on this rank's slices, without collectives. Changed in place.
    """
    for node, layer in zip([node for node in graph.nodes if is_moe_ffn(node)], planned):
        args = ffn_arguments(node)
        label = f"{layer.path} ({mode})"
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
