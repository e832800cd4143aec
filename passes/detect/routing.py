"""Finds the recorded tensors that hold the routing: the experts of every token, and their weights (`routing_factors`).

They are found by value among everything computed before the experts ran, and read as (T, k) however they are laid out. Among
tensors that happen to hold the same numbers, the least surprising reading is preferred; verification decides afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.passes.detect.graph import UNINITIALISED, ancestors, inside_calls, is_tensor, operation
from hexa_fx.passes.detect.routing_factors import (
    Pairs,
    Reading,
    Slots,
    Source,
    covered,
    find_factor,
    find_mask,
    straight_through,
)
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import NoRouting, Refuse


@dataclass(frozen=True)
class Routing:
    """Where a block keeps its routing.

    Args:
        top_k: experts per token.
        index: where the expert ids are.
        before, after: where the factors are; empty when they are all 1. The factors of ``after`` are multiplied.
        keep: zero (false) where a slot is given to no expert at all, which is more than a factor of zero if numbers are not finite.
    """

    top_k: int
    index: Source
    before: tuple[Source, ...]
    after: tuple[Source, ...]
    keep: tuple[Source, ...] = ()

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """All nodes that hold a part of the routing."""
        return [node for source in (self.index, *self.before, *self.after, *self.keep) for node in source.nodes]


def find_routing(
    pairs: Pairs,
    tokens: int,
    experts: int,
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    end: torch.fx.Node,
    replay: Replay,
    prefer_earliest: bool = False,
) -> Routing:
    """Of equal readings the latest is taken, or the earliest: what came in between may matter on other inputs.

    Raises:
        Refuse: the ids or a factor are not among the tensors computed before ``end``.
    """
    known = _candidates(captured, tags, end)
    inner = inside_calls(captured)
    active = pairs.taken(pairs.effective)
    flat = active.token * experts + active.expert
    if len(flat.unique()) != len(flat):
        raise Refuse("a token reaches the same expert twice in one pass, so its routing cannot be read off", end)
    in_order, known = known, known if prefer_earliest else known[::-1]
    index, ids = _find_index(active, tokens, experts, known, in_order, inner, end)
    slots = Slots(ids, active, tokens, experts, replay.value)
    before = find_factor(active.before, slots, known, inner, end, covers_dropped=False)
    if prefer_earliest and not before:
        before = straight_through(slots, in_order[::-1])
    after = _find_after(
        active, slots, known, inner, end, not covered(before, slots), _vectors(captured, tags, experts, end)
    )
    absent = slots.without_rows(pairs)
    keep = () if covered((*before, *after), absent) else (find_mask(absent, known, inner, end),)
    if not covered((*before, *after, *keep), slots):
        after = (*after, find_mask(slots, known, inner, end))
    return Routing(ids.shape[1], index, before, after, keep)


def _find_after(
    active: Pairs,
    slots: Slots,
    known: Sequence[torch.fx.Node],
    inner: frozenset[torch.fx.Node],
    end: torch.fx.Node,
    covers_dropped: bool,
    vectors: Sequence[torch.fx.Node],
) -> tuple[Source, ...]:
    """The factors of the outputs: one tensor's, or also one number for every expert, of ``vectors``."""
    try:
        return find_factor(active.after, slots, known, inner, end, covers_dropped)
    except Refuse as refusal:
        for vector in vectors:
            numbers = slots.value(vector).reshape(-1)[active.expert]
            try:
                found = find_factor(active.after / numbers, slots, known, inner, end, covers_dropped)
            except Refuse:
                continue
            return (*found, Source((vector,), "expert"))
        raise refusal from None


def _vectors(
    captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag], experts: int, end: torch.fx.Node
) -> list[torch.fx.Node]:
    """Parameters and buffers that hold one number for every expert, none of them zero."""
    behind = ancestors([end])
    held = [
        n for n in captured.graph.nodes if n.op == "get_attr" and n in behind and tags[n].weight and not tags[n].experts
    ]
    return [n for n in held if record_of(n).value.shape == (experts,) and bool((record_of(n).value != 0).all())]


def find_row_factor(
    wanted: torch.Tensor,
    pairs: Pairs,
    routing: Routing,
    tokens: int,
    experts: int,
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    end: torch.fx.Node,
    replay: Replay,
) -> tuple[Source, ...]:
    """Where a factor for every pair (P,), which the experts compute with, can be read; () if it is always 1.

    Raises:
        Refuse: it is not among the tensors computed before ``end``.
    """
    effective = pairs.effective
    values = [record_of(node).value for node in routing.index.nodes]
    if routing.index.reading == "columns":
        ids = torch.stack([value.reshape(-1) for value in values], 1)
    else:
        ids = dict(_read_ids(values[0], tokens, experts))[routing.index.reading]
    slots = Slots(ids, pairs.taken(effective), tokens, experts, replay.value)
    known = _candidates(captured, tags, end)[::-1]
    return find_factor(wanted[effective], slots, known, inside_calls(captured), end, covers_dropped=False)


def check_identity(
    factor: torch.Tensor, routing: Routing, tokens: int, experts: int, end: torch.fx.Node, replay: Replay
) -> None:
    """Identity experts must add the token with the routing weights of the ids at and above ``experts``.

    Raises:
        Refuse: they add it with another factor.
    """
    if routing.index.reading != "token_slot" or [s.reading for s in routing.after] != ["token_slot"] or routing.before:
        raise Refuse("tokens reach the output past the experts, and the routing does not say with which weight", end)
    ids = record_of(routing.index.nodes[0]).value.reshape(tokens, routing.top_k)
    weight = replay.value(routing.after[0].nodes[0]).reshape(tokens, routing.top_k).double()
    if not torch.allclose((weight * (ids >= experts)).sum(1), factor, rtol=1e-5, atol=1e-6):
        raise Refuse("tokens reach the output past the experts with a weight that is not the router's", end)


def _candidates(captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag], end: torch.fx.Node) -> list[torch.fx.Node]:
    """Tensors that do not depend on experts, and that the combine was computed from.

    Another one with the same numbers will not do: top-k's values equal the gathered scores only while a correction bias is 0.
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
    """Ids from (T, k, E) marks, of which at most one is set for every slot; E where none is."""
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
    """Ids that the code keeps in one (T,) tensor per slot."""
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
    raise NoRouting(
        "no tensor holds the expert ids of every token; only a fixed number of ids a token is rewritten, not experts that choose "
        "their tokens, nor a number of experts that differs from token to token",
        end,
    )
