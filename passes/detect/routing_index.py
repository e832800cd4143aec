"""Finds the recorded tensor, or tensors, that hold the expert ids of every token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors
from hexa_fx.passes.detect.routing_factors import Reading, RoutingSource, of_each_token
from hexa_fx.passes.detect.slots import Pairs
from hexa_fx.passes.detect.verdict import NoRouting, Refuse

_NO_IDS = "no tensor holds the expert ids of every token"
_STRAIGHT = (
    "gumbel_softmax weighs what all experts give for every token, and its gradient reaches experts that were not chosen too, so "
    "that all have to run; it is rewritten if experts get the rows of tokens that chose them, x[ids == e] with ids of argmax"
)


def find_repeated(
    pairs: Pairs, tokens: int, experts: int, known: Sequence[torch.fx.Node]
) -> tuple[RoutingSource, torch.Tensor] | None:
    """The first node with an id for every row, if an expert is given a token several times; None if none is."""
    wanted = torch.bincount(pairs.token * experts + pairs.expert, minlength=tokens * experts).reshape(tokens, experts)
    if int(wanted.max()) <= 1:
        return None
    for node in known:
        for reading, ids in read_ids(record_of(node).value, tokens, experts):
            if torch.equal(_counts(ids, experts), wanted):
                return RoutingSource((node,), reading), ids
    return None


def find_index(
    pairs: Pairs,
    tokens: int,
    experts: int,
    known: Sequence[torch.fx.Node],
    in_order: Sequence[torch.fx.Node],
    inner: frozenset[torch.fx.Node],
    end: torch.fx.Node,
    dense: bool = False,
) -> tuple[RoutingSource, torch.Tensor]:
    """The node with the ids of every token, and the ids as (T, k).

    ``dense``: whether all experts run on every token, of which the pairs are those that count.
    """
    flat = pairs.token * experts + pairs.expert
    if len(flat.unique()) != len(flat):
        raise Refuse("a token reaches the same expert twice in one pass, so its routing cannot be read off", end)
    wanted = torch.zeros(tokens, experts, dtype=torch.bool, device=pairs.token.device)
    wanted[pairs.token, pairs.expert] = True
    best: tuple[tuple[bool, int, int, bool, int], RoutingSource, torch.Tensor] | None = None
    for groups in (False, True):
        for place, node in enumerate(known):
            for reading, ids in _readings(record_of(node).value, tokens, experts, groups):
                extra = _extra_ids(ids, wanted)
                if extra is None:
                    continue
                key = (reading == "one_hot", ids.shape[1], extra, node in inner, place)
                if best is None or key < best[0]:
                    best = key, RoutingSource((node,), reading, groups), ids
        if best is not None:
            return best[1], best[2]
    if experts > 1 and bool(wanted.all()):
        raise Refuse("every token is given to every expert with a weight of its own: a dense (soft) mixture", end)
    try:
        return _index_from_columns(wanted, tokens, experts, in_order, end)
    except NoRouting:
        if dense and any(operation(node) == "gumbel_softmax" for node in ancestors([end])):
            raise NoRouting(_STRAIGHT, end) from None
        raise


def _readings(value: torch.Tensor, tokens: int, experts: int, groups: bool) -> Iterator[tuple[Reading, torch.Tensor]]:
    """Ids of every token, or of every group of tokens that follow each other."""
    spread = of_each_token(value, tokens, experts * experts) if groups else value
    return iter(()) if spread is None else read_ids(spread, tokens, experts)


def ids_of(source: RoutingSource, tokens: int, experts: int) -> torch.Tensor:
    """The recorded ids (T, k) of a source."""
    values = [record_of(node).value for node in source.nodes]
    if source.reading == "columns":
        return torch.stack([value.reshape(-1) for value in values], 1)
    return dict(_readings(values[0], tokens, experts, source.groups))[source.reading]


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
    wanted: torch.Tensor, tokens: int, experts: int, known: Sequence[torch.fx.Node], end: torch.fx.Node
) -> tuple[RoutingSource, torch.Tensor]:
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
            return RoutingSource(nodes, "columns"), torch.stack([ids for _, ids in columns], 1)
    raise NoRouting(_why_not(wanted), next((node for node in end.graph.nodes if _decides(node, wanted)), end))


def _decides(node: torch.fx.Node, wanted: torch.Tensor) -> bool:
    """Whether it gives tokens to experts (T, E): a comparison, or the tokens that each expert takes."""
    value = record_of(node).value if "hexa" in node.meta else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    for each in (value, value.t()):
        if value.dtype == torch.bool and each.shape == wanted.shape and torch.equal(each, wanted):
            return True
        fits = value.dtype == torch.int64 and each.shape[1] == wanted.shape[1] and value.numel() == int(wanted.sum())
        if fits and 0 <= int(value.min()) <= int(value.max()) < len(wanted):
            return torch.equal(torch.zeros_like(wanted).scatter_(0, each, True), wanted)
    return False


def _why_not(wanted: torch.Tensor) -> str:
    """By which tokens (T, E) experts are given, whether tokens choose, experts do, or neither as many each time."""
    shared = wanted.all(0).nonzero().flatten().tolist()
    if shared and len(shared) < len(wanted[0]):
        return (
            f"the expert at place {shared[0]} (counted from 0) is given every token, with a weight of its own or more done to it; "
            "a shared expert beside the list of those that tokens choose can stay, and the others are rewritten"
        )
    of_token, of_expert = wanted.sum(1), wanted.sum(0)
    if int(of_token.min()) == int(of_token.max()):
        return (
            f"{_NO_IDS}; only a fixed number of ids a token is rewritten, not experts that choose their tokens, nor a number of "
            "experts that differs from token to token"
        )
    if int(of_expert.min()) == int(of_expert.max()):
        return (
            f"{_NO_IDS}: every expert takes {int(of_expert[0])} of them, and some tokens are taken more often than others (experts "
            "choose their tokens); it is rewritten if tokens choose, as many experts each"
        )
    return (
        f"{_NO_IDS}: tokens are given to {int(of_token.min())} to {int(of_token.max())} experts; it is rewritten if topk chooses "
        "as many for every token, with weights of zero for those that do not count"
    )
