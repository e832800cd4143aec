"""Finds the token behind every row of the expert products: the tensor that the rows are taken from, and which one is whose.

Rows of the first products may lie in another order than those of the second: code may turn (T, E, I) into (E, T, I) in between,
sort them, or keep some. By experiment: rows of the first product are one of two values, by the bits of their numbers, so that a
row of the second tells by its changes which one it follows from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.replay import CannotReplay, Replay
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors, descendants, einsum_of, inside_calls, is_float, is_tensor
from hexa_fx.passes.detect.projections import Contraction, Instance, feature_size
from hexa_fx.passes.detect.slots import Pairs
from hexa_fx.passes.detect.stacks import Stack, WeightTable
from hexa_fx.passes.detect.tags import ALL, Tag
from hexa_fx.passes.detect.verdict import Refuse


class RowMatcher:
    """Finds the token and expert that rows of a first projection were computed from: ``row = s * x[t] @ W[e]``.

    All tokens and experts are projected on a few random directions once. Looking a row up by its direction also gives the factor
    s, if any. Loops, sorts, one-hot einsums and gathered weights all look alike here.
    """

    _DIRECTIONS = 8
    _TOLERANCE = 1e-6

    def __init__(self, tokens: torch.Tensor, matrices: torch.Tensor) -> None:
        """tokens (T, K); matrices (E, N, K), the experts' weights."""
        generator = torch.Generator().manual_seed(7)
        probe = torch.randn(matrices.shape[1], self._DIRECTIONS, generator=generator, dtype=torch.float64, device="cpu")
        self._probe = probe.to(matrices.device)
        directions = torch.bmm(matrices.transpose(1, 2), self._probe.expand(len(matrices), -1, -1))
        table = torch.einsum("tk,ekd->etd", tokens, directions)
        self._experts, self._tokens = table.shape[:2]
        self._table = table.reshape(-1, self._DIRECTIONS)
        self._norms = self._table.norm(dim=1)

    def match(self, product: torch.Tensor, experts: torch.Tensor | None = None) -> Rows | None:
        """Looks up product (R, N); None when a row is not explained. Zero rows are token -1.

        ``experts`` (R,): whose row it is, where that is known.
        """
        wanted = product @ self._probe
        norms, known = wanted.norm(dim=1), self._norms.clamp(min=1e-300)
        largest = known.max() if experts is None else known.reshape(self._experts, -1).amax(1)[experts]
        zero = norms <= 1e-12 * largest
        flat = self._nearest(wanted / norms[:, None].clamp(min=1e-300), self._table / known[:, None], experts)
        scale = norms / known[flat]
        error = (wanted - scale[:, None] * self._table[flat]).norm(dim=1)
        if not bool(((error <= self._TOLERANCE * norms) | zero).all()):  # so that NaN is no match
            return None
        scale = torch.where((scale - 1).abs() < self._TOLERANCE, torch.ones_like(scale), scale)
        token = torch.where(zero, -1, flat % self._tokens)
        return Rows(token, flat // self._tokens, scale)

    def _nearest(self, wanted: torch.Tensor, table: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Index of the most similar unit vector, among those of a row's expert; in blocks, so that similarities stay small."""
        if experts is None:
            blocks = wanted.split(max(1, _SIMILARITIES // max(1, len(table))))
            return torch.cat([(block @ table.T).argmax(1) for block in blocks] or [wanted.new_zeros(0).long()])
        step = max(1, _SIMILARITIES // table[: self._tokens].numel())
        table = table.reshape(self._experts, self._tokens, -1)
        found = [
            torch.bmm(table[numbers], block[:, :, None])[:, :, 0].argmax(1) + numbers * self._tokens
            for block, numbers in zip(wanted.split(step), experts.split(step))
        ]
        return torch.cat(found or [experts])


_SIMILARITIES = 4_000_000


NOT_TOKENS = (
    "what the experts read are not rows of one tensor that has a row for every token, times at most one number a row"
)
_WIDE = (
    "an expert's part of {} has more than two dimensions; matrices (out, in) or (in, out), in which gate and up may lie side by "
    "side, can be rewritten"
)

_NEAR = 1e-9

_turns = ops.of(
    "transpose t permute movedim rearrange getattr roll flip index_select gather take take_along_dim embedding masked_select"
)

_moves_rows = ops.of(
    "view reshape flatten unflatten squeeze unsqueeze contiguous clone to type_as float double half bfloat16 getitem index_select "
    "gather masked_select take_along_dim"
)
"""Operations that move rows or cast them: the earlier of the two tensors is as good."""


@dataclass(frozen=True)
class Rows:
    """The rows (R,) of the second products of all runs of experts, one run after the other.

    Args:
        token: which token a row is of, -1 for padding. expert: whose it is.
        scale: what the token was multiplied by before the first product.
        readings: how the weights of the first products are read.
        order: see `row_orders`.
    """

    token: torch.Tensor
    expert: torch.Tensor
    scale: torch.Tensor
    readings: tuple[Stack, ...] = ()
    order: Mapping[Node, torch.Tensor] = field(default_factory=dict)

    @property
    def real(self) -> torch.Tensor:
        """Mask of the rows that are a token's."""
        return self.token >= 0

    def pairs(self, after: torch.Tensor) -> Pairs:
        """Of the rows that are a token's. ``after``: the factor (R,) on each behind the first product."""
        return Pairs(*(values[self.real] for values in (self.token, self.expert, self.scale, after)))

    def of(self, nodes: Sequence[Node], values: Iterable[torch.Tensor]) -> torch.Tensor:
        """What the runs have in ``nodes``, one each, as rows (R, N)."""
        rows = (value.reshape(-1, feature_size(node)) for node, value in zip(nodes, values))
        return torch.cat([laid_out(each, self.order.get(node)) for node, each in zip(nodes, rows)])


def laid_out(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """``rows`` in an ``order`` of `row_orders`, and zeros where it has none of them."""
    if order is None:
        return rows
    if not len(rows):  # of an expert without any
        return rows.new_zeros(len(order), *rows.shape[1:])
    return rows[order.clamp(min=0)].masked_fill((order < 0)[:, None], 0.0)


def match_rows(instances: Sequence[Instance], replay: Replay, weights: WeightTable) -> Iterator[tuple[Node, Rows]]:
    """Every node whose rows may be the tokens, likeliest first, and whose rows are whose."""
    usual = [*map(_kind, instances[0].products)]
    for run in instances:
        if [*map(_kind, run.products)] != usual:
            raise Refuse("experts use their weights in different ways", run.second.node)
    found = False
    order = row_orders(instances, replay)
    leader = max(instances, key=lambda instance: replay.value(instance.first[0].data).numel()).first[0]
    for source in token_sources(leader.node, feature_size(leader.data), weights.captured, weights.tags):
        if record_of(source).value.itemsize == 1:  # numbers in 8 bits are cast before they are multiplied
            continue
        tokens = replay.value(source).reshape(-1, feature_size(leader.data))
        reader = _Reader(tokens, order, replay, weights)
        rows = None if reader.read([leader]) is None else _read_rows(instances, reader)
        if rows is None:
            continue
        if not bool(rows.real.any()):
            raise Refuse("on the example every row that the experts are given is zero", leader.node)
        found = True
        yield _last_alike(source, instances, rows, replay), rows
    if not found:
        stored = weights.stored(leader.base)
        wide = stored is not None and stored[1].dim() > 3
        raise Refuse(_WIDE.format(leader.base) if wide else NOT_TOKENS, leader.data)


def _kind(contraction: Contraction) -> tuple[object, ...]:
    """What runs have to have alike: which weights they read in the same place."""
    return contraction.base, contraction.bias is None, *_feature_sizes(contraction)


def _feature_sizes(contraction: Contraction) -> tuple[int, int]:
    """(out, in) features of a product."""
    return feature_size(contraction.node), feature_size(contraction.data)


def _last_alike(source: Node, instances: Sequence[Instance], rows: Rows, replay: Replay) -> Node:
    """The last node that holds the same rows as ``source`` and that the experts' rows are in fact taken from.

    ``x * mask`` equals ``x`` while the mask is all ones, and a dropout that is off changes nothing: only the later one is right.
    A copy of what is written to is another tensor too.
    """
    between = descendants([source]).intersection(*(ancestors([instance.first[0].data]) for instance in instances))
    alike, found = {source}, source
    written = {record_of(node).storage for node in source.graph.nodes if node.op != "output" and record_of(node).writes}
    for node in (node for node in source.graph.nodes if node in between and is_float(node)):
        if not any(operand in alike for operand in node.all_input_nodes):
            continue
        if torch.equal(replay.value(node).flatten(), replay.value(source).flatten()):
            alike.add(node)
            copied = record_of(found).storage in written and record_of(node).storage != record_of(found).storage
            if (copied or not _moves_rows(node)) and _carries(node, instances, rows, replay):
                found = node
    return found


def _carries(node: Node, instances: Sequence[Instance], rows: Rows, replay: Replay) -> bool:
    """Whether the experts' rows become those of ``node`` when it is replaced and the routing is held."""
    given, recorded = [instance.first[0] for instance in instances], replay.value(node)
    noise = torch.randn(recorded.shape, generator=torch.Generator().manual_seed(19), dtype=torch.float64, device="cpu")
    held = {n: replay.value(n) for n in descendants([node]) if is_tensor(n) and not is_float(n)}
    values = replay.run(held | {node: noise.to(recorded.device)}, [c.data for c in given])
    parts = [values[c.data].reshape(-1, feature_size(c.data)) for c in given]
    if [len(part) for part in parts] != [record_of(c.node).value.numel() // feature_size(c.node) for c in given]:
        return False
    found = torch.cat([laid_out(part, rows.order.get(c.node)) for c, part in zip(given, parts)])
    expected = noise.to(recorded.device).reshape(-1, found.shape[1])[rows.token.clamp(min=0)]
    along = (found * expected).sum(1, keepdim=True) / (expected * expected).sum(1, keepdim=True)
    close = (found - along * expected).abs() <= 1e-9 * (1 + along.abs())
    return bool((close & (along != 0) | ~rows.real[:, None]).all())


class _Reader:
    """Reads first-level products as rows of one token tensor. Keeps a matcher for each reading of a weight."""

    def __init__(
        self, tokens: torch.Tensor, order: Mapping[Node, torch.Tensor], replay: Replay, weights: WeightTable
    ) -> None:
        self._tokens, self.order, self._replay, self._weights = tokens, order, replay, weights
        self._matchers: dict[tuple[str, str, str], tuple[Stack, RowMatcher]] = {}

    def read(self, column: Sequence[Contraction]) -> tuple[Stack, Rows] | None:
        """How products with like weights are read, and whose rows are whose; None if one is not explained."""
        first, parts = column[0], []
        for c in column:
            product, _ = self._replay.linear_part(c.node, c.data)
            parts.append(laid_out(product.reshape(-1, feature_size(c.node)), self.order.get(c.node)))
        numbers = [part.new_full(part.shape[:1], c.expert, dtype=torch.long) for part, c in zip(parts, column)]
        known = all(c.expert != ALL for c in column)
        for stack, matcher in self._candidates(first):
            match = matcher.match(torch.cat(parts), torch.cat(numbers) if known else None)
            if match is not None:
                return stack, match
        return None

    def _candidates(self, contraction: Contraction) -> Iterator[tuple[Stack, RowMatcher]]:
        for stack in self._weights.matrices(contraction.base, *_feature_sizes(contraction)):
            if stack.matrices.shape[2] != self._tokens.shape[1]:  # it reads something narrower or wider than a token
                continue
            key = (stack.base, stack.layout, stack.part)
            if key not in self._matchers:
                self._matchers[key] = stack, RowMatcher(self._tokens, stack.matrices)
            yield self._matchers[key]


def _read_rows(instances: Sequence[Instance], reader: _Reader) -> Rows | None:
    """The rows of all runs, if their first products are all of the same tokens, by the same experts, with the same factors."""
    columns = zip(*(instance.first for instance in instances))
    read = [found for column in columns if (found := reader.read(column)) is not None]
    if len(read) < len(instances[0].first):
        return None
    (_, rows), *others = read
    for _, other in others:
        same = torch.equal(rows.token, other.token) and torch.equal(rows.expert, other.expert)
        if not same or not torch.allclose(rows.scale, other.scale, rtol=1e-6):
            return None
    return replace(rows, readings=tuple(stack for stack, _ in read), order=reader.order)


def token_sources(first: Node, width: int, captured: CapturedBlock, tags: Mapping[Node, Tag]) -> Iterator[Node]:
    """Untagged float tensors of ``width`` whose numbers may lead to the node ``first``, each distinct value once.

    Earliest first, but values inside submodule calls last: using one would compute it a second time.
    """
    inner, behind = inside_calls(captured), ancestors([first], stop=lambda n: is_tensor(n) and not is_float(n))
    before = [node for node in captured.graph.nodes if node in behind and not ops.is_uninitialised(node)]
    seen: set[tuple[int, bytes]] = set()
    for node in sorted(before, key=lambda node: node in inner):
        if not is_float(node) or tags[node].experts or tags[node].weight:
            continue
        value = record_of(node).value
        if value.dim() < 2 or value.shape[-1] != width or value.numel() == 0:
            continue
        flat = value.reshape(-1, width)
        key = (len(flat), flat.double().sum(1).cpu().numpy().tobytes())
        if key not in seen:
            seen.add(key)
            yield node


# -- the order of rows ------------------------------------------------------------------------------------------------


def row_orders(instances: Sequence[Instance], replay: Replay) -> dict[Node, torch.Tensor]:
    """By node, the rows (R,) that those of the second product come from; -1 where that does not show.

    The nodes are the first products and what the second is given. One whose rows lie as the second product's is left out, and so
    are all where code between the products fails on other numbers, or chooses by them how many rows it keeps.
    """
    try:
        return _orders(instances, replay)
    except CannotReplay:
        return {}


def _orders(instances: Sequence[Instance], replay: Replay) -> dict[Node, torch.Tensor]:
    given, ends = [run.second.data for run in instances], [run.second.node for run in instances]
    moved = any(_may_reorder(node) for run in instances for node in run.between)
    turned = _origins(given, ends, {}, replay) if any(map(_may_reorder, ends)) else {}
    found = dict(turned)
    columns = list(zip(*([contraction.node for contraction in run.first] for run in instances)))
    for starts in columns:
        others = [node for column in columns if column is not starts for node in column] if moved else []
        fixed = {node: _row(node, replay).expand_as(_rows(replay.value(node), node)) for node in others}
        origins = _origins(starts, given, fixed, replay) if moved else {}
        for start, data in zip(starts, given):
            if (order := _before(origins.get(start), turned.get(data))) is not None:
                found[start] = order
    return found


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
) -> dict[Node, torch.Tensor]:
    """By start, the row (R,) that each row of its end follows from; without those where it is the same one, or several."""
    given = [_rows(replay.value(start), start) for start in starts]
    two = [(_row(start, replay), _row(start, replay, 1)) for start in starts]

    def changed(bit: int, wanted: bool) -> list[torch.Tensor]:
        numbered = {**fixed}
        for start, rows, (one, other) in zip(starts, given, two):
            numbers = torch.arange(len(rows), device=rows.device)
            numbered[start] = torch.where((((numbers >> bit) & 1) == wanted)[:, None], other, one)
        return [(now - then).abs().amax(1) > _NEAR * then.abs().amax(1) for now, then in zip(run(numbered), before)]

    def run(given: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
        shaped = {node: rows.reshape(record_of(node).value.shape) for node, rows in given.items()}
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
    found = {}
    for start, rows, origin, follow, one in zip(starts, given, origins, follows, single):
        order = torch.where(follow, origin, -1)
        places = torch.arange(len(order), device=order.device)
        in_place = len(order) == len(rows) and bool(((order < 0) | (order == places)).all())
        if bool(one.all()) and not in_place:
            found[start] = order
    return found


def _rows(value: torch.Tensor, node: Node) -> torch.Tensor:
    return value.reshape(-1, feature_size(node))


def _row(node: Node, replay: Replay, number: int = 0) -> torch.Tensor:
    """One of two rows (N,) of positive numbers, so that an activation keeps them apart."""
    generator = torch.Generator().manual_seed(23 + number)
    row = torch.rand(feature_size(node), generator=generator, dtype=torch.float64, device="cpu") + 0.5 + number
    return row.to(replay.value(node).device)
