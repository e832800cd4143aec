"""Finds, by experiment, which rows of an expert's first products the rows of its second are computed from, if they lie differently.

Code may turn (T, E, I) into (E, T, I) between the products, sort their rows, or keep some of them. Rows of the first product are
one of two values, by the bits of their numbers, so that a row of the second tells by its changes which one it follows from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.capture.replay import CannotReplay, Replay
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors, descendants, einsum_of, is_tensor
from hexa_fx.passes.detect.projections import Contraction, feature_size

Pair = tuple[tuple[Contraction, ...], Contraction]
"""First products of an expert, and its second."""

_NEAR = 1e-9

_turns = ops.of(
    "transpose t permute movedim rearrange getattr roll flip index_select gather take take_along_dim embedding masked_select"
)


def segment_of(first: Iterable[Contraction], second: Contraction) -> list[Node]:
    """Nodes between first products and the second, in order."""
    between = _between(first, second)
    return [node for node in second.node.graph.nodes if node in between]


def _between(first: Iterable[Contraction], second: Contraction) -> set[Node]:
    start = {contraction.node for contraction in first}
    return (descendants(start) & ancestors([second.data])) - start


def row_orders(pairs: Sequence[Pair], replay: Replay) -> list[dict[Node, torch.Tensor]]:
    """For every pair, by node, the rows (R,) that those of the second product come from; -1 where that does not show.

    The nodes are the first products and what the second is given. One whose rows lie as the second product's is left out, and so
    are all where code between the products fails on other numbers, or chooses by them how many rows it keeps.
    """
    try:
        return _orders(pairs, replay)
    except CannotReplay:
        return [{} for _ in pairs]


def _orders(pairs: Sequence[Pair], replay: Replay) -> list[dict[Node, torch.Tensor]]:
    found: list[dict[Node, torch.Tensor]] = [{} for _ in pairs]
    if len({len(first) for first, _ in pairs}) != 1:
        return found
    given, ends = [second.data for _, second in pairs], [second.node for _, second in pairs]
    moved = any(_may_reorder(node) for first, second in pairs for node in _between(first, second))
    alike: list[torch.Tensor | None] = [None] * len(pairs)
    turned = _origins(given, ends, {}, replay) if any(map(_may_reorder, ends)) else alike
    _note(found, given, turned)
    firsts = list(zip(*([contraction.node for contraction in first] for first, _ in pairs)))
    for starts in firsts:
        origins = alike
        if moved:
            others = (node for column in firsts if column is not starts for node in column)
            fixed = {node: _row(node, replay).expand_as(_rows(replay.value(node), node)) for node in others}
            origins = _origins(starts, given, fixed, replay)
        _note(found, starts, map(_before, origins, turned))
    return found


def _note(
    found: Iterable[dict[Node, torch.Tensor]], nodes: Iterable[Node], origins: Iterable[torch.Tensor | None]
) -> None:
    for order, node, origin in zip(found, nodes, origins):
        if origin is not None:
            order[node] = origin


def _before(origin: torch.Tensor | None, turned: torch.Tensor | None) -> torch.Tensor | None:
    """The order of rows that are laid out by ``origin``, and then by ``turned``."""
    if origin is None or turned is None:
        return turned if origin is None else origin
    return torch.where(turned < 0, -1, origin[turned.clamp(min=0)])


def _may_reorder(node: Node) -> bool:
    if operation(node) == "getitem":
        return any(map(is_tensor, node.all_input_nodes[1:]))
    if operation(node) != "einsum":
        return _turns(node)
    read = einsum_of(node)
    if read is None:
        return True
    terms, _, result = read
    return any([c for c in term if c in result] != [c for c in result if c in term] for term in terms)


def _origins(
    starts: Sequence[Node], ends: Sequence[Node], fixed: Mapping[Node, torch.Tensor], replay: Replay
) -> list[torch.Tensor | None]:
    """For every start and its end, the row (R,) that each row of the end follows from; None if it is the same one, or several."""
    given = [_rows(replay.value(start), start) for start in starts]
    two = [(_row(start, replay), _row(start, replay, 1)) for start in starts]

    def changed(bit: int, wanted: bool) -> list[torch.Tensor]:
        replace = {**fixed}
        for start, rows, (one, other) in zip(starts, given, two):
            numbers = torch.arange(len(rows), device=rows.device)
            replace[start] = torch.where((((numbers >> bit) & 1) == wanted)[:, None], other, one)
        return [(now - then).abs().amax(1) > _NEAR * then.abs().amax(1) for now, then in zip(run(replace), before)]

    def run(replace: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
        shaped = {node: rows.reshape(record_of(node).value.shape) for node, rows in replace.items()}
        answers = replay.run(shaped, ends)
        odd = next((end for end in ends if answers[end].shape != record_of(end).value.shape), None)
        if odd is not None:
            raise CannotReplay(odd)
        return [_rows(answers[end], end) for end in ends]

    before = run({**fixed, **{start: one.expand_as(rows) for start, rows, (one, _) in zip(starts, given, two)}})
    origins = [torch.zeros(len(rows), dtype=torch.long, device=rows.device) for rows in before]
    follows, single = ([torch.ones_like(o, dtype=torch.bool) for o in origins] for _ in range(2))
    for bit in range(max(1, max(map(len, given)) - 1).bit_length()):
        for number, (with_bit, without) in enumerate(zip(changed(bit, True), changed(bit, False))):
            origins[number] += with_bit.long() << bit
            follows[number] &= with_bit | without
            single[number] &= ~(with_bit & without)
    return [
        _if_other(torch.where(f, origin, -1), len(rows)) if bool(s.all()) else None
        for origin, f, s, rows in zip(origins, follows, single, given)
    ]


def _if_other(origin: torch.Tensor, rows: int) -> torch.Tensor | None:
    """The order, unless each row may follow from the one in its own place."""
    places = torch.arange(len(origin), device=origin.device)
    if len(origin) == rows and bool(((origin == places) | (origin < 0)).all()):
        return None
    return origin


def _rows(value: torch.Tensor, node: Node) -> torch.Tensor:
    return value.reshape(-1, feature_size(node))


def _row(node: Node, replay: Replay, number: int = 0) -> torch.Tensor:
    """One of two rows (N,) of positive numbers, so that an activation keeps them apart."""
    generator = torch.Generator().manual_seed(23 + number)
    row = torch.rand(feature_size(node), generator=generator, dtype=torch.float64, device="cpu") + 0.5 + number
    return row.to(replay.value(node).device)
