"""Finds the token behind every row of the expert products: the tensor that the rows are taken from, and which one is whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.passes.detect.graph import ancestors, descendants, inside_calls, is_float, is_tensor
from hexa_fx.passes.detect.projections import Contraction, feature_size, in_batches
from hexa_fx.passes.detect.row_order import row_orders
from hexa_fx.passes.detect.stacks import Stack, WeightTable
from hexa_fx.passes.detect.tags import ALL, Tag
from hexa_fx.passes.detect.verdict import Refuse


class RowMatch(NamedTuple):
    """token (R,), expert (R,) and scale (R,) of the rows of a product."""

    token: torch.Tensor
    expert: torch.Tensor
    scale: torch.Tensor

    def laid_out(self, order: torch.Tensor | None) -> RowMatch:
        """In another order, with padding where it has none of the rows (-1)."""
        if order is None:
            return self
        token, expert, scale = (_laid_out(values, order) for values in self)
        return RowMatch(torch.where(order < 0, -1, token), expert, scale)


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

    def match(self, product: torch.Tensor, experts: torch.Tensor | None = None) -> RowMatch | None:
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
        return RowMatch(token, flat // self._tokens, scale)

    def _nearest(self, wanted: torch.Tensor, table: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Index of the most similar unit vector, among those of a row's expert; in blocks, so that similarities stay small."""
        if experts is None:
            blocks = wanted.split(max(1, _SIMILARITIES // max(1, len(table))))
            return torch.cat([(block @ table.T).argmax(1) for block in blocks] or [wanted.new_zeros(0).long()])
        step, table = (
            max(1, _SIMILARITIES // table[: self._tokens].numel()),
            table.reshape(self._experts, self._tokens, -1),
        )
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

DIFFERENT_WAYS = "experts use their weights in different ways"

_moves_rows = ops.of(
    "view reshape flatten unflatten squeeze unsqueeze contiguous clone to type_as float double half bfloat16 getitem index_select "
    "gather masked_select take_along_dim"
)
"""Operations that move rows or cast them: the earlier of the two tensors is as good."""


@dataclass(frozen=True)
class Instance:
    """One run of one expert (or of all of them at once): its first products, how their weights are read, and its second.

    ``token``, ``expert`` and ``scale`` say for every row of the second product which token it is, -1 for padding, whose expert's
    it is, and the factor the token was multiplied by before the first product. ``order`` is that of `row_orders`.
    """

    first: tuple[Contraction, ...]
    readings: tuple[Stack, ...]
    second: Contraction
    token: torch.Tensor
    expert: torch.Tensor
    scale: torch.Tensor
    order: Mapping[Node, torch.Tensor] = field(default_factory=dict)

    def laid_out(self, node: Node, rows: torch.Tensor) -> torch.Tensor:
        """The rows of one of its products, or of what the second is given, in the order of the second product's."""
        return rows if node not in self.order else _laid_out(rows, self.order[node])


def _laid_out(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """In another order, which is of none of them (-1) where it has padding, or there are none."""
    return rows[order.clamp(min=0)] if len(rows) else rows.new_zeros(len(order), *rows.shape[1:])


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several tensors below each other."""
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]


def match_rows(
    pairs: list[tuple[tuple[Contraction, ...], Contraction]],
    captured: CapturedBlock,
    tags: Mapping[Node, Tag],
    replay: Replay,
    weights: WeightTable,
) -> Iterator[tuple[Node, list[Instance]]]:
    """Every node whose rows may be the tokens, likeliest first, and every instance's rows.

    Raises:
        Refuse: there is none.
    """
    found = False
    orders = row_orders(pairs, replay)
    leader = max(pairs, key=lambda pair: replay.value(pair[0][0].data).numel())[0][0]
    for source in token_sources(leader.node, feature_size(leader.data), captured, tags):
        if record_of(source).value.itemsize == 1:  # numbers in 8 bits are cast before they are multiplied
            continue
        tokens = replay.value(source).reshape(-1, feature_size(leader.data))
        reader = _Reader(tokens, replay, weights)
        if reader.read(leader) is None:
            continue
        instances = _read_instances(pairs, orders, reader)
        if instances is None:
            continue
        if not any(bool((instance.token >= 0).any()) for instance in instances):
            raise Refuse("on the example every row that the experts are given is zero", leader.node)
        found = True
        yield _last_alike(source, leader, instances, replay), instances
    if not found:
        stored = weights.stored(leader.base)
        wide = stored is not None and stored[1].dim() > 3
        raise Refuse(_WIDE.format(leader.base) if wide else NOT_TOKENS, leader.data)


def _last_alike(source: Node, leader: Contraction, instances: list[Instance], replay: Replay) -> Node:
    """The last node that holds the same rows as ``source`` and that the experts' rows are in fact taken from.

    ``x * mask`` equals ``x`` while the mask is all ones, and a dropout that is off changes nothing: only the later one is right.
    A copy of what is written to is another tensor too.
    """
    between = descendants([source]) & ancestors([leader.data])
    alike, found = {source}, source
    written = {record_of(node).storage for node in source.graph.nodes if node.op != "output" and record_of(node).writes}
    for node in (node for node in source.graph.nodes if node in between and is_float(node)):
        if not any(operand in alike for operand in node.all_input_nodes):
            continue
        if torch.equal(replay.value(node).flatten(), replay.value(source).flatten()):
            alike.add(node)
            copied = record_of(found).storage in written and record_of(node).storage != record_of(found).storage
            if (copied or not _moves_rows(node)) and _carries(node, leader, instances, replay):
                found = node
    return found


def _carries(node: Node, leader: Contraction, instances: list[Instance], replay: Replay) -> bool:
    """Whether all experts read ``node``, and their rows become its rows when it is replaced and the routing is held."""
    if any(node not in ancestors([instance.first[0].data]) for instance in instances):
        return False
    instance = next(instance for instance in instances if leader in instance.first)
    width = feature_size(leader.data)
    recorded = replay.value(node)
    noise = torch.randn(recorded.shape, generator=torch.Generator().manual_seed(19), dtype=torch.float64, device="cpu")
    replace = {n: replay.value(n) for n in descendants([node]) if is_tensor(n) and not is_float(n)}
    rows = replay.run(replace | {node: noise.to(recorded.device)}, [leader.data])[leader.data].reshape(-1, width)
    if len(rows) != record_of(leader.node).value.numel() // feature_size(leader.node):
        return False
    rows, token = instance.laid_out(leader.node, rows), instance.token
    expected = noise.to(recorded.device).reshape(-1, width)[token.clamp(min=0)]
    along = (rows * expected).sum(1, keepdim=True) / (expected * expected).sum(1, keepdim=True)
    close = (rows - along * expected).abs() <= 1e-9 * (1 + along.abs())
    return bool((close & (along != 0) | (token < 0)[:, None]).all())


class _Reader:
    """Reads first-level products as rows of one token tensor. Keeps a matcher for each reading of a weight."""

    def __init__(self, tokens: torch.Tensor, replay: Replay, weights: WeightTable) -> None:
        self._tokens, self._replay, self._weights = tokens, replay, weights
        self._matchers: dict[tuple[str, str, str], tuple[Stack, RowMatcher]] = {}

    def read(self, contraction: Contraction) -> tuple[Stack, RowMatch] | None:
        found = self._read_together([contraction])
        return None if found is None else found[0]

    def read_each(self, contractions: Sequence[Contraction]) -> list[tuple[Stack, RowMatch]] | None:
        """The readings of products; None if one is not explained. Those that read one weight alike are looked up together."""
        found: list[tuple[Stack, RowMatch]] = []
        kinds = {(c.base, c.expert == ALL, *_feature_sizes(c)) for c in contractions}
        for batch in in_batches(contractions) if len(kinds) == 1 else ():
            together = self._read_together(batch)
            if together is None:
                break
            found += together
        if len(found) == len(contractions):
            return found
        each = [self.read(contraction) for contraction in contractions]
        return None if None in each else [one for one in each if one is not None]

    def _read_together(self, contractions: Sequence[Contraction]) -> list[tuple[Stack, RowMatch]] | None:
        """As one product of all their rows."""
        first = contractions[0]
        products = [self._replay.linear_part(c.node, c.data)[0].reshape(-1, feature_size(c.node)) for c in contractions]
        sizes = [len(product) for product in products]
        experts = None
        if first.expert != ALL:
            numbers = torch.tensor([c.expert for c in contractions], device="cpu")
            experts = numbers.repeat_interleave(torch.tensor(sizes, device="cpu")).to(products[0].device)
        for stack, matcher in self._candidates(first):
            match = matcher.match(joined(products), experts)
            if match is not None:
                return [(stack, RowMatch(*parts)) for parts in zip(*(values.split(sizes) for values in match))]
        return None

    def _candidates(self, contraction: Contraction) -> Iterator[tuple[Stack, RowMatcher]]:
        for stack in self._weights.matrices(contraction.base, *_feature_sizes(contraction)):
            if stack.matrices.shape[2] != self._tokens.shape[1]:  # it reads something narrower or wider than a token
                continue
            key = (stack.base, stack.layout, stack.part)
            if key not in self._matchers:
                self._matchers[key] = stack, RowMatcher(self._tokens, stack.matrices)
            yield self._matchers[key]


def _read_instances(
    pairs: list[tuple[tuple[Contraction, ...], Contraction]],
    orders: Sequence[Mapping[Node, torch.Tensor]],
    reader: _Reader,
) -> list[Instance] | None:
    odd = next((second for first, second in pairs if len(first) != len(pairs[0][0])), None)
    if odd is not None:
        raise Refuse(DIFFERENT_WAYS, odd.node)
    columns = list(zip(*(first for first, _ in pairs)))
    read = []
    for column in columns:
        if (found := reader.read_each(column)) is not None:
            rows = zip(column, found, orders)
            read.append([(stack, match.laid_out(order.get(c.node))) for c, (stack, match), order in rows])
    if len(read) < len(columns) or not all(_same_rows(read[0], column) for column in read[1:]):
        return None
    instances = []
    for (first, second), row, order in zip(pairs, zip(*read), orders):
        token, expert, scale = row[0][1]
        readings = tuple(stack for stack, _ in row)
        instances.append(Instance(first, readings, second, token, expert, scale, order))
    _check_alike(instances)
    return instances


def _same_rows(one: list[tuple[Stack, RowMatch]], two: list[tuple[Stack, RowMatch]]) -> bool:
    """Whether two first products of every instance are of the same tokens, by the same experts, with the same factors."""
    first, second = (RowMatch(*map(joined, zip(*(match for _, match in column)))) for column in (one, two))
    same = torch.equal(first.token, second.token) and torch.equal(first.expert, second.expert)
    return same and torch.allclose(first.scale, second.scale, rtol=1e-6)


def _check_alike(instances: list[Instance]) -> None:
    expected = [(s.base, s.layout, s.part) for s in instances[0].readings]
    for instance in instances[1:]:
        if [(s.base, s.layout, s.part) for s in instance.readings] != expected:
            raise Refuse(DIFFERENT_WAYS, instance.second.node)


def _feature_sizes(contraction: Contraction) -> tuple[int, int]:
    """(out, in) features of a product."""
    return feature_size(contraction.node), feature_size(contraction.data)


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
