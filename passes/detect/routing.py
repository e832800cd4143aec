"""Which recorded tensors hold the routing: the experts of every token, and their weights.

Found by value among everything computed before the experts ran. The candidates are read as (T, k) however they are laid out;
numbers that happen to agree are told apart by preferring the least surprising reading, and by verification afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.graph import UNINITIALISED, ancestors, inside_calls, is_tensor, operation
from hexa_fx.passes.detect.rules import is_constant
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

Reading = Literal[
    "token_slot", "slot_token", "token_expert", "expert_token", "token_expert_position", "token", "columns", "one_hot"
]
"""How a tensor is read: (T, k), (k, T), (T, E), (E, T), (T, E, C) summed over C, (T,) for all slots, one (T,) a slot, or
(T, k, E) with a one at the chosen expert, if any.
"""

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Pairs:
    """The (token, expert) pairs in which an expert's output reaches a token, with the factors on the way.

    before: factor on the token before the first projection. after: product of the factors between and after the projections.
    """

    token: torch.Tensor
    expert: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True)
class Source:
    """A routing quantity: the nodes that hold it and how they are read. ``value`` for a constant factor."""

    nodes: tuple[torch.fx.Node, ...]
    reading: Reading = "token_slot"


@dataclass(frozen=True)
class Routing:
    """Args:
    top_k: experts a token.
    index: where the expert ids are.
    before, after: where the factors are; empty when they are all 1. The factors of ``after`` are multiplied.
    """

    top_k: int
    index: Source
    before: tuple[Source, ...]
    after: tuple[Source, ...]

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """All that hold a part of it."""
        return [node for source in (self.index, *self.before, *self.after) for node in source.nodes]


def find_routing(
    pairs: Pairs,
    tokens: int,
    experts: int,
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    end: torch.fx.Node,
    prefer_earliest: bool = False,
) -> Routing:
    """Of equal readings the latest is taken, or the earliest: what came in between may matter on other inputs.

    Raises:
    Refuse: the ids or a factor are not among the tensors computed before ``end``.
    """
    known = _candidates(captured, tags, end)
    inner = inside_calls(captured)
    effective = (pairs.before * pairs.after).abs() > 0
    active = Pairs(*(field[effective] for field in (pairs.token, pairs.expert, pairs.before, pairs.after)))
    flat = active.token * experts + active.expert
    if len(flat.unique()) != len(flat):
        raise Refuse("a token reaches the same expert twice in one pass, so its routing cannot be read off", end)
    in_order, known = known, known if prefer_earliest else known[::-1]
    index, ids = _find_index(active, tokens, experts, known, in_order, inner, end)
    slots = _Slots(ids, active, tokens, experts)
    before = _find_factor(active.before, slots, known, inner, end, covers_dropped=False)
    if prefer_earliest and not before:
        before = _straight_through(slots, in_order[::-1])
    after = _find_factor(active.after, slots, known, inner, end, covers_dropped=not _covered(before, slots))
    if slots.dropped and not _covered((*before, *after), slots):
        after = (*after, _find_mask(slots, known, inner, end))
    return Routing(ids.shape[1], index, before, after)


def find_row_factor(
    wanted: torch.Tensor,
    pairs: Pairs,
    routing: Routing,
    tokens: int,
    experts: int,
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    end: torch.fx.Node,
) -> tuple[Source, ...]:
    """Where a number for every pair (P,) stands that the experts compute with; () if it is always 1.

    Raises:
        Refuse: it is not among the tensors computed before ``end``.
    """
    effective = (pairs.before * pairs.after).abs() > 0
    active = Pairs(*(field[effective] for field in (pairs.token, pairs.expert, pairs.before, pairs.after)))
    values = [record_of(node).value for node in routing.index.nodes]
    if routing.index.reading == "columns":
        ids = torch.stack([value.reshape(-1) for value in values], 1)
    else:
        ids = dict(_read_ids(values[0], tokens, experts))[routing.index.reading]
    slots = _Slots(ids, active, tokens, experts)
    known = _candidates(captured, tags, end)[::-1]
    return _find_factor(wanted[effective], slots, known, inside_calls(captured), end, covers_dropped=False)


def check_identity(factor: torch.Tensor, routing: Routing, tokens: int, experts: int, end: torch.fx.Node) -> None:
    """Identity experts must add the token with the routing weights of the ids at and above ``experts``.

    Raises:
        Refuse: they add it with another factor.
    """
    if routing.index.reading != "token_slot" or [s.reading for s in routing.after] != ["token_slot"] or routing.before:
        raise Refuse("tokens reach the output past the experts, and the routing does not say with which weight", end)
    ids = record_of(routing.index.nodes[0]).value.reshape(tokens, routing.top_k)
    weight = record_of(routing.after[0].nodes[0]).value.double().reshape(tokens, routing.top_k)
    if not torch.allclose((weight * (ids >= experts)).sum(1), factor, rtol=1e-5, atol=1e-6):
        raise Refuse("tokens reach the output past the experts with a weight that is not the router's", end)


def _candidates(captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag], end: torch.fx.Node) -> list[torch.fx.Node]:
    """Tensors that depend on no expert and that the combine was computed from.

    One that merely holds the same numbers will not do: top-k's values equal the gathered scores only while a correction bias is 0.
    """
    behind = ancestors([end]) - {end}
    return [
        node
        for node in captured.graph.nodes
        if node in behind
        and is_tensor(node)
        and not tags[node].experts
        and not tags[node].weight
        and record_of(node).value.numel()
        and operation(node) not in UNINITIALISED
    ]


# -- expert ids --------------------------------------------------------------------------------------------------------


def _find_index(
    pairs: Pairs,
    tokens: int,
    experts: int,
    known: Sequence[torch.fx.Node],
    in_order: Sequence[torch.fx.Node],
    inner: frozenset[torch.fx.Node],
    end: torch.fx.Node,
) -> tuple[Source, torch.Tensor]:
    """The node with the ids of every token, and the ids as (T, k)."""
    wanted = torch.zeros(tokens, experts, dtype=torch.bool, device=pairs.token.device)
    wanted[pairs.token, pairs.expert] = True
    best: tuple[tuple[bool, int, int, bool, int], Source, torch.Tensor] | None = None
    for place, node in enumerate(known):
        for reading, ids in _read_ids(record_of(node).value, tokens, experts):
            extra = _extra_ids(ids, wanted)
            if extra is None:
                continue
            key = (reading == "one_hot", ids.shape[1], extra, node in inner, place)
            if best is None or key < best[0]:
                best = key, Source((node,), reading), ids
    if best is not None:
        return best[1], best[2]
    if experts > 1 and bool(wanted.all()):
        raise Refuse("every token is given to every expert with a weight of its own: a dense (soft) mixture", end)
    return _index_from_columns(wanted, tokens, experts, in_order, end)


def _read_ids(value: torch.Tensor, tokens: int, experts: int) -> Iterator[tuple[Reading, torch.Tensor]]:
    if value.is_floating_point() or value.is_complex() or value.numel() % tokens:
        return
    if value.dim() >= 2 and value.shape[-1] == experts and value.numel() // experts % tokens == 0:
        yield from _read_one_hot(value.reshape(tokens, -1, experts))
    if value.dtype == torch.bool:
        return
    k = value.numel() // tokens
    if not 0 < k <= experts:
        return
    if k == 1 or value.shape[-1] == k or value.dim() == 1:
        yield "token_slot", value.reshape(tokens, k)
    if k > 1 and value.dim() >= 2 and value.shape[0] == k:
        yield "slot_token", value.reshape(k, tokens).t()


def _read_one_hot(marks: torch.Tensor) -> Iterator[tuple[Reading, torch.Tensor]]:
    """Ids of (T, k, E) marks of which at most one is set for every slot; E where none is."""
    if marks.shape[1] > marks.shape[2] or not bool(((marks == 0) | (marks == 1)).all()):
        return
    chosen = marks.sum(-1)
    if bool((chosen <= 1).all()):
        yield "one_hot", torch.where(chosen == 1, marks.int().argmax(-1), marks.shape[2])


def _extra_ids(ids: torch.Tensor, wanted: torch.Tensor) -> int | None:
    """How many ids no expert output belongs to; None unless every wanted pair is among the ids, each once."""
    tokens, experts = wanted.shape
    valid = (ids >= 0) & (ids < experts)
    counts = torch.zeros(tokens, experts + 1, dtype=torch.long, device=ids.device)
    counts.scatter_add_(1, torch.where(valid, ids, experts).long(), torch.ones_like(ids, dtype=torch.long))
    counts = counts[:, :experts]
    if bool((counts[wanted] != 1).any()) or bool((counts > 1).any()):
        return None
    return int((counts > 0).sum() - wanted.sum())


def _index_from_columns(
    wanted: torch.Tensor, tokens: int, experts: int, known: Sequence[torch.fx.Node], end: torch.fx.Node
) -> tuple[Source, torch.Tensor]:
    """Ids that the code keeps one (T,) tensor a slot."""
    remaining = wanted.clone()
    columns: list[tuple[torch.fx.Node, torch.Tensor]] = []
    for node in known:
        value = record_of(node).value
        if value.is_floating_point() or value.dtype == torch.bool or value.numel() != tokens:
            continue
        ids = value.reshape(-1)
        if int(ids.min()) < 0 or int(ids.max()) >= experts:
            continue
        hits = remaining.gather(1, ids[:, None].long())[:, 0]
        if 2 * int(hits.sum()) < int(remaining.any(1).sum()) or not bool(hits.any()):
            continue
        columns.append((node, ids))
        remaining.scatter_(1, ids[:, None].long(), False)
        if not bool(remaining.any()):
            nodes = tuple(node for node, _ in columns)
            return Source(nodes, "columns"), torch.stack([ids for _, ids in columns], 1)
    raise Refuse(
        "no tensor holds the expert ids of every token; only a fixed number of ids a token is rewritten, not experts that choose "
        "their tokens, nor a number of experts that differs from token to token",
        end,
    )


# -- factors -----------------------------------------------------------------------------------------------------------


class _Slots:
    """The pairs laid out on (T, k): where each pair's slot is, and which slots no expert output belongs to."""

    def __init__(self, ids: torch.Tensor, pairs: Pairs, tokens: int, experts: int) -> None:
        self.ids, self.pairs, self.tokens, self.experts = ids, pairs, tokens, experts
        self.top_k = ids.shape[1]
        self.slot = (ids[pairs.token] == pairs.expert[:, None]).int().argmax(1)
        taken = torch.zeros_like(ids, dtype=torch.bool)
        taken[pairs.token, self.slot] = True
        sentinel = (ids < 0) | (ids >= experts)
        self.dropped_token, self.dropped_slot = torch.nonzero(~taken & ~sentinel, as_tuple=True)
        self.dropped_expert = ids[self.dropped_token, self.dropped_slot]

    @property
    def dropped(self) -> int:
        return len(self.dropped_token)


def _read_factor(value: torch.Tensor, slots: _Slots) -> Iterator[tuple[Reading, torch.Tensor]]:
    """Readings of a tensor as a factor: always (T, k) or (T, E) by reading."""
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


_RANK: dict[str, int] = {
    "token_slot": 0,
    "slot_token": 0,
    "token": 1,
    "token_expert": 2,
    "expert_token": 2,
    "token_expert_position": 3,
}


def _by_expert(reading: Reading) -> bool:
    return reading in ("token_expert", "expert_token", "token_expert_position")


def _find_factor(
    wanted: torch.Tensor,
    slots: _Slots,
    known: Sequence[torch.fx.Node],
    inner: frozenset[torch.fx.Node],
    end: torch.fx.Node,
    covers_dropped: bool,
) -> tuple[Source, ...]:
    """Where the factors ``wanted`` of the pairs stand, () if they are all 1."""
    constant = bool(((wanted - 1).abs() <= 1e-9).all())
    if constant and not (slots.dropped and covers_dropped):
        return ()
    best: tuple[tuple[bool, bool, int, int], Source] | None = None
    for place, node in enumerate(known):
        value = record_of(node).value
        if not value.is_floating_point():
            continue
        for reading, table in _read_factor(value.double(), slots):
            if not _agrees(table, reading, wanted, slots):
                continue
            key = (not _zero_when_dropped(table, reading, slots), node in inner, _RANK[reading], place)
            if best is None or key < best[0]:
                best = key, Source((node,), reading)
    if best is not None and not (constant and best[0][0]):
        return (best[1],)
    if constant:
        return ()
    columns = _factor_columns(wanted, slots, known)
    if columns is None:
        raise Refuse(
            "expert outputs enter their token times a number that no tensor computed before the experts holds; that number has to "
            "be the router's weight alone, not also a constant, a count of tokens or something computed from the outputs",
            end,
        )
    return (Source(columns, "columns"),)


def _straight_through(slots: _Slots, known: Sequence[torch.fx.Node]) -> tuple[Source, ...]:
    """The last factor of 1 for every pair that has a gradient all the same, as in ``mask + w - w.detach()``; () without one."""
    ones = torch.ones(len(slots.pairs.token), dtype=torch.float64, device=slots.ids.device)
    for node in known:
        value = record_of(node).value
        if not value.is_floating_point() or is_constant(node):
            continue
        for reading, table in _read_factor(value.double(), slots):
            if _agrees(table, reading, ones, slots):
                return (Source((node,), reading),)
    return ()


def _agrees(table: torch.Tensor, reading: Reading, wanted: torch.Tensor, slots: _Slots) -> bool:
    column = slots.pairs.expert if _by_expert(reading) else slots.slot
    got = table[slots.pairs.token, column]
    return bool(((got - wanted).abs() <= _TOLERANCE * wanted.abs().clamp(min=1e-3)).all())


def _zero_when_dropped(table: torch.Tensor, reading: Reading, slots: _Slots) -> bool:
    column = slots.dropped_expert if _by_expert(reading) else slots.dropped_slot
    return bool((table[slots.dropped_token, column] == 0).all())


def _factor_columns(
    wanted: torch.Tensor, slots: _Slots, known: Sequence[torch.fx.Node]
) -> tuple[torch.fx.Node, ...] | None:
    """One (T,) tensor a slot."""
    columns = []
    for slot in range(slots.top_k):
        mine = slots.slot == slot
        dropped = slots.dropped_token[slots.dropped_slot == slot]
        fitting: list[tuple[bool, int, torch.fx.Node]] = []
        for node in known:
            value = record_of(node).value
            if not value.is_floating_point() or value.numel() != slots.tokens:
                continue
            flat = value.double().reshape(-1)
            expected = wanted[mine]
            if bool(
                ((flat[slots.pairs.token[mine]] - expected).abs() <= _TOLERANCE * expected.abs().clamp(min=1e-3)).all()
            ):
                fitting.append((not bool((flat[dropped] == 0).all()), len(fitting), node))
        if not fitting:
            return None
        columns.append(min(fitting, key=lambda item: item[:2])[2])
    return tuple(columns)


def _covered(sources: Sequence[Source], slots: _Slots) -> bool:
    """Whether one of the factors is zero wherever a slot was dropped."""
    if not slots.dropped:
        return True
    for source in sources:
        if source.reading == "columns":
            table = torch.stack([record_of(node).value.double().reshape(-1) for node in source.nodes], 1)
            if _zero_when_dropped(table, "token_slot", slots):
                return True
            continue
        readings = dict(_read_factor(record_of(source.nodes[0]).value.double(), slots))
        if _zero_when_dropped(readings[source.reading], source.reading, slots):
            return True
    return False


def _find_mask(
    slots: _Slots, known: Sequence[torch.fx.Node], inner: frozenset[torch.fx.Node], end: torch.fx.Node
) -> Source:
    """A 0/1 tensor that says which slots are kept."""
    ones = torch.ones(len(slots.pairs.token), dtype=torch.float64, device=slots.ids.device)
    for node in sorted(known, key=lambda node: node in inner):
        value = record_of(node).value
        if value.is_complex():
            continue
        for reading, table in _read_factor(value.double(), slots):
            if _agrees(table, reading, ones, slots) and _zero_when_dropped(table, reading, slots):
                return Source((node,), reading)
    raise Refuse(
        "some of the router's choices reach no expert, and no tensor says which; where tokens are dropped on purpose, multiply "
        "the weights by a mask of those that are kept",
        end,
    )
