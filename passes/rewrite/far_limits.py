"""Limits on tokens that no case of verification reaches, in code that the rewritten graph does not have: below them it is as seen.

An expert's room of 16384 tokens (``token[:16384]``) leaves nothing out on an example, nor in any run of verification. One of 600
does where a router can be made to send them all to one expert; where a table or a threshold chooses, it cannot.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.capture.probes import LARGEST_LIMIT, limits_of
from hexa_fx.isolation.choices import NAMES
from hexa_fx.passes.detect.graph import ancestors, operation
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.verify.exact_counts import counts_to_try
from hexa_fx.runtime import guards


def require_fewer(
    graph: torch.fx.Graph, source: torch.fx.Node, match: MoEMatch, removed: Iterable[torch.fx.Node]
) -> bool:
    """Emits the condition that all choices together are within every such limit of ``removed`` code; whether there is one.

    Args:
        source: the tokens of ``match`` in ``graph``.
    """
    tokens, top_k = record_of(match.source).value, match.routing.top_k
    seen = LARGEST_LIMIT if _can_be_forced(match) else top_k * tokens.numel() // max(1, tokens.shape[-1])
    limits = [limit for node in removed for limit in limits_of(node) if limit > seen]
    limits += filter(None, [counts_to_try(match.captured, 0).far])
    if not limits:
        return False
    with graph.inserting_before(source.next):
        numbers, width = graph.call_method("numel", (source,)), graph.call_method("size", (source, -1))
        most = graph.call_function(operator.mul, (width, min(limits) // top_k))
        said = f"at most {min(limits)} choices, as the code compares counts with that number, or cuts lists there"
        graph.call_function(guards.require, (graph.call_function(operator.le, (numbers, most)), said))
    return True


def _can_be_forced(match: MoEMatch) -> bool:
    """Whether verification can have all tokens choose the same experts: by what chooses them, or as ids that are given."""
    behind = ancestors(match.routing.index.nodes)
    chosen = any(n.op.startswith("call") and operation(n) in NAMES for n in behind)
    return chosen or (match.is_given_ids and not any(n.op == "get_attr" for n in behind))
