"""Makes a token's result independent of the batch that it is in, where ``HexaConfig.batch_invariant`` asks for it."""

from __future__ import annotations

import logging

import torch
import torch.fx as fx

from hexa_fx.config import HexaConfig
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.options.canonical_nodes import with_changed_nodes

log = logging.getLogger(__name__)

SAID = "a token's result has the same bits in any batch"
NOT_FIXED = "is not batch invariant: its experts are run step by step"


def fix_order(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block with `hexa::moe_ffn_fixed` in place of `hexa::moe_ffn`; the block itself unless ``config`` asks for it.

    It runs last, and the block no longer runs its own code on small inputs. A block whose experts are no `hexa::moe_ffn` stays as
    it is, which is said.
    """
    if not config.batch_invariant:
        return block
    changed = with_changed_nodes(block, _fix)
    if changed is None:
        log.warning("%s %s", block.path or "the model", NOT_FIXED)
    return changed or block


def is_fixed(block: RewrittenBlock) -> bool:
    """Whether `fix_order` changed the block."""
    return bool(block.graph.find_nodes(op="call_function", target=torch.ops.hexa.moe_ffn_fixed.default))


def _fix(node: fx.Node) -> None:
    node.target = torch.ops.hexa.moe_ffn_fixed.default
