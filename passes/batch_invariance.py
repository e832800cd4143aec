"""Makes a token's result independent of the batch that it is in, where ``HexaConfig.batch_invariant`` asks for it."""

from __future__ import annotations

import dataclasses
import logging

import torch
import torch.fx as fx

from hexa_fx.config import HexaConfig
from hexa_fx.ir import RewrittenBlock

log = logging.getLogger(__name__)

_OPS = torch.ops.hexa


def fix_order(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block with `hexa::moe_ffn_fixed` in place of `hexa::moe_ffn`; the block itself unless ``config`` asks for it.

    It runs last, and the block no longer runs its own code on small inputs. A block whose experts are no `hexa::moe_ffn` stays as
    it is, which is said.
    """
    if not config.batch_invariant:
        return block
    graph = fx.Graph(tracer_cls=block.graph._tracer_cls)  # identical blocks share theirs
    graph.output(graph.graph_copy(block.graph, val_map={}))
    nodes = graph.find_nodes(op="call_function", target=_OPS.moe_ffn.default)
    for node in nodes:
        node.target = _OPS.moe_ffn_fixed.default
    if not nodes:
        log.warning("%s is not batch invariant: its experts are run step by step", block.path or "the model")
        return block
    return dataclasses.replace(block, graph=graph, small=0)
