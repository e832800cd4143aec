"""Changes the `hexa::moe_ffn` nodes of a finished block for another operator with the same meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.fx as fx

from hexa_fx.ir import NEVER_SMALL, RewrittenBlock


def with_changed_nodes(block: RewrittenBlock, change: Callable[[fx.Node], None]) -> RewrittenBlock | None:
    """The block with every node changed in a graph of its own, which it runs on small inputs too; None if it has no such node."""
    graph = fx.Graph(tracer_cls=block.graph._tracer_cls)  # identical blocks share theirs
    graph.output(graph.graph_copy(block.graph, val_map={}))
    nodes = graph.find_nodes(op="call_function", target=torch.ops.hexa.moe_ffn.default)
    for node in nodes:
        change(node)
    return dataclasses.replace(block, graph=graph, small=NEVER_SMALL) if nodes else None
