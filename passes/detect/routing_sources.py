"""Finds the recorded tensors that hold the expert ids of every token, and the factors, one for every slot of a token, that expert
outputs (or the tokens given to them) are multiplied by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import ancestors, descendants, inside_calls, is_float, is_tensor, traced
from hexa_fx.passes.detect.rules import is_constant
from hexa_fx.passes.detect.slots import TWICE, Pairs, Slots, is_factor
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import NoRouting, Refuse
from hexa_fx.passes.ranks import ids_of_marks

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
    "marks",
]
"""How a tensor is read: (T, k), (k, T), (T, E), (E, T), (T, E, C) summed over C, (T,) for all slots, (E,) for all tokens, one (T,)
a slot, (T, k, E) with a one at the chosen expert, if any, or (T, E) with zeros but at the experts of a token, which are in slots
of their own.
"""

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RoutingSource:
    """A routing quantity: the nodes that hold it and how they are read.

    ``groups``: it holds an entry for each group of tokens that follow each other, such as a sequence, not for each token.
    ``divides``: it is a factor that the code divides by.
    """

    nodes: tuple[Node, ...]
    reading: Reading = "token_slot"
    groups: bool = False
    divides: bool = False


@dataclass(frozen=True)
class Search:
    """Where the routing of a region is looked for.

    Args:
        end: the combine: what it was computed from is looked at.
        tokens, experts: how many there are.
        prefer_earliest: of equal readings, whether the earliest is taken, not the latest: what came in between may matter on other
            inputs.
    """

    captured: CapturedBlock
    tags: Mapping[Node, Tag]
    end: Node
    tokens: int
    experts: int
    replay: Replay
    prefer_earliest: bool = False

    @cached_property
    def candidates(self) -> list[Node]:
        """Tensors that do not depend on experts, and that the end was computed from, in order.

        Another one with the same numbers will not do: top-k's values equal the gathered scores only while a correction bias is 0.
        """
        # What lies on another device was moved to the result's before it could meet the experts' outputs.
        device = record_of(self.end).value.device
        behind = ancestors([self.end]) - {self.end}
        return [n for n in self._routing_like(behind) if record_of(n).value.device == device]

    @property
    def known(self) -> list[Node]:
        """The candidates, the preferred first."""
        return self.candidates if self.prefer_earliest else self.candidates[::-1]

    @cached_property
    def inner(self) -> frozenset[Node]:
        """Values inside submodule calls, and those of one turn of a loop over what the device gave."""
        turns = descendants(node for node in self.captured.graph.nodes if operation(node) == "unbind")
        return inside_calls(self.captured) | turns

    def asked_by_host(self) -> list[Node]:
        """Tensors that the code turned into numbers before the end, as in ``experts[ids[t, k]]``, the latest first."""
        before = itertools.takewhile(lambda node: node is not self.end, self.captured.graph.nodes)
        asked = ancestors([node for node in before if record_of(node).decision and ops.gives_numbers(node)])
        return self._routing_like(asked)[::-1]

    def vectors(self) -> list[Node]:
        """Parameters and buffers that hold one number for every expert, none of them zero."""
        tags, behind, device = self.tags, ancestors([self.end]), record_of(self.end).value.device
        reads = self.captured.graph.find_nodes(op="get_attr")
        held = [n for n in reads if n in behind and tags[n].weight and not tags[n].experts]
        held = [n for n in held if record_of(n).value.shape == (self.experts,) and record_of(n).value.device == device]
        return [n for n in held if bool((record_of(n).value != 0).all())]

    def _routing_like(self, among: set[Node]) -> list[Node]:
        return [
            node
            for node in self.captured.graph.nodes
            if node in among
            and is_tensor(node)
            and not (self.tags[node].experts or self.tags[node].weight or ops.is_uninitialised(node))
            and record_of(node).value.numel()
        ]


def of_each_token(value: torch.Tensor, tokens: int, most: int) -> torch.Tensor | None:
    """A tensor with an entry of at most ``most`` numbers for each group of tokens, with that entry for each token; or None."""
    groups = value.shape[0] if value.dim() else 0
    if not 0 < groups < tokens or tokens % groups or value.numel() > groups * most:
        return None
    return value.repeat_interleave(tokens // groups, 0)


@dataclass(frozen=True)
class Table:
    """A tensor read as a factor: ``numbers`` are (T, k), or (T, E) where it says something of all experts."""

    source: RoutingSource
    numbers: torch.Tensor
    slots: Slots

    @property
    def by_expert(self) -> bool:
        return self.source.reading in ("token_expert", "expert_token", "token_expert_position", "expert")

    @property
    def of_pairs(self) -> torch.Tensor:
        """The number of every pair."""
        pairs = self.slots.pairs
        return self.numbers[pairs.token, pairs.expert if self.by_expert else self.slots.slot]

    @property
    def is_total(self) -> bool:
        """Whether (T, E) is zero where no expert was chosen, so that it holds all that an expert's output is multiplied by."""
        others = torch.ones_like(self.numbers, dtype=torch.bool)
        others[self.slots.pairs.token, self.slots.pairs.expert] = False
        return not bool(self.numbers[others].any())

    @property
    def zero_when_dropped(self) -> bool:
        column = self.slots.dropped_expert if self.by_expert else self.slots.dropped_slot
        return bool((self.numbers[self.slots.dropped_token, column] == 0).all())


def _tables(node: Node, slots: Slots) -> Iterator[Table]:
    """The ways to read a node as a factor, first as one of tokens, then as one of groups of tokens."""
    value = slots.value(node)
    if value.is_complex():
        return
    spread = of_each_token(value, slots.tokens, slots.experts)
    for groups, each in ((False, value), (True, spread)):
        for reading, numbers in () if each is None else _read_factor(each.double(), slots):
            yield Table(RoutingSource((node,), reading, groups), numbers, slots)


def _fitting(wanted: torch.Tensor, slots: Slots, nodes: Iterable[Node]) -> Iterator[Table]:
    """The readings of ``nodes`` that give every pair its number of ``wanted``."""
    return (table for node in nodes for table in _tables(node, slots) if _is_near(table.of_pairs, wanted))


def _is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found - wanted).abs() <= _TOLERANCE * wanted.abs().clamp(min=1e-3)).all())


def _read_factor(value: torch.Tensor, slots: Slots) -> Iterator[tuple[Reading, torch.Tensor]]:
    """The ways to read a tensor as a factor, each (T, k) or (T, E)."""
    t, k, e = slots.tokens, slots.top_k, slots.experts
    if value.numel() == t * k:
        if k == 1 or value.shape[-1] == k or value.dim() == 1 or value.shape[-2:] == (k, 1):
            yield "token_slot", value.reshape(t, k)
        if k > 1 and (value.shape[0] == k or value.dim() == 1):
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


def find_factor(
    wanted: torch.Tensor, slots: Slots, search: Search, covers_dropped: bool = False
) -> tuple[RoutingSource, ...]:
    """Where the factors ``wanted`` of the pairs can be read; () if they are all 1."""
    constant = bool(((wanted - 1).abs() <= 1e-9).all())
    if constant and not (slots.dropped and covers_dropped):
        return ()
    best: tuple[tuple[bool, bool, bool, bool, int], RoutingSource] | None = None
    unlike = False
    for table in _fitting(wanted, slots, filter(is_float, search.known)):
        (node,), reading = table.source.nodes, table.source.reading
        total = slots.apart and table.by_expert and reading != "expert"
        if total and not table.is_total:
            unlike = True
            continue
        total = total and is_factor(node, ancestors([search.end]))  # all that two slots of one expert come to
        row = reading == "expert" and record_of(node).value.dim() > 1  # (1, E): of each expert, or of a lone group
        inner, dropped = node in search.inner, table.zero_when_dropped
        key = (not total, not dropped, table.source.groups or row, inner, _RANK[reading])
        if best is None or key < best[0]:
            best = key, table.source
    if best is not None and not (constant and best[0][1]):
        return (best[1],)
    if constant:
        return ()
    columns = _factor_columns(wanted, slots, search.known)
    if columns is None and unlike:
        raise Refuse(TWICE, search.end)
    if columns is None:
        raise Refuse(
            "expert outputs enter their token times a number that no tensor computed before the experts holds for each token, "
            "sequence or expert; it has to be the router's weight, perhaps times one such number or a constant, not a count of "
            "tokens or something computed from the outputs",
            search.end,
        )
    return (RoutingSource(columns, "columns"),)


def factors_of_experts(slots: Slots, search: Search) -> Iterator[tuple[RoutingSource, torch.Tensor]]:
    """Numbers, one for every expert, that experts' outputs may be multiplied by beside their weights, and those of every pair."""
    for vector in search.vectors():
        yield RoutingSource((vector,), "expert"), slots.value(vector).reshape(-1)[slots.pairs.expert]


def factors_on_outputs(slots: Slots, search: Search) -> Iterator[tuple[RoutingSource, torch.Tensor]]:
    """What the code multiplies or divides experts' outputs by on their way, with its number for every pair."""
    if slots.apart:  # one run does not show how often a factor of all experts' counts
        return
    tags, behind = search.tags, ancestors([search.end]) | {search.end}
    region = [n for n in search.captured.graph.nodes if n in behind and tags[n].experts and not tags[n].weight]
    scaled = [(n, kind(n) == "div") for n in region if kind(n) in ("mul", "div")]
    factors = ((factor, divides) for node, divides in scaled for factor in node.all_input_nodes[divides:])
    moved = dict.fromkeys((source, divides) for factor, divides in factors for source in traced(factor, ops.moves))
    for source, divides in moved:
        if source not in search.candidates or not is_float(source):
            continue
        for table in _tables(source, slots):
            numbers = table.of_pairs
            yield replace(table.source, divides=divides), 1 / numbers if divides else numbers


def straight_through(slots: Slots, known: Sequence[Node], end: Node) -> tuple[RoutingSource, ...]:
    """The last factor of 1 for every pair that has a gradient all the same, as in ``mask + w - w.detach()``; () without one."""
    behind = ancestors([end]) if slots.apart else set()
    nodes = (node for node in known if is_float(node) and not is_constant(node))
    found = (
        table.source
        for table in _fitting(slots.ones, slots, nodes)
        if not table.source.groups
        and not (slots.apart and table.by_expert and not is_factor(table.source.nodes[0], behind))
    )
    # an expert may happen to have as many rows as there are experts
    return tuple(sorted(found, key=lambda source: source.reading == "expert")[:1])


def counts_of_choices(slots: Slots, search: Search) -> tuple[RoutingSource, ...]:
    """A table that says how often a token chose an expert, one or two where two choices are the same, and is a factor as it is."""
    behind = ancestors([search.end])
    for table in _fitting(slots.ones, slots, search.known):
        by_token = table.source.reading in ("token_expert", "expert_token") and not table.source.groups
        if by_token and table.is_total and is_factor(table.source.nodes[0], behind):
            return (table.source,)
    return ()


def _factor_columns(wanted: torch.Tensor, slots: Slots, known: Sequence[Node]) -> tuple[Node, ...] | None:
    """Factors in one (T,) tensor per slot, rather ones that are zero where the slot was dropped."""
    columns = []
    vectors = [node for node in known if is_float(node) and record_of(node).value.numel() == slots.tokens]
    flat = {node: slots.value(node).reshape(-1) for node in vectors}
    for slot in range(slots.top_k):
        mine = slots.slot == slot
        dropped = slots.dropped_token[slots.dropped_slot == slot]
        fitting = [node for node in vectors if _is_near(flat[node][slots.pairs.token[mine]], wanted[mine])]
        if not fitting:
            return None
        columns.append(min(fitting, key=lambda node: bool(flat[node][dropped].any())))
    return tuple(columns)


def covered(sources: Iterable[RoutingSource], slots: Slots) -> bool:
    """Whether one of the factors is zero wherever a slot was dropped."""
    return not slots.dropped or any(_read(s, slots).zero_when_dropped for s in sources if not s.divides)


def _read(source: RoutingSource, slots: Slots) -> Table:
    if source.reading == "columns":
        return Table(source, torch.stack([slots.value(node).reshape(-1) for node in source.nodes], 1), slots)
    return next(table for table in _tables(source.nodes[0], slots) if table.source == source)


def find_mask(slots: Slots, search: Search) -> RoutingSource:
    """A 0/1 tensor that says which slots are kept."""
    for table in _fitting(slots.ones, slots, sorted(search.known, key=search.inner.__contains__)):
        if table.zero_when_dropped:
            return table.source
    raise Refuse(
        "some of the router's choices do not reach the result, and no tensor says which; where tokens are dropped on purpose, "
        "multiply the weights by a mask of those that are kept; where experts write to the same rows, add up what they give",
        search.end,
    )


_NO_IDS = "no tensor holds the expert ids of every token"


def find_repeated(pairs: Pairs, search: Search) -> tuple[RoutingSource, torch.Tensor] | None:
    """The first node with an id for every row, if an expert is given a token several times; None if none is."""
    tokens, experts = search.tokens, search.experts
    wanted = torch.bincount(pairs.token * experts + pairs.expert, minlength=tokens * experts).reshape(tokens, experts)
    if int(wanted.max()) <= 1:
        return None
    for node in sorted(search.known, key=search.inner.__contains__):
        for reading, ids in read_ids(record_of(node).value, tokens, experts):
            if torch.equal(_counts(ids, experts), wanted):
                return RoutingSource((node,), reading), ids
    return None


def find_index(
    pairs: Pairs, search: Search, asked: Sequence[Node] | None = None, marks: bool = False
) -> tuple[RoutingSource, torch.Tensor]:
    """The node with the ids of every token, and the ids as (T, k).

    Args:
        asked: where to look in place of the candidates.
        marks: whether it may be a table with zeros for the experts that a token is not given.
    """
    tokens, experts, end = search.tokens, search.experts, search.end
    known, in_order = (search.known, search.candidates) if asked is None else (asked, asked)
    flat = pairs.token * experts + pairs.expert
    if len(flat.unique()) != len(flat):
        raise Refuse("a token reaches the same expert twice in one pass, so its routing cannot be read off", end)
    wanted = torch.zeros(tokens, experts, dtype=torch.bool, device=pairs.token.device)
    wanted[pairs.token, pairs.expert] = True
    for groups in (False, True):
        fitting = [
            (reading == "one_hot", ids.shape[1], extra, node in search.inner, node, reading, ids)
            for node in known
            for reading, ids in _id_readings(record_of(node).value, tokens, experts, groups, marks)
            if (extra := _extra_ids(ids, wanted)) is not None
        ]
        if fitting:
            *_, node, reading, ids = min(fitting, key=lambda each: each[:4])  # the first of equals
            return RoutingSource((node,), reading, groups), ids
    if experts > 1 and bool(wanted.all()):
        raise Refuse("every token is given to every expert with a weight of its own: a dense (soft) mixture", end)
    return _index_from_columns(wanted, tokens, experts, in_order, end)


def _id_readings(
    value: torch.Tensor, tokens: int, experts: int, groups: bool, marks: bool
) -> Iterator[tuple[Reading, torch.Tensor]]:
    """Ids of every token, or of every group of tokens that follow each other."""
    spread = of_each_token(value, tokens, experts * experts) if groups else value
    if spread is not None:
        yield from read_ids(spread, tokens, experts)
        if marks and spread.dim() >= 2 and spread.shape[-1] == experts and spread.numel() == tokens * experts:
            yield "marks", ids_of_marks(spread.reshape(tokens, experts), experts)


def ids_of(source: RoutingSource, tokens: int, experts: int) -> torch.Tensor:
    """The recorded ids (T, k) of a source."""
    values = [record_of(node).value for node in source.nodes]
    if source.reading == "columns":
        return torch.stack([value.reshape(-1) for value in values], 1)
    return dict(_id_readings(values[0], tokens, experts, source.groups, True))[source.reading]


def read_ids(value: torch.Tensor, tokens: int, experts: int) -> Iterator[tuple[Reading, torch.Tensor]]:
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
    """Ids from (T, k, E) marks, of which at most one is set for every slot; E where none is."""
    if marks.shape[1] > marks.shape[2] or not bool(((marks == 0) | (marks == 1)).all()):
        return
    chosen = marks.sum(-1)
    if bool((chosen <= 1).all()):
        yield "one_hot", torch.where(chosen == 1, marks.int().argmax(-1), marks.shape[2])


def _extra_ids(ids: torch.Tensor, wanted: torch.Tensor) -> int | None:
    """How many ids no expert output belongs to; None unless every wanted pair is among the ids, each once."""
    counts = _counts(ids, wanted.shape[1])
    if bool((counts[wanted] != 1).any()) or bool((counts > 1).any()):
        return None
    return int((counts > 0).sum() - wanted.sum())


def _counts(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """How often every token (T, k) chose every expert, (T, E)."""
    counts = torch.zeros(len(ids), experts + 1, dtype=torch.long, device=ids.device)
    valid = (ids >= 0) & (ids < experts)
    counts.scatter_add_(1, torch.where(valid, ids, experts).long(), torch.ones_like(ids, dtype=torch.long))
    return counts[:, :experts]


def _index_from_columns(
    wanted: torch.Tensor, tokens: int, experts: int, known: Sequence[Node], end: Node
) -> tuple[RoutingSource, torch.Tensor]:
    """Ids that the code keeps in one (T,) tensor per slot."""
    remaining = wanted.clone()
    columns: list[Node] = []
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
        columns.append(node)
        remaining.scatter_(1, ids[:, None].long(), False)
        if not bool(remaining.any()):
            source = RoutingSource(tuple(columns), "columns")
            return source, ids_of(source, tokens, experts)
    raise NoRouting(_why_not(wanted), end)


def _why_not(wanted: torch.Tensor) -> str:
    """By which tokens (T, E) experts are given, whether experts choose, or how many experts tokens are given."""
    of_token, of_expert = wanted.sum(1), wanted.sum(0)
    least, most = int(of_token.min()), int(of_token.max())
    if least != most and int(of_expert.min()) == int(of_expert.max()):
        return (
            f"{_NO_IDS}: every expert takes {int(of_expert[0])} of them, and some tokens are taken more often than others (experts "
            "choose their tokens); it is rewritten if tokens choose, as many experts each"
        )
    given = "1 expert" if least == most == 1 else f"{least} experts" if least == most else f"{least} to {most} experts"
    return (
        f"{_NO_IDS}, or of every sequence of tokens that follow each other; each is given {given} here, perhaps by a "
        "comparison, which may give others more; it is rewritten where ids (T, k) say which, as topk gives them"
    )
