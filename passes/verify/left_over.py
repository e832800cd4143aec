"""Explains a rewritten block that differs: what the code decided by counts of tokens, one run shows as it went there."""

from __future__ import annotations

import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.detect.graph import descendants, is_tensor
from hexa_fx.passes.detect.size_decisions import counts, sizes_asked

_DECIDED = (
    "by how many tokens an expert gets, the code decides at {} what becomes of them outside of the experts, and one run shows that "
    "as it went there; done for all tokens at once, by a mask of those that are kept (torch.where), it can be rewritten"
)


def decided_by_count(captured: CapturedBlock, rewritten: RewrittenBlock) -> str:
    """A sentence if the rewritten graph does something with the tokens of an expert that the code has counted before; else empty.

    Such tokens are listed by ``nonzero`` or by a mask, and the region has no use for the list.
    """
    kept = {node.meta["from"] for node in rewritten.graph.nodes if "from" in node.meta}
    for node in captured.graph.nodes:
        if node.op == "output" or not record_of(node).decision:
            continue
        listed = [size.all_input_nodes[0] for size in sizes_asked(node) if size.all_input_nodes]
        if any(tokens.name in kept and counts(tokens) and _moves(tokens, kept) for tokens in listed):
            return _DECIDED.format(record_of(node).location)
    return ""


def _moves(tokens: torch.fx.Node, kept: set[str]) -> bool:
    """Whether more than a size of the list is kept."""
    made = descendants([tokens]) - {tokens}
    return any(node.name in kept for node in made if node.op != "output" and is_tensor(node))
