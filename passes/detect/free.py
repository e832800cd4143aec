"""Detects experts of any form if the code runs them one at a time.

The runs are aligned by structure, cut where the rest is a weighted sum for each token, and read as steps over rows.

A block with dropouts inside its experts is recorded with these idle, so that experiments see what is computed. The rewritten block
draws what the original would, expert after expert, each for its rows in the original's order.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.functional import row_dropout
from hexa_fx.capture.records import reached
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.combine import find_combine
from hexa_fx.passes.detect.graph import ancestors, descendants, draws, is_float
from hexa_fx.passes.detect.match import Family, MoEMatch
from hexa_fx.passes.detect.projections import Contraction, Instance
from hexa_fx.passes.detect.routing import find_row_factor
from hexa_fx.passes.detect.rows import NOT_TOKENS, Rows, token_sources
from hexa_fx.passes.detect.rules import opaque_nodes, refuse_randomness, stored_outside_calls
from hexa_fx.passes.detect.steps import (
    ONE_RAN,
    AlikeRuns,
    Column,
    Copy,
    FreeBody,
    OfExpert,
    Product,
    Role,
    StepReader,
    TokenRows,
    experts_of,
    find_alike_runs,
    in_one_expert,
    lone_run,
    width_of,
)
from hexa_fx.passes.detect.tags import ALL, ExpertGroups, expert_groups, tag
from hexa_fx.passes.detect.verdict import Refuse, experiments, first_match

INSIDE = (
    "dropout is active inside the experts, and its random numbers depend on the order experts run in; it is rewritten where code "
    "runs them one after the other, each once and on its own tokens in their order; with probability 0 the block is "
    "rewritten in this mode too"
)


_LEVELS = 6
"""How far before the runs their tokens are looked for."""


class NotFree(Exception):
    """The block does not run experts one at a time, or not all alike, so the refusal of the standard form stands."""


def detect_free(family: Family) -> MoEMatch:
    """The region with experts of any form.

    Raises:
        NotFree: the code is of another kind.
        Refuse: it is of this kind, but something in it forbids the rewrite, or only one expert runs.
    """
    for members in _families(family.groups, family.members):
        part = replace(family, members=members)
        runs = find_alike_runs(family.captured, part.tags)
        if runs is not None:
            return _FreeSearch(part, runs).match()
    if (lone := lone_run(family.captured, family.tags)) is not None:
        raise Refuse(ONE_RAN, lone)
    raise NotFree


def _families(groups: ExpertGroups, family: frozenset[str] | None) -> Iterator[frozenset[str] | None]:
    """All lists of parameters together, then those of each list of modules on its own."""
    prefixes = dict.fromkeys(base.partition("{}")[0] for base in groups.members)
    if family is None:
        yield None
    for prefix in prefixes:
        members = frozenset(base for base in groups.members if base.partition("{}")[0] == prefix)
        if members & family if family is not None else len(prefixes) > 1:
            yield members


@dataclass
class _FreeSearch:
    family: Family
    runs: AlikeRuns

    def __post_init__(self) -> None:
        self.captured, self.tags, self.replay = self.family.captured, self.family.tags, self.family.replay
        self.weights = self.family.weights

    def match(self) -> MoEMatch:
        """The match at the earliest end from which on the code is linear in the expert outputs.

        Ends of matrices come first; where there are others only, the refusal of the standard form says more.
        """
        self.stored = stored_outside_calls(self.captured, self.runs.readers)
        try:
            return first_match(partial(self._match_at, end) for end in self.runs.ends)
        except Refuse:
            if record_of(self.runs.ends[0][0]).value.dim() > 2:
                raise NotFree from None
            raise

    @experiments()
    def _match_at(self, end: Column) -> MoEMatch:
        captured, experts = self.captured, experts_of(end, self.tags)
        lead = record_of(end[0]).value.dim() - 1
        inside = [[n for n in ancestors([last]) if in_one_expert(n, self.tags)] for last in end]
        everything = [node for nodes in inside for node in nodes]
        refuse_randomness(everything)
        sizes = [record_of(node).value.shape[:-1].numel() for node in end]
        tokens, token = self._tokens(end, sizes)
        numbers = [token.new_full((size,), expert) for size, expert in zip(sizes, experts)]
        rows = Rows(token, torch.cat(numbers), torch.ones_like(token).double())
        count = record_of(tokens).value.shape[:-1].numel()
        opaque = opaque_nodes(captured, everything)
        instances = [_instance(*run) for run in zip(end, inside, experts)]
        combine = find_combine(captured.graph, instances, rows, count, self.replay, opaque | self.family.passed)
        for node in descendants(end) & ancestors([combine.node]) - set(end):
            if node.target is row_dropout:  # between the end of the runs and where outputs are combined
                raise Refuse(INSIDE, node)
            if ops.checks_finite(node) or kind(node) == "nan_to_num":  # on the example, all is finite
                raise Refuse(f"{operation(node)} is applied to what experts give, and would be lost", node)
        pairs, total = rows.pairs(combine.coefficients), self._experts()
        routed = self.family.routed(pairs, combine, tokens, instances, total)
        reader = StepReader(
            weights=self.weights,
            replay=self.replay,
            sizes=tuple(sizes),
            experts=experts,
            token=token,
            count=count,
            lead=lead,
            sources=tuple(self._sources(end, tokens)),
            factor=lambda wanted: find_row_factor(wanted, pairs, routed.routing, routed.search),
        )
        roles = reader.read(end)
        refuse_mixing(reader)
        body = self._body(roles, reader, end[reader.run], total)
        if body.dropouts and not bool(pairs.effective.all()):
            raise Refuse(INSIDE, body.dropouts[0])  # experts drop numbers in rows that are not theirs too
        idiom = "loop over experts, unusual expert"
        return self.family.matched(tokens, routed, body, everything, instances, self.stored, idiom)

    def _experts(self) -> int:
        """Number of experts in the parameters that the runs read."""
        counts = {}
        for operand in (operand for node in self.runs.readers for operand in node.all_input_nodes):
            for base in self.tags[operand].bases if self.tags[operand].experts else ():
                stored = self.weights.table(base)
                counts[base] = 0 if stored is None else len(stored[1])
        usual = statistics.mode(counts.values())
        if odd := sorted(base for base, count in counts.items() if count != usual):
            raise Refuse(
                "the experts' weights are made of parameters that do not all have a part for each expert "
                f"({', '.join(odd)} does not); a weight has to be one parameter, or a part of one",
                self.runs.readers[0],
            )
        return usual

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _tokens(self, end: Column, sizes: Sequence[int]) -> tuple[Node, torch.Tensor]:
        """What holds the tokens, and which of them each row is: operands of the runs, or what these are computed from."""
        seen, left = {end}, deque([(end, 0)])
        while left:
            column, outside = left.popleft()
            inside = all(in_one_expert(n, self.tags) for n in column)
            found = None if inside else self._as_tokens(column, sizes, record_of(end[0]).value.dim())
            if found is not None:
                return found
            for operands in _operands(column) if outside < _LEVELS else ():
                if operands not in seen and not any(self.tags[n].weight for n in operands):
                    seen.add(operands)
                    left.append((operands, outside + (not inside)))
        raise Refuse(NOT_TOKENS, end[0])

    def _as_tokens(self, column: Column, sizes: Sequence[int], dims: int) -> tuple[Node, torch.Tensor] | None:
        if not all(is_float(n) and record_of(n).value.dim() == dims for n in column):
            return None
        values = [self.replay.value(n).flatten(0, -2) for n in column]
        if [len(value) for value in values] != [*sizes] or len({value.shape[1] for value in values}) != 1:
            return None
        for source in token_sources(self.runs.readers[0], values[0].shape[1], self.captured, self.tags):
            found = _places_among(self.replay.value(source).flatten(0, -2), torch.cat(values))
            if found is not None:
                return source, found
        return None

    def _sources(self, end: Column, tokens: Node) -> Iterator[Node]:
        """Tensors that may have a row for every token, the tokens themselves first."""
        yield tokens
        for node in itertools.takewhile(lambda n: n not in end, self.captured.graph.nodes):
            of_tokens = is_float(node) and not self.tags[node].experts and not self.tags[node].weight
            if of_tokens and record_of(node).value.dim() >= 2 and record_of(node).value.numel():
                yield node

    # -- body ----------------------------------------------------------------------------------------------------------

    def _body(self, roles: Mapping[Node, Role], reader: StepReader, output: Node, experts: int) -> FreeBody:
        products = [role for role in roles.values() if isinstance(role, Product)]
        tokens = [node for node, role in roles.items() if isinstance(role, TokenRows)]
        if not tokens:
            raise Refuse(NOT_TOKENS, output)
        bases = [role.base for role in roles.values() if isinstance(role, (Product, OfExpert))]
        stored = self.weights.table(bases[0])
        assert stored is not None
        inner = [width_of(role.data) for role in products if role.data not in tokens] or [width_of(output)]
        body = FreeBody(
            roles, output, experts, width_of(tokens[0]), max(inner), stored[0], reader.columns, lead=reader.lead
        )
        drawn = [reader.columns[node] for node in body.dropouts]
        return replace(body, slots_first=draws_slots_first(drawn, reader.experts, reader.token.split(reader.sizes)))


def _operands(column: Column) -> list[Column]:
    """Columns of what a column's nodes are computed from; none if the nodes are not alike."""
    operands = [node.all_input_nodes for node in column]
    if len({len(nodes) for nodes in operands}) != 1:
        return []
    return list(zip(*operands))


def _places_among(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """For every row (R, D) its index among tokens (T, D), or None if one is not among them."""
    generator = torch.Generator().manual_seed(3)
    probe = torch.randn(tokens.shape[1], 4, generator=generator, dtype=torch.float64, device="cpu").to(tokens.device)
    if not len(rows):
        return torch.zeros(0, dtype=torch.long, device=rows.device)
    found = torch.cdist(rows @ probe, tokens @ probe, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    return found if torch.equal(tokens[found], rows) else None


def _instance(end: Node, inside: list[Node], expert: int) -> Instance:
    """The run as an `Instance`, of which the search for the combine reads the nodes."""
    first = tuple(Contraction(node, node, expert, "", None, 1) for node in inside if node is not end)
    return Instance(first, Contraction(end, end, expert, "", None, 2))


def refuse_mixing(reader: StepReader) -> None:
    """Other rows' tokens are changed; a row that answers to that is mixed with others."""
    steps = [node for node, role in reader.roles.items() if isinstance(role, (Copy, Product)) and is_float(node)]
    given = [reader.columns[node] for node, role in reader.roles.items() if isinstance(role, TokenRows)]
    generator = torch.Generator().manual_seed(17)
    for parity in (0, 1):
        replace: dict[Node, torch.Tensor] = {}
        for node in {n for column in given for n in column}:
            recorded = reader.replay.value(node)
            value = recorded.flatten(0, reader.lead - 1).clone()
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu").to(value.device)
            value[parity::2] = noise[parity::2]
            replace[node] = value.view_as(recorded)
        wanted = [n for node in steps for n in reader.columns[node]]
        answers = reader.replay.run(replace, wanted)
        expected = reader.replay.run({n: reader.replay.value(n) for n in replace}, wanted)
        for node in steps:
            for member in reader.columns[node]:
                rows = (found[member].flatten(0, reader.lead - 1) for found in (expected, answers))
                before, after = (each[1 - parity :: 2].double() for each in rows)  # some are in 8 bits
                if not torch.allclose(before, after, rtol=1e-9, atol=1e-9, equal_nan=True):
                    raise Refuse(f"{operation(node)} inside the experts mixes rows of different tokens", node)


# -- dropouts inside experts --------------------------------------------------------------------------------------------


def expert_dropouts(captured: CapturedBlock) -> frozenset[int]:
    """Numbers of the nodes that drop numbers at random, each in the rows of one expert."""
    drawing = [node for node in captured.graph.nodes if _drops(node)]
    if not drawing:
        return frozenset()
    tags = tag(captured, expert_groups(captured.named_tensors()))

    def experts(node: Node) -> set[int]:
        """With whose parameters a value, or else what is first computed from it, is computed."""
        after = reached([node], lambda n: () if n.op == "output" or tags[n].experts else n.users)
        return {expert for n in after if n.op != "output" for expert in tags[n].experts}

    found = {node: experts(node) for node in drawing}
    return frozenset(record_of(node).number for node in drawing if len(found[node]) == 1 and ALL not in found[node])


def _drops(node: Node) -> bool:
    if node.target is not F.dropout or not draws(node):
        return False
    in_place = node.kwargs.get("inplace", len(node.args) > 3 and node.args[3])
    return not in_place and not isinstance(probability(node), Node)


def probability(node: Node) -> float:
    """Of a dropout, the part that is dropped."""
    found: float = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)  # type: ignore[assignment]
    return found


def has_idle(captured: CapturedBlock) -> bool:
    """Whether dropouts of the run were idle."""
    return any(node.target is row_dropout for node in captured.graph.nodes)


def draws_slots_first(columns: Sequence[Column], experts: Sequence[int], tokens: Sequence[torch.Tensor]) -> bool:
    """Whether rows are drawn for slot after slot of the routing, not token after token.

    Args:
        columns: the dropouts, in the order in which an expert draws.
        experts, tokens: the expert, and the token (R,) of every row, of each run.
    """
    if not columns:
        return False
    order = {node: place for place, node in enumerate(columns[0][0].graph.nodes)}
    places = [order[column[run]] for run in range(len(experts)) for column in columns]
    slots = int(torch.cat(list(tokens)).unique(return_counts=True)[1].max()) if any(map(len, tokens)) else 1
    jumps = max((int((rows.diff() < 0).sum()) for rows in tokens), default=0)
    # Rows of a slot are in the tokens' order, so that there is a jump back at most between slots.
    if places != sorted(places) or list(experts) != sorted(set(experts)) or jumps >= slots:
        raise Refuse(INSIDE, columns[0][0])
    return jumps > 0
