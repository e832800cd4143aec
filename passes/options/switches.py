"""Takes techniques of the paper back out of a block, as `HexaConfig` says, for ablations.

It runs last, on graphs whose canonical nodes may have collectives around them. Values stay the same. Shared cache and overlap
belong to the partition and are switched there.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx

from hexa_fx.config import HexaConfig
from hexa_fx.ir import NEVER_SMALL, RewrittenBlock
from hexa_fx.passes.options.dispatch import dispatch_combine
from hexa_fx.passes.options.separate_backward import moe_ffn_without_esfk

_CANONICAL = torch.ops.hexa.moe_ffn.default


def switch_off(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block without what ``config`` switches off; the block itself if that is nothing."""
    if config.topk_memory and config.expert_operators and config.fused_kernel:
        return block
    graph = fx.Graph(tracer_cls=block.graph._tracer_cls)  # identical blocks share theirs
    graph.output(graph.graph_copy(block.graph, val_map={}))
    for node in [node for node in graph.nodes if node.target is _CANONICAL]:
        if not config.topk_memory:
            _one_row_a_slot(graph, node)
        if not config.expert_operators:
            node.target = dispatch_combine
        elif not config.fused_kernel:
            node.target = moe_ffn_without_esfk
    graph.lint()
    return dataclasses.replace(block, graph=graph, small=NEVER_SMALL)


def _one_row_a_slot(graph: fx.Graph, node: fx.Node) -> None:
    """Copies tokens k times, and keeps the experts' T·k·D outputs until they are weighted and summed.

    Without the memory optimisation of the paper's section 3.2, inputs, outputs and their gradients grow with k.
    """
    x, index, weights, *rest = node.args
    assert isinstance(index, fx.Node)
    with graph.inserting_before(node):
        top_k = graph.call_method("size", (index, 1))
        rows = graph.call_method("repeat_interleave", (x, top_k), {"dim": 0})
        slots = graph.call_method("reshape", (index, -1, 1))
    node.args = (rows, slots, None, *rest)
    with graph.inserting_after(node):
        out = graph.call_function(weighted_sum, (node, weights, top_k))
    node.replace_all_uses_with(out, delete_user_cb=lambda user: user is not out)


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """(T·k, D) rows, summed over the k of a token, each times its (T, k) weight: (T, D)."""
    slots = rows.unflatten(0, (-1, top_k)) if rows.shape[0] else rows.view(0, top_k, rows.shape[1])
    if weights is not None:
        slots = slots * weights.to(slots.dtype).unsqueeze(-1)
    return slots.sum(dim=1)
