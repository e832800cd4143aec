"""Refuses limits on tokens that no case of verification exceeds, in code that the rewritten graph does not have.

An expert's room of 16384 tokens (``token[:16384]``) leaves nothing out on an example, nor in any run of verification. One of 600
does where a router can be made to send them all to one expert; where a table or a threshold chooses, it cannot.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.capture.probes import LARGEST_LIMIT, limits_of
from hexa_fx.operations import kind
from hexa_fx.passes.detect.graph import ancestors
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.verdict import Refuse


def refuse_far_limits(removed: Iterable[torch.fx.Node], match: MoEMatch) -> None:
    """Refuses ``removed`` code that cuts rows, or compares counts, at more tokens than verification sends to an expert.

    Raises:
        Refuse: some does.
    """
    tokens, top_k = record_of(match.source).value, match.routing.top_k
    tried = LARGEST_LIMIT if _can_be_forced(match) else top_k * tokens.numel() // max(1, tokens.shape[-1])
    for node in removed:
        limit = max(limits_of(node), default=0)
        if limit > tried:
            raise Refuse(
                f"the code cuts lists of tokens, or compares how many there are, at {limit}, and no run of verification sends "
                f"more than {tried} to an expert; without that limit, or with one that is reached, it can be rewritten",
                node,
            )


def _can_be_forced(match: MoEMatch) -> bool:
    """Whether verification can have all tokens choose the same experts: by what chooses them, or as ids that are given."""
    behind = ancestors(match.routing.index.nodes)
    chosen = any(map(ops.picks_best, behind)) or any(kind(n) == "max" for n in behind)
    return chosen or (match.is_given_ids and not any(n.op == "get_attr" for n in behind))
