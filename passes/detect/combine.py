"""Finds, by linear probing, how expert outputs become token outputs, and explains what the result holds besides them.

The second products are replaced by zeros and by unit rows. The combine is the first later node that all of them pass through and
that answers with one coefficient per row, on the row's own token. Scatter, index_add, masks, einsum, sort and unsort are all the
same linear map.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx
import torch.nn.functional as F
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import functional, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.passes.detect.decisions import decision_left
from hexa_fx.passes.detect.graph import ancestors, descendants, draws, effects, is_float, is_tensor, live_nodes
from hexa_fx.passes.detect.projections import Instance, feature_size
from hexa_fx.passes.detect.rows import Rows
from hexa_fx.passes.detect.rules import refuse_randomness
from hexa_fx.passes.detect.slots import Pairs
from hexa_fx.passes.detect.stacks import WeightTable
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.passes.ranks import rank_among_equals

_TOLERANCE = 1e-6
_ROUNDING = 1e-5
"""Of the largest number in a row: products in float32 come to some 5e-7."""

_FACTORS = (1.0, -1.0, 64.0)
"""Of the random rows: a branch on the outputs' sign or size, which keeps one sum, does not keep all."""

_keeps_numbers = ops.of("view reshape flatten unflatten contiguous to type_as float half bfloat16 double clone after")

APART = (
    "expert outputs do not come together in one sum with a row for every token: they stay apart, are used beside it, or are summed "
    "up several times (for the gate of each task, perhaps)"
)

_PADDED = (
    "the code adds rows to the tokens (up to a multiple, perhaps), which are alike, so that it cannot be seen where each "
    "of them goes; an example with as many tokens as need none can be followed"
)
_LAID_OUT = (
    "the experts' rows are computed from others that have been laid out for them, several for a token, so that a token has no row "
    "of its own; what is computed of all tokens before that can stay"
)
NO_SUM = (
    "the expert outputs do not enter the result as a weighted sum for each token; they are overwritten, compared, normalised, or "
    "mixed between tokens"
)


@dataclass(frozen=True)
class Combine:
    """Where expert outputs become token outputs, and with which weights.

    Args:
        node: the recorded token output, (T, D) up to its leading shape.
        coefficients: the weight (R,) with which every row enters its token.
        offset: (T, D) what the node holds when every second product is zero (a later bias, or more).
    """

    node: Node
    coefficients: torch.Tensor
    offset: torch.Tensor


def find_combine(
    graph: torch.fx.Graph, instances: Sequence[Instance], rows: Rows, tokens: int, replay: Replay, opaque: set[Node]
) -> Combine:
    """The first node that is a weighted sum of the expert outputs for each token."""
    seconds = [instance.second.node for instance in instances]
    width = feature_size(seconds[0])
    if sum(record_of(node).value.numel() for node in seconds) != len(rows.token) * width:
        raise Refuse(
            "an expert's second product does not give a row for every row of its first: it adds up what several experts give, "
            "or mixes tokens",
            seconds[0],
        )
    candidates = _gates(graph, instances, tokens * width, width)
    if not candidates:
        raise Refuse(APART, seconds[0])
    probes = _Probes(seconds, rows, width, replay)
    outputs = probes.run(candidates)
    later = None
    for node in candidates:
        answers = [output[node].reshape(tokens, width) for output in outputs]
        coefficients = probes.coefficients(answers)
        later = decision_left([node], opaque) if coefficients is not None else later
        if coefficients is not None and later is None:
            return Combine(_last_alike(node, candidates), coefficients, answers[0])
    refuse_randomness(descendants(seconds) & ancestors(candidates))
    if later is not None:
        raise Refuse(
            "what the code does after the sum of the experts, or beside it, hinges on a host decision (if, while, item()) on data",
            later,
        )
    given = (record_of(n).value for n in graph.nodes if n.op == "placeholder" and is_float(n))
    count = max((value.numel() // value.shape[-1] for value in given if value.dim() > 1), default=tokens)
    more = tokens / max(count, 1)  # rows that experts are given for one that the block is given
    if more > 1 and count:
        raise Refuse(_LAID_OUT if more == int(more) else _PADDED, candidates[0])
    raise Refuse(NO_SUM, probes.mixing(candidates[0]) or candidates[0])


def _last_alike(node: Node, candidates: Sequence[Node]) -> Node:
    """The last of the casts and views that directly follow the combine and belong to it.

    A view to leading sizes that no input has could not be restored for other sizes, so it is left outside. So is what comes after
    random numbers: experts draw theirs where the combine is.
    """
    known = {record_of(n).value.shape[:-1] for n in node.graph.nodes if n.op == "placeholder" and is_float(n)}
    last, alike = node, {node}
    after = itertools.dropwhile(lambda n: n is not node, node.graph.nodes)
    undrawn = set(itertools.takewhile(lambda n: not draws(n), after))
    for candidate in candidates[candidates.index(node) + 1 :]:
        read = {operand for operand in candidate.all_input_nodes if is_float(operand)}
        if candidate.target is functional.after:  # the whole buffer, read again after a write through a view of it
            read = set(candidate.all_input_nodes[1:])
        if not _keeps_numbers(candidate) or not read <= alike or candidate not in undrawn:
            break
        alike.add(candidate)
        shape = record_of(candidate).value.shape
        if len(shape) == 2 or shape[:-1] in known:
            last = candidate
    return last


def _gates(graph: torch.fx.Graph, instances: Sequence[Instance], numel: int, width: int) -> list[Node]:
    """Nodes of the tokens' size that every path from an expert's inside to the output goes through, in order."""
    inside = [contraction.node for instance in instances for contraction in instance.products]
    live = live_nodes(graph)
    seconds = {instance.second.node for instance in instances}
    if not seconds & live:
        raise Refuse("no result of the block depends on the expert outputs", instances[0].second.node)
    gates = [n for n in _dominators(graph, descendants(inside) & live, inside) if n.op != "output" and is_float(n)]
    shapes = {n: record_of(n).value.shape for n in gates if n not in seconds or len(seconds) == 1}
    return [n for n, shape in shapes.items() if shape.numel() == numel and shape[-1] == width]


def _dominators(graph: torch.fx.Graph, region: set[Node], inside: Sequence[Node]) -> list[Node]:
    """Nodes of ``region`` that no path from ``inside`` to the output avoids.

    In graph order, a node is such a gate exactly if no edge from an earlier node of the region jumps over it.
    A write into the block's state ends a path, so nothing after it is a gate.
    """
    order = [node for node in graph.nodes if node in region]
    position = {node: index for index, node in enumerate(order)}
    sinks = effects(graph)
    furthest, gates = -1, []
    last_inside = max(position[node] for node in inside if node in position)
    for index, node in enumerate(order):
        if furthest <= index and index >= last_inside:
            gates.append(node)
        if node in sinks:
            break
        furthest = max([furthest, *(position[user] for user in node.users if user in position)])
    return gates


class _Probes:
    """Zeros, one-hot rows (each row of a token on its own feature), and random runs that check linearity."""

    def __init__(self, seconds: Sequence[Node], rows: Rows, width: int, replay: Replay) -> None:
        self._seconds, self._tokens, self._real, self._replay = seconds, rows.token, rows.real, replay
        number = rank_among_equals(self._tokens)
        rounds = int(number[self._real].max()) // width + 1 if bool(self._real.any()) else 1
        self._chosen, self._feature = [self._real & (number // width == r) for r in range(rounds)], number % width
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(len(self._tokens), width, generator=generator, dtype=torch.float64, device="cpu")
        # Padding rows that give exactly zero may enter any token with any weight.
        silent = ~self._real & (rows.of(seconds, map(replay.value, seconds)) == 0).all(1)
        self._random = noise.to(self._tokens.device) * ~silent[:, None]

    def run(self, wanted: Sequence[Node]) -> list[dict[Node, torch.Tensor]]:
        zeros, width = torch.zeros_like(self._random), self._random.shape[1]
        one_hot = F.one_hot(self._feature, width).double()
        settings = [zeros, *(one_hot * chosen[:, None] for chosen in self._chosen)]
        settings += [factor * self._random for factor in _FACTORS]
        shapes = [record_of(node).value.shape for node in self._seconds]
        parts = (rows.split([shape.numel() // width for shape in shapes]) for rows in settings)
        given = ({n: p.reshape(shape) for n, p, shape in zip(self._seconds, each, shapes)} for each in parts)
        return [self._replay.run(values, wanted) for values in given]

    def mixing(self, end: Node) -> Node | None:
        """The first node from the largest of the products to ``end`` of which a row depends on other rows of the product."""
        second = max(self._seconds, key=lambda node: record_of(node).value.numel())
        behind, value = ancestors([end]) & descendants([second]), self._replay.value(second)
        if value.dim() < 2:  # a row alone
            return None
        floats = [node for node in second.graph.nodes if node in behind and is_float(node)]
        nodes = [node for node in floats if record_of(node).value.shape == value.shape]
        other = value.clone()
        other[..., :1, :] += 1.0
        before, after = (self._replay.run({second: rows}, nodes) for rows in (value, other))
        apart = (n for n in nodes if n is not end and not torch.equal(before[n][..., 1:, :], after[n][..., 1:, :]))
        return next(apart, None)

    def coefficients(self, outputs: list[torch.Tensor]) -> torch.Tensor | None:
        """One coefficient a row, or None if the outputs are no token-wise weighted sum of the rows."""
        zero, one_hot, random = outputs[0], outputs[1 : -len(_FACTORS)], outputs[-len(_FACTORS) :]
        real = self._real
        found = torch.zeros(len(self._tokens), dtype=torch.float64, device=zero.device)
        for chosen, output in zip(self._chosen, one_hot):
            difference, places = output - zero, (self._tokens[chosen], self._feature[chosen])
            found[chosen] = difference[places]
            difference[places] = 0
            if not bool((difference.abs() <= _TOLERANCE).all()):
                return None
        summed = torch.zeros_like(zero).index_add_(0, self._tokens[real], found[real, None] * self._random[real])
        if all(_is_near(output, zero + factor * summed) for factor, output in zip(_FACTORS, random)):
            return found
        return None


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    scale = expected.abs().amax().clamp(min=1.0) if expected.numel() else 1.0
    return bool(((found - expected).abs() <= _TOLERANCE * scale).all())


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether rows (..., D) are the same up to rounding in 32 bits, each by its own scale, since small ones may be all there is."""
    scale = torch.maximum(found.abs(), expected.abs()).amax(-1, keepdim=True)
    return bool(((found - expected).abs() <= _ROUNDING * scale).all())


def explain_offset(
    pairs: Pairs, down_bias: str | None, combine: Combine, source: Node, weights: WeightTable, replay: Replay
) -> tuple[torch.Tensor | None, Node | None]:
    """What the combine holds without the products and their weighted biases: the factor (T,) with which identity
    ("zero-computation") experts add the token, and the tensor that the code adds the outputs onto, each if there is one.
    """
    offset = combine.offset
    expected = torch.zeros_like(offset)
    if down_bias is not None and bool((offset != 0).any()):
        vectors = weights.vectors(down_bias)
        if vectors is None:
            raise Refuse("an expert parameter after the second projection is not a bias vector", combine.node)
        expected.index_add_(0, pairs.token, pairs.after[:, None] * vectors[pairs.expert])
    if _is_same(offset, expected):
        return None, None
    base = _holding(offset - expected, combine.node, weights.tags, replay)
    if base is not None:
        return None, base
    x = replay.value(source).reshape(-1, record_of(source).value.shape[-1])
    if x.shape == offset.shape:
        factor = (offset * x).sum(1) / (x * x).sum(1).clamp(min=1e-300)
        if _is_same(offset, factor[:, None] * x):
            return factor, None
    raise Refuse(
        "the tensor that collects the expert outputs holds something besides them (neither the experts' biases, nor the "
        "token itself, nor a tensor that the code had before)",
        combine.node,
    )


def check_base(base: Node, weights: Iterable[Node], instances: Iterable[Instance], end: Node, replay: Replay) -> bool:
    """Whether ``base`` is added with the sum of a token's weights, and not as it is.

    An expert that returns ``x + f(x)`` adds the token once if the weights of a token sum to one, as they do on most examples.
    Other weights, here half of the example's, show that it is weighted.

    Args:
        weights: nodes that hold routing weights. instances: whose products are left out.
    """
    halved = {node: 0.5 * replay.value(node) for node in weights}
    none = {c: torch.zeros_like(replay.value(c)) for c in (instance.second.node for instance in instances)}
    before, after = (replay.run({**none, **weight}, [end])[end] for weight in ({}, halved))
    held = replay.value(base).reshape(before.shape)
    # A late bias of the experts is weighted too, if the weights are not normalised again on their way.
    expected = held + 0.5 * (before - held)
    if any(_is_same(after, value) for value in (before, expected)):
        return False
    if not _is_same(after, 0.5 * before):
        raise Refuse("tokens reach the output past the experts with a weight that is not the router's", end)
    return True


def _holding(wanted: torch.Tensor, end: Node, tags: Mapping[Node, Tag], replay: Replay) -> Node | None:
    """The last tensor before ``end`` with these numbers that does not depend on an expert, rather one before the routing.

    An expert that is given all tokens, as happens on small examples, holds them in its rows. A mask that is no choice, as of
    numbers that are not finite, moves no rows.
    """
    behind = ancestors([end]) - {end}
    nodes: list[Node] = list(reversed(end.graph.nodes))
    seen = descendants(node for node in nodes if node.op == "placeholder" and is_float(node))
    numbers = {node for node in seen if node.op != "output" and is_tensor(node) and not is_float(node)}
    moved = (node for node in seen if not numbers.isdisjoint(node.all_input_nodes) and not ops.works_on_each(node))
    routed = descendants([*moved, *filter(ops.chooses, seen)])
    free = [n for n in nodes if n in behind and is_float(n) and not tags[n].experts and not tags[n].weight]
    for node in sorted(free, key=routed.__contains__):
        shape = record_of(node).value.shape
        fits = shape.numel() == wanted.numel() and shape[-1] == wanted.shape[-1]
        if fits and _is_same(replay.value(node).reshape(wanted.shape), wanted):
            return node
    return None
