"""The pairs of a token and an expert that one run made, the slots that they stand in, one for every choice of a token, and how many
tokens an expert has room for.

Code that cuts lists of tokens (``tokens[:capacity]``), or asks which are still in time, leaves no tensor that says for every choice
of the router whether it was kept. On an example that overflows, the choices that were kept tell the capacity, since an expert that
is full has exactly that many rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor, literals, traced
from hexa_fx.passes.ranks import Order, rank_among_equals, ranks_of_choices


@dataclass(frozen=True)
class Pairs:
    """The (token, expert) pairs in which an expert's output reaches a token, with the factors on the way.

    before: factor on the token before the first projection. after: product of the factors between and after the projections.
    """

    token: torch.Tensor
    expert: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    @property
    def effective(self) -> torch.Tensor:
        """Mask of the pairs whose factors are not zero, so that they change the token."""
        return (self.before * self.after).abs() > 0

    def taken(self, mask: torch.Tensor) -> Pairs:
        """The pairs that a mask selects."""
        return Pairs(self.token[mask], self.expert[mask], self.before[mask], self.after[mask])


class Slots:
    """The pairs laid out on (T, k): where each pair's slot is, and which slots no expert output belongs to."""

    def __init__(
        self,
        ids: torch.Tensor,
        pairs: Pairs,
        tokens: int,
        experts: int,
        value: Callable[[Node], torch.Tensor],
        apart: bool = False,
    ) -> None:
        """``value``: a node's numbers, floating point in float64. ``apart``: whether two slots may be of the same expert."""
        self.apart = apart
        self.ids, self.pairs, self.tokens, self.experts, self.value = ids, pairs, tokens, experts, value
        self.top_k = ids.shape[1]
        self.slot = self.slot_of(pairs)
        taken = torch.zeros_like(ids, dtype=torch.bool)
        taken[pairs.token, self.slot] = True
        sentinel = (ids < 0) | (ids >= experts)
        self.dropped_token, self.dropped_slot = torch.nonzero(~taken & ~sentinel, as_tuple=True)
        self.dropped_expert = ids[self.dropped_token, self.dropped_slot]

    def slot_of(self, pairs: Pairs) -> torch.Tensor:
        """The slot of every pair. Rows of a token that an expert is given several times are in the order of its slots."""
        ids, (token, expert) = self.ids, (pairs.token, pairs.expert)
        count = self.experts + 2
        of_token = torch.arange(self.tokens, device=ids.device)[:, None] * count
        rank = rank_among_equals((of_token + ids.clamp(-1, self.experts) + 1).flatten()).reshape(ids.shape)
        same = (ids[token] == expert[:, None]) & (rank[token] == rank_among_equals(token * count + expert)[:, None])
        return same.int().argmax(1)

    @property
    def ones(self) -> torch.Tensor:
        """A factor of 1 for every pair."""
        return torch.ones(len(self.pairs.token), dtype=torch.float64, device=self.ids.device)

    @property
    def dropped(self) -> int:
        return len(self.dropped_token)

    def dropped_if(self, rows: Pairs, wanted: bool) -> Slots:
        """As this one, but of the slots without an expert output only those count as dropped for which an expert gave a row, or, if
        that is not ``wanted``, none did."""
        given = torch.zeros(self.tokens, self.experts, dtype=torch.bool, device=self.ids.device)
        given[rows.token, rows.expert] = True
        found, counted = copy.copy(self), given[self.dropped_token, self.dropped_expert.long()] == wanted
        found.dropped_token, found.dropped_slot = self.dropped_token[counted], self.dropped_slot[counted]
        found.dropped_expert = self.dropped_expert[counted]
        return found


TWICE = (
    "every expert of a token is a choice of its own, and two may be the same; then the weight that the code reads from the "
    "scores of all experts may count once or twice, which one run does not show; a weight gathered for each choice can be "
    "rewritten"
)
_is_part = ops.of("getitem select squeeze unbind split chunk reshape view flatten long t")


def chosen_apart(ids: Iterable[Node]) -> bool:
    """Whether every slot is a choice of its own, so that two may be of the same expert, as where all other scores are zero."""
    return len({choice for node in ids for choice in _choices(node)}) > 1


def _choices(ids: Node) -> list[Node]:
    """The operations whose results ids are parts of, or put together from."""
    ids = traced(ids, _is_part)[-1]
    if operation(ids) in ("stack", "cat"):
        return [choice for column in ids.all_input_nodes for choice in _choices(column)]
    return [ids]


def is_factor(node: Node, behind: set[Node]) -> bool:
    """Whether all that becomes of it in ``behind`` is that it is multiplied by something."""
    users = [user for user in node.users if user in behind]
    return all(ops.scales(n) or ops.contracts(n) or (ops.moves(n) and is_factor(n, behind)) for n in users)


ORDERS: tuple[Order, ...] = ("by_token", "by_slot")
"""Not by weight: which of two tokens with equal weights is kept, ``topk`` alone knows."""


@dataclass(frozen=True)
class Capacity:
    """Every expert takes its first ``limit`` tokens in ``order``; further choices reach no expert.

    ``limit`` is a number, or the recorded node that computes one from sizes.
    """

    order: Order
    limit: Node | int

    @property
    def nodes(self) -> list[Node]:
        return [self.limit] if isinstance(self.limit, Node) else []

    def is_asked(self, node: Node) -> bool:
        """Whether ``node`` compares places or counts with the limit."""
        if not _bounds(node):
            return False
        asked = {record_of(n).value for n in node.all_input_nodes if not is_tensor(n)} | set(literals([node]))
        return self.value in asked or self.value - 1 in asked

    @property
    def value(self) -> int:
        """The limit in the recorded run."""
        return int(record_of(self.limit).value) if isinstance(self.limit, Node) else self.limit


def find_capacity(pairs: Pairs, slots: Slots, end: Node, is_expert: Callable[[Node], bool]) -> Capacity | None:
    """The capacity under which exactly the slots of ``slots`` without a row got none; None if there is none.

    Args:
        pairs: the rows, in order.
        end: the combine.
        is_expert: whether a node depends on experts.
    """
    given = torch.zeros_like(slots.ids, dtype=torch.bool)
    given[pairs.token, slots.slot_of(pairs)] = True
    valid = (slots.ids >= 0) & (slots.ids < slots.experts)
    for order in ORDERS:
        rank = ranks_of_choices(slots.ids, order)
        kept, dropped = rank[given & valid], rank[~given & valid]
        if not len(dropped) or not len(kept) or int(kept.max()) + 1 != int(dropped.min()):
            continue
        value = int(dropped.min())
        return Capacity(order, next(_sources_of(value, end, is_expert), value))
    return None


def _sources_of(value: int, end: Node, is_expert: Callable[[Node], bool]) -> Iterator[Node | int]:
    """What the code cuts lists at, or compares places with, if it is ``value``; then other numbers that follow from sizes."""
    numbers = [n for n in end.graph.nodes if n.op.startswith("call") and _is_number(n, value) and not is_expert(n)]
    of_sizes = [n for n in reversed(numbers) if not any(ops.finds(m) or ops.gives_numbers(m) for m in ancestors([n]))]
    yield from (n for n in of_sizes if any(_cuts(user) for user in n.users))
    if any(value in literals([n]) for n in end.graph.nodes if n.op.startswith("call") and _cuts(n)):
        yield value
    yield from of_sizes


def _cuts(node: Node) -> bool:
    """Whether it takes the first rows of a list, or asks which places there are."""
    if node.op.startswith("call") and operation(node) == "getitem":
        return is_tensor(node) and not is_float(node)
    return _bounds(node)


def _is_number(node: Node, value: int) -> bool:
    found = record_of(node).value
    return isinstance(found, int) and not isinstance(found, bool) and found == value


_bounds = ops.of("lt le gt ge clamp clamp_max minimum min max topk narrow")
