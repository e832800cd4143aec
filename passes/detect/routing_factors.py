"""Finds the factors, one for every slot of a token, that expert outputs (or the tokens given to them) are multiplied by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.passes.detect.graph import ancestors, is_float
from hexa_fx.passes.detect.rules import is_constant
from hexa_fx.passes.detect.slots import TWICE, Slots, is_factor
from hexa_fx.passes.detect.verdict import Refuse

Reading = Literal[
    "token_slot",
    "slot_token",
    "token_expert",
    "expert_token",
    "token_expert_position",
    "token",
    "expert",
    "columns",
    "one_hot",
]
"""How a tensor is read: (T, k), (k, T), (T, E), (E, T), (T, E, C) summed over C, (T,) for all slots, (E,) for all tokens, one (T,)
a slot, or (T, k, E) with a one at the chosen expert, if any.
"""

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RoutingSource:
    """A routing quantity: the nodes that hold it and how they are read.

    ``groups``: it holds an entry for each group of tokens that follow each other, such as a sequence, not for each token.
    """

    nodes: tuple[torch.fx.Node, ...]
    reading: Reading = "token_slot"
    groups: bool = False


def of_each_token(value: torch.Tensor, tokens: int, most: int) -> torch.Tensor | None:
    """A tensor with an entry of at most ``most`` numbers for each group of tokens, with that entry for each token; or None."""
    groups = value.shape[0] if value.dim() else 0
    if not 0 < groups < tokens or tokens % groups or value.numel() > groups * most:
        return None
    return value.repeat_interleave(tokens // groups, 0)


def _readings(
    value: torch.Tensor, slots: Slots, of_groups: bool = True
) -> Iterator[tuple[bool, Reading, torch.Tensor]]:
    """The ways to read a tensor as a factor, first as one of tokens, then as one of groups of tokens."""
    for reading, table in _read_factor(value, slots):
        yield False, reading, table
    spread = of_each_token(value, slots.tokens, slots.experts) if of_groups else None
    if spread is not None:
        for reading, table in _read_factor(spread, slots):
            yield True, reading, table


def _read_factor(value: torch.Tensor, slots: Slots) -> Iterator[tuple[Reading, torch.Tensor]]:
    """The ways to read a tensor as a factor, each (T, k) or (T, E)."""
    t, k, e = slots.tokens, slots.top_k, slots.experts
    if value.numel() == t * k:
        if k == 1 or value.shape[-1] == k or value.dim() == 1 or value.shape[-2:] == (k, 1):
            yield "token_slot", value.reshape(t, k)
        if k > 1 and value.shape[0] == k:
            yield "slot_token", value.reshape(k, t).t()
    if value.numel() == t * e and value.dim() >= 2:
        if value.shape[-1] == e:
            yield "token_expert", value.reshape(t, e)
        if value.shape[0] == e:
            yield "expert_token", value.reshape(e, t).t()
    if value.dim() >= 3 and value.shape[-2] == e and value.numel() // (e * value.shape[-1]) == t:
        yield "token_expert_position", value.sum(-1).reshape(t, e)
    if value.numel() == t and k > 1:
        yield "token", value.reshape(t, 1).expand(t, k)
    if value.numel() == e and max(value.shape, default=1) == e:
        yield "expert", value.reshape(1, e).expand(t, e)


_RANK: dict[str, int] = {
    "token_slot": 0,
    "slot_token": 0,
    "token": 1,
    "token_expert": 2,
    "expert_token": 2,
    "token_expert_position": 3,
    "expert": 4,
}


def _by_expert(reading: Reading) -> bool:
    return reading in ("token_expert", "expert_token", "token_expert_position", "expert")


def find_factor(
    wanted: torch.Tensor,
    slots: Slots,
    known: Sequence[torch.fx.Node],
    inner: frozenset[torch.fx.Node],
    end: torch.fx.Node,
    covers_dropped: bool,
) -> tuple[RoutingSource, ...]:
    """Where the factors ``wanted`` of the pairs can be read; () if they are all 1."""
    constant = bool(((wanted - 1).abs() <= 1e-9).all())
    if constant and not (slots.dropped and covers_dropped):
        return ()
    best: tuple[tuple[bool, bool, bool, bool, int, int], RoutingSource] | None = None
    unlike = False
    for place, node in enumerate(known):
        if not is_float(node):
            continue
        for groups, reading, table in _readings(slots.value(node), slots):
            if not _agrees(table, reading, wanted, slots):
                continue
            total = slots.apart and _by_expert(reading) and reading != "expert"
            if total and not _is_total(table, slots):
                unlike = True
                continue
            total = total and is_factor(node, ancestors([end]))  # all that two slots of one expert come to
            row = reading == "expert" and record_of(node).value.dim() > 1  # (1, E): of each expert, or of a lone group
            key = (
                not total,
                not _zero_when_dropped(table, reading, slots),
                groups or row,
                node in inner,
                _RANK[reading],
                place,
            )
            if best is None or key < best[0]:
                best = key, RoutingSource((node,), reading, groups)
    if best is not None and not (constant and best[0][1]):
        return (best[1],)
    if constant:
        return ()
    columns = _factor_columns(wanted, slots, known)
    if columns is None and unlike:
        raise Refuse(TWICE, end)
    if columns is None:
        raise Refuse(
            "expert outputs enter their token times a number that no tensor computed before the experts holds; that number has to "
            "be the router's weight alone, not also a constant, a count of tokens or something computed from the outputs",
            end,
        )
    return (RoutingSource(columns, "columns"),)


def straight_through(slots: Slots, known: Sequence[torch.fx.Node], end: torch.fx.Node) -> tuple[RoutingSource, ...]:
    """The last factor of 1 for every pair that has a gradient all the same, as in ``mask + w - w.detach()``; () without one."""
    ones = torch.ones(len(slots.pairs.token), dtype=torch.float64, device=slots.ids.device)
    behind = ancestors([end]) if slots.apart else set()
    rows_of_one: tuple[RoutingSource, ...] = ()  # an expert may happen to have as many rows as there are experts
    for node in known:
        if not is_float(node) or is_constant(node):
            continue
        for reading, table in _read_factor(slots.value(node), slots):
            counts = slots.apart and _by_expert(reading) and not is_factor(node, behind)
            if _agrees(table, reading, ones, slots) and not counts:
                source = (RoutingSource((node,), reading),)
                if reading != "expert":
                    return source
                rows_of_one = rows_of_one or source
    return rows_of_one


def _agrees(table: torch.Tensor, reading: Reading, wanted: torch.Tensor, slots: Slots) -> bool:
    column = slots.pairs.expert if _by_expert(reading) else slots.slot
    got = table[slots.pairs.token, column]
    return bool(((got - wanted).abs() <= _TOLERANCE * wanted.abs().clamp(min=1e-3)).all())


def counts_of_choices(slots: Slots, known: Sequence[torch.fx.Node], end: torch.fx.Node) -> tuple[RoutingSource, ...]:
    """A table that says how often a token chose an expert, one or two where two choices are the same, and is a factor as it is."""
    ones = torch.ones(len(slots.pairs.token), dtype=torch.float64, device=slots.ids.device)
    behind = ancestors([end])
    for node in known:
        for groups, reading, table in () if record_of(node).value.is_complex() else _readings(slots.value(node), slots):
            by_expert = reading in ("token_expert", "expert_token") and not groups and _is_total(table, slots)
            if by_expert and _agrees(table.double(), reading, ones, slots) and is_factor(node, behind):
                return (RoutingSource((node,), reading),)
    return ()


def _is_total(table: torch.Tensor, slots: Slots) -> bool:
    """Whether (T, E) is zero where no expert was chosen, so that it holds all that an expert's output is multiplied by."""
    others = torch.ones_like(table, dtype=torch.bool)
    others[slots.pairs.token, slots.pairs.expert] = False
    return not bool(table[others].any())


def _zero_when_dropped(table: torch.Tensor, reading: Reading, slots: Slots) -> bool:
    column = slots.dropped_expert if _by_expert(reading) else slots.dropped_slot
    return bool((table[slots.dropped_token, column] == 0).all())


def _factor_columns(
    wanted: torch.Tensor, slots: Slots, known: Sequence[torch.fx.Node]
) -> tuple[torch.fx.Node, ...] | None:
    """Factors in one (T,) tensor per slot."""
    columns = []
    for slot in range(slots.top_k):
        mine = slots.slot == slot
        dropped = slots.dropped_token[slots.dropped_slot == slot]
        fitting: list[tuple[bool, int, torch.fx.Node]] = []
        for node in known:
            if not is_float(node) or record_of(node).value.numel() != slots.tokens:
                continue
            flat = slots.value(node).reshape(-1)
            expected = wanted[mine]
            if bool(
                ((flat[slots.pairs.token[mine]] - expected).abs() <= _TOLERANCE * expected.abs().clamp(min=1e-3)).all()
            ):
                fitting.append((not bool((flat[dropped] == 0).all()), len(fitting), node))
        if not fitting:
            return None
        columns.append(min(fitting, key=lambda item: item[:2])[2])
    return tuple(columns)


def covered(sources: Sequence[RoutingSource], slots: Slots) -> bool:
    """Whether one of the factors is zero wherever a slot was dropped."""
    if not slots.dropped:
        return True
    for source in sources:
        if source.reading == "columns":
            table = torch.stack([slots.value(node).reshape(-1) for node in source.nodes], 1)
            if _zero_when_dropped(table, "token_slot", slots):
                return True
            continue
        for groups, reading, table in _readings(slots.value(source.nodes[0]), slots, source.groups):
            if (groups, reading) == (source.groups, source.reading) and _zero_when_dropped(table, reading, slots):
                return True
    return False


def find_mask(
    slots: Slots, known: Sequence[torch.fx.Node], inner: frozenset[torch.fx.Node], end: torch.fx.Node
) -> RoutingSource:
    """A 0/1 tensor that says which slots are kept."""
    ones = torch.ones(len(slots.pairs.token), dtype=torch.float64, device=slots.ids.device)
    for node in sorted(known, key=lambda node: node in inner):
        if record_of(node).value.is_complex():
            continue
        for groups, reading, table in _readings(slots.value(node).double(), slots):
            if _agrees(table, reading, ones, slots) and _zero_when_dropped(table, reading, slots):
                return RoutingSource((node,), reading, groups)
    raise Refuse(
        "some of the router's choices reach no expert, and no tensor says which; where tokens are dropped on purpose, multiply "
        "the weights by a mask of those that are kept",
        end,
    )
