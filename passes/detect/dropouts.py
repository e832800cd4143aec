"""Dropouts inside experts: where they are, and in which order a run draws for its experts.

A block with such dropouts is recorded with these idle, so that experiments see what is computed. The rewritten block draws what
the original would, expert after expert, each for its rows in the original's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.fx
import torch.nn.functional as F

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.functional import row_dropout
from hexa_fx.capture.records import reached
from hexa_fx.passes.detect.graph import ancestors, descendants, draws
from hexa_fx.passes.detect.steps import Column
from hexa_fx.passes.detect.tags import ALL, Tag, expert_groups, tag
from hexa_fx.passes.detect.verdict import Refuse

INSIDE = (
    "dropout is active inside the experts, and its random numbers depend on the order experts run in; it is rewritten where code "
    "runs them one after the other, each once and on its own tokens in their order; with probability 0 the block is "
    "rewritten in this mode too"
)


def expert_dropouts(captured: CapturedBlock) -> frozenset[int]:
    """Numbers of the nodes that drop numbers at random, each in the rows of one expert."""
    drawing = [(place, node) for place, node in enumerate(captured.graph.nodes) if _drops(node)]
    if not drawing:
        return frozenset()
    tags = tag(captured, expert_groups(captured.named_tensors()))
    return frozenset(place for place, node in drawing if _in_one(_experts(node, tags)))


def _drops(node: torch.fx.Node) -> bool:
    if node.target is not F.dropout or not draws(node):
        return False
    in_place = node.kwargs.get("inplace", len(node.args) > 3 and node.args[3])
    return not in_place and not isinstance(probability(node), torch.fx.Node)


def probability(node: torch.fx.Node) -> float:
    """Of a dropout, the part that is dropped."""
    found: float = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)  # type: ignore[assignment]
    return found


def _experts(node: torch.fx.Node, tags: Mapping[torch.fx.Node, Tag]) -> set[int | str]:
    """The experts with whose parameters a value, or else what is first computed from it, is computed."""
    after = reached([node], lambda n: () if n.op == "output" or tags[n].experts else n.users)
    return {expert for n in after if n.op != "output" for expert in tags[n].experts}


def _in_one(experts: set[int | str]) -> bool:
    return len(experts) == 1 and ALL not in experts


def has_idle(captured: CapturedBlock) -> bool:
    """Whether dropouts of the run were idle."""
    return any(node.target is row_dropout for node in captured.graph.nodes)


def refuse_dropouts_after(end: Column, combined: torch.fx.Node) -> None:
    """Refuses an end of the runs that leaves dropouts behind.

    Raises:
        Refuse: between ``end`` and where outputs are combined, numbers are dropped.
    """
    for node in descendants(end) & ancestors([combined]) - set(end):
        if node.target is row_dropout:
            raise Refuse(INSIDE, node)


def draws_slots_first(columns: Sequence[Column], experts: Sequence[int], tokens: Sequence[torch.Tensor]) -> bool:
    """Whether rows are drawn for slot after slot of the routing, not token after token.

    Args:
        columns: the dropouts, in the order in which an expert draws.
        experts, tokens: the expert, and the token (R,) of every row, of each run.

    Raises:
        Refuse: draws come in an order that the rewritten block would not keep.
    """
    if not columns:
        return False
    order = {node: place for place, node in enumerate(columns[0][0].graph.nodes)}
    places = [order[column[run]] for run in range(len(experts)) for column in columns]
    slots = int(torch.cat(list(tokens)).unique(return_counts=True)[1].max()) if any(map(len, tokens)) else 1
    jumps = max((int((rows.diff() < 0).sum()) for rows in tokens), default=0)
    # Rows of a slot are in the tokens' order, so that there is a jump back at most between slots.
    if places != sorted(places) or list(experts) != sorted(set(experts)) or jumps >= slots:
        raise Refuse(INSIDE, columns[0][0])
    return jumps > 0
