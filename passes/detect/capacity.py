"""Experts with room for a number of tokens: which number it is, and in which order tokens take the places.

Code that cuts lists of tokens (``tokens[:capacity]``), or asks which are still in time, leaves no tensor that says for every choice
of the router whether it was kept. On an example that overflows, the choices that were kept tell the capacity, since an expert that
is full has exactly that many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.ops.ranks import Order, ranks_of_choices
from hexa_fx.passes.detect.graph import ancestors, is_float, is_tensor, literals
from hexa_fx.passes.detect.slots import Pairs, Slots

ORDERS: tuple[Order, ...] = ("by_token", "by_slot")
"""Not by weight: which of two tokens with equal weights is kept, ``topk`` alone knows."""


@dataclass(frozen=True)
class Capacity:
    """Every expert takes its first ``limit`` tokens in ``order``; further choices reach no expert.

    ``limit`` is a number, or the recorded node that computes one from sizes.
    """

    order: Order
    limit: torch.fx.Node | int

    @property
    def nodes(self) -> list[torch.fx.Node]:
        return [self.limit] if isinstance(self.limit, torch.fx.Node) else []

    def is_asked(self, node: torch.fx.Node) -> bool:
        """Whether ``node`` compares places or counts with the limit."""
        if not _bounds(node):
            return False
        asked = {record_of(n).value for n in node.all_input_nodes if not is_tensor(n)} | set(literals([node]))
        return self.value in asked or self.value - 1 in asked

    @property
    def value(self) -> int:
        """The limit in the recorded run."""
        return int(record_of(self.limit).value) if isinstance(self.limit, torch.fx.Node) else self.limit


def find_capacity(
    pairs: Pairs,
    slots: Slots,
    end: torch.fx.Node,
    is_expert: Callable[[torch.fx.Node], bool],
) -> Capacity | None:
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


def _sources_of(
    value: int, end: torch.fx.Node, is_expert: Callable[[torch.fx.Node], bool]
) -> Iterator[torch.fx.Node | int]:
    """What the code cuts lists at, or compares places with, if it is ``value``; then other numbers that follow from sizes."""
    numbers = [n for n in end.graph.nodes if n.op.startswith("call") and _is_number(n, value) and not is_expert(n)]
    of_sizes = [n for n in reversed(numbers) if not any(_counts(m) for m in ancestors([n]))]
    yield from (n for n in of_sizes if any(_cuts(user) for user in n.users))
    if any(value in literals([n]) for n in end.graph.nodes if n.op.startswith("call") and _cuts(n)):
        yield value
    yield from of_sizes


def _cuts(node: torch.fx.Node) -> bool:
    """Whether it takes the first rows of a list, or asks which places there are."""
    if node.op.startswith("call") and operation(node) == "getitem":
        return is_tensor(node) and not is_float(node)
    return _bounds(node)


def _is_number(node: torch.fx.Node, value: int) -> bool:
    found = record_of(node).value
    return isinstance(found, int) and not isinstance(found, bool) and found == value


def _counts(node: torch.fx.Node) -> bool:
    return ops.finds(node) or ops.gives_numbers(node)


_bounds = ops.of("lt le gt ge clamp clamp_max minimum min max topk narrow")
