"""What the code does with experts' ids that a block is given, where one of them names no expert.

A comparison with the number of every expert leaves out an id of none, as the operators do. A look-up takes -1 for the last expert,
and other code raises an error. An example shows none of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import kind
from hexa_fx.passes.detect.graph import is_float, is_tensor
from hexa_fx.passes.detect.match import MoEMatch

_leads_on = ops.of("unique unique_consecutive sort msort cat stack")
_leaves_out = ops.of("argsort eq ne lt le gt ge size numel nelement dim")


@dataclass(frozen=True)
class GivenIds:
    """Ids that are given, and used for more than comparisons.

    Args:
        past: the least id that is too large for the code.
        from_the_end: whether negative ones count from the last expert.
    """

    past: int
    from_the_end: bool


def given_ids(match: MoEMatch) -> GivenIds | None:
    """None if a choice in the block gives its ids, or the code only compares them, or the example held such an id.

    Marks for all experts are no ids: where a slot has none, no expert gets it.
    """
    if match.routing.index.reading == "one_hot":
        return None
    given = [node for node in map(_given, match.routing.index.nodes) if node is not None]
    if len(given) < len(match.routing.index.nodes) or any(_names_none(node, match.num_experts) for node in given):
        return None
    uses = list(_uses(given))
    if not uses:
        return None
    counts = (count for use in uses if kind(use) == "one_hot" for count in (*use.args[1:], *use.kwargs.values()))
    past = max((count for count in counts if isinstance(count, int)), default=match.num_experts)
    return GivenIds(past, all(kind(use) == "getitem" or ops.gives_numbers(use) for use in uses))


def _uses(given: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """What the ids are used for, but to be compared or counted."""
    left = [(node, user) for node in given for user in node.users]
    while left:
        node, user = left.pop()
        if _leads_on(user) or (_moves(user) and user.args[0] is node):
            left += [(user, after) for after in user.users]
        elif not _leaves_out(user) and user.op != "output":
            yield user


def _moves(node: torch.fx.Node) -> bool:
    return ops.views(node) or ops.casts(node) or ops.takes_part(node)


def _given(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input that the ids are a view or part of; None if they are computed."""
    while _moves(node) and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node if node.op == "placeholder" and is_tensor(node) and not is_float(node) else None


def _names_none(node: torch.fx.Node, experts: int) -> bool:
    ids = record_of(node).value
    return not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= experts
