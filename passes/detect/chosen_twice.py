"""Tokens whose choices are made one after the other, so that two of them may be of the same expert.

As where all scores but the first are zero in the dtype of the code. On the example that hardly happens, and whether it counts
once or twice then is up to how the code reads the weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx

from hexa_fx import operations as ops
from hexa_fx.operations import operation

TWICE = (
    "every expert of a token is a choice of its own, and two may be the same; then the weight that the code reads from the "
    "scores of all experts may count once or twice, which one run does not show; a weight gathered for each choice can be "
    "rewritten"
)
_is_part = ops.of("getitem select squeeze unbind split chunk reshape view flatten long t")


def chosen_apart(ids: Iterable[torch.fx.Node]) -> bool:
    """Whether every slot is a choice of its own, so that two may be of the same expert, as where all other scores are zero."""
    return len({choice for node in ids for choice in _choices(node)}) > 1


def _choices(ids: torch.fx.Node) -> list[torch.fx.Node]:
    """The operations whose results ids are parts of, or put together from."""
    while _is_part(ids) and ids.all_input_nodes:
        ids = ids.all_input_nodes[0]
    if operation(ids) in ("stack", "cat"):
        return [choice for column in ids.all_input_nodes for choice in _choices(column)]
    return [ids]


def is_factor(node: torch.fx.Node, behind: set[torch.fx.Node]) -> bool:
    """Whether all that becomes of it in ``behind`` is that it is multiplied by something."""
    users = [user for user in node.users if user in behind]
    return all(ops.scales(n) or ops.contracts(n) or (ops.moves(n) and is_factor(n, behind)) for n in users)
