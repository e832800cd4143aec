"""Finds the recorded tensors that hold the routing: the experts of every token, and their weights (`routing_factors`).

They are found by value among everything computed before the experts ran, and read as (T, k) however they are laid out. Among
tensors that happen to hold the same numbers, the least surprising reading is preferred; verification decides afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch.fx import Node

from hexa_fx.capture import record_of
from hexa_fx.capture.records import reached
from hexa_fx.capture.replay import Replay
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import ancestors, is_float, literals
from hexa_fx.passes.detect.routing_sources import (
    RoutingSource,
    Search,
    counts_of_choices,
    covered,
    factors_of_experts,
    factors_on_outputs,
    find_factor,
    find_index,
    find_mask,
    find_repeated,
    ids_of,
    straight_through,
)
from hexa_fx.passes.detect.slots import Capacity, Pairs, Slots, chosen_apart, find_capacity
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import NoRouting, Refuse


@dataclass(frozen=True)
class Routing:
    """Where a block keeps its routing.

    Args:
        top_k: experts per token.
        index: where the expert ids are.
        before, after: where the factors are; empty when they are all 1. The factors of ``after`` are multiplied.
        constant: a number in the code that the experts' outputs are multiplied by too.
        always: experts that every token is given beside those it chose, with a factor of 1: shared ones in the same list.
        first: the place of the expert that id 0 stands for, where shared ones come before it.
        keep: zero (false) where a slot is given to no expert at all, which is more than a factor of zero if numbers are not finite.
        zeros: whether factors are zero there, too, on the example: a slot then counts as not kept only where its factor is zero.
        capacity: how many tokens an expert takes, where further ones are given to no expert.
    """

    top_k: int
    index: RoutingSource
    before: tuple[RoutingSource, ...]
    after: tuple[RoutingSource, ...]
    keep: tuple[RoutingSource, ...] = ()
    zeros: bool = False
    capacity: Capacity | None = None
    constant: float = 1.0
    always: tuple[int, ...] = ()
    first: int = 0

    @property
    def weights(self) -> list[Node]:
        """The nodes that hold factors on the experts' outputs."""
        return [node for source in self.after if not source.divides for node in source.nodes]

    @property
    def nodes(self) -> list[Node]:
        """All nodes that hold a part of the routing."""
        found = [node for source in (self.index, *self.before, *self.after, *self.keep) for node in source.nodes]
        return found + (self.capacity.nodes if self.capacity is not None else [])


def find_routing(pairs: Pairs, search: Search) -> Routing:
    """The routing by which pairs of tokens and experts came about."""
    try:
        return _find_routing(pairs, search)
    except NoRouting:
        always = _given_all_tokens(pairs, search.tokens)
        if not always and _some_go_unused(pairs, search):
            return _find_routing(pairs, search, marks=True)
        if not always:
            raise
        first = len(always) if always == tuple(range(len(always))) else 0
        routing = _find_routing(*_of_others(pairs, search, always, first)[:2])
        if routing.before:
            raise
        return replace(routing, always=always, first=first)


def _of_others(pairs: Pairs, search: Search, always: tuple[int, ...], first: int) -> tuple[Pairs, Search, torch.Tensor]:
    """The pairs of other experts than those ``always`` given, numbered from the one at the place ``first``, and a mask of them."""
    mask = ~torch.isin(pairs.expert, torch.tensor(always, device=pairs.expert.device))
    others = pairs.taken(mask)
    return replace(others, expert=others.expert - first), replace(search, experts=search.experts - first), mask


def _some_go_unused(pairs: Pairs, search: Search) -> bool:
    """Whether every expert computes all tokens, and no token has a use for all of that."""
    used = pairs.token[pairs.effective].bincount(minlength=1)
    return len(pairs.token) == search.tokens * search.experts and int(used.max()) < search.experts


def _given_all_tokens(pairs: Pairs, tokens: int) -> tuple[int, ...]:
    """The experts whose outputs all tokens get as they are, if there are others."""
    plain = (pairs.before == 1) & ((pairs.after - 1).abs() <= 1e-9)
    found = tuple(e for e in pairs.expert.unique().tolist() if int(((pairs.expert == e) & plain).sum()) == tokens)
    return found if len(found) < len(pairs.expert.unique()) else ()


def _find_routing(pairs: Pairs, search: Search, marks: bool = False) -> Routing:
    tokens, experts, end, in_order = search.tokens, search.experts, search.end, search.candidates
    repeated = find_repeated(pairs, search)
    active = pairs if repeated is not None else pairs.taken(pairs.effective)
    try:
        index, ids = repeated or find_index(active, search, marks=marks)
    except NoRouting:
        index, ids = find_index(active, search, search.asked_by_host())
    slots = Slots(ids, active, tokens, experts, search.replay.value, chosen_apart(index.nodes))
    before = find_factor(active.before, slots, search)
    given = [n for n in in_order[::-1] if _enters_experts(n, search.tags)] if search.prefer_earliest else []
    if search.prefer_earliest and not before:
        before = straight_through(slots, given, end)
    after, constant = _find_after(active, slots, search, not covered(before, slots))
    if search.prefer_earliest and not (before or after):  # `w / (w + 1e-8)` is one in 32 bits, but not in 64
        after = straight_through(slots, [n for n in in_order[::-1] if n not in given], end)
    absent = slots.dropped_if(pairs, wanted=False)
    keep: tuple[RoutingSource, ...] = ()
    capacity: Capacity | None = None
    zeros = covered(after, absent)
    if absent.dropped and (zeros or not covered(before, absent)):
        try:
            keep = (find_mask(absent, search),)
        except Refuse:
            if not zeros:
                capacity = find_capacity(pairs, slots, end, lambda n: bool(search.tags[n].experts))
                if capacity is None:
                    raise
                slots = slots.dropped_if(pairs, wanted=True)
    if not covered((*before, *after, *keep), slots):
        after = (*after, find_mask(slots, search))
    return Routing(ids.shape[1], index, before, after, keep, zeros, capacity, constant)


def _enters_experts(node: Node, tags: Mapping[Node, Tag]) -> bool:
    """Whether experts are given something that is computed from ``node``, past their own weights no further."""
    after = reached([node], lambda n: () if tags[n].experts else filter(_may_be_rows, n.users))
    of_experts = (n for n in after if tags[n].experts)
    return any(tags[n].weight and tags[n].experts for user in of_experts for n in user.all_input_nodes)


def _may_be_rows(node: Node) -> bool:
    return node.op != "output" and (is_float(node) or isinstance(record_of(node).value, (tuple, list)))


def _find_after(
    active: Pairs, slots: Slots, search: Search, covers_dropped: bool
) -> tuple[tuple[RoutingSource, ...], float]:
    """The factors of the outputs: one tensor's, or those of two; or times a constant."""
    try:
        sources = find_factor(active.after, slots, search, covers_dropped)
        return sources or (counts_of_choices(slots, search) if slots.apart else ()), 1.0
    except Refuse as refusal:
        constants = ((number, number) for number in _constants(search.end, search.tags))
        others: Iterator[tuple[RoutingSource | float, torch.Tensor | float]] = chain(
            factors_of_experts(slots, search), constants, factors_on_outputs(slots, search)
        )
        for other, numbers in others:
            with suppress(Refuse):
                found = find_factor(active.after / numbers, slots, search, covers_dropped)
                return ((*found, other), 1.0) if isinstance(other, RoutingSource) else (found, other)
        raise refusal from None


def _constants(end: Node, tags: Mapping[Node, Tag]) -> list[float]:
    """Numbers in the code that it may multiply what experts give by, or divide it by, or what that is multiplied by; a mean divides
    by as many as it is of."""
    behind = [node for node in (*ancestors([end]), end) if not tags[node].weight]
    inside = [node for node in behind if tags[node].experts or kind(node) in ("mul", "div")]
    means = (node for node in inside if operation(node) == "mean" and record_of(node).value.numel())
    many = (record_of(mean.all_input_nodes[0]).value.numel() // record_of(mean).value.numel() for mean in means)
    named = (*literals(inside), *many)
    return list(dict.fromkeys(n for number in named if number for n in (number, 1 / number) if n != 1))


def find_row_factor(wanted: torch.Tensor, pairs: Pairs, routing: Routing, search: Search) -> tuple[RoutingSource, ...]:
    """Where a factor for every pair (P,), which the experts compute with, can be read; () if it is always 1."""
    end = search.end
    if routing.always:
        pairs, search, kept = _of_others(pairs, search, routing.always, routing.first)
        if not bool((wanted[~kept] == 1).all()):
            raise Refuse("an expert that every token is given computes with a weight of the token's", end)
        wanted = wanted[kept]
    effective = pairs.effective
    ids = ids_of(routing.index, search.tokens, search.experts)
    # a table among the factors after the experts has what two choices of the same expert come to
    apart = chosen_apart(routing.index.nodes) and all(source.reading == "columns" for source in routing.after)
    slots = Slots(ids, pairs.taken(effective), search.tokens, search.experts, search.replay.value, apart)
    return find_factor(wanted[effective], slots, replace(search, prefer_earliest=False))


Passing = Literal["chosen", "unrouted", "weighted"]
"""Which tokens are added to the output as they are: those that chose an id of E or above, with their weight for it; those that no
expert was given; or all of another tensor, each with the sum of its weights."""


def how_tokens_pass(
    factor: torch.Tensor | None, pairs: Pairs, routing: Routing, experts: int, end: Node, replay: Replay
) -> Passing | None:
    """Why tokens are added to the output with ``factor`` (T,); None if none are."""
    if factor is None:
        return None
    unrouted = torch.ones_like(factor).index_fill(0, pairs.token, 0.0)
    if torch.allclose(unrouted, factor, rtol=0.0, atol=1e-6):
        return "unrouted"
    read = [(source.reading, source.groups) for source in (routing.index, *routing.after)]
    if read != [("token_slot", False)] * 2 or routing.before:
        raise Refuse("tokens reach the output past the experts, and the routing does not say with which weight", end)
    ids = record_of(routing.index.nodes[0]).value.reshape(len(factor), routing.top_k)
    weight = replay.value(routing.after[0].nodes[0]).reshape(len(factor), routing.top_k).double()
    if not torch.allclose((weight * (ids >= experts)).sum(1), factor, rtol=1e-5, atol=1e-6):
        raise Refuse("tokens reach the output past the experts with a weight that is not the router's", end)
    return "chosen"
