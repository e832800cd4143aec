"""Reads an expert of any form as row-wise steps: what `ExpertBody` cannot express.

Runs of experts that differ only in whose parameters they read are walked at once, as columns of nodes, so that whatever differs
between runs shows: the rows, the routing's numbers for them, and the expert's parameters. Every recorded node of one run gets a
role; the rewrite turns each into one node over all routed rows at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.functional import row_dropout
from hexa_fx.capture.records import reached
from hexa_fx.capture.replay import Replay
from hexa_fx.ir import Layout
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors, in_words, is_float, is_tensor, literals, live_nodes, traced, twins
from hexa_fx.passes.detect.routing_sources import RoutingSource
from hexa_fx.passes.detect.stacks import Form, WeightTable
from hexa_fx.passes.detect.tags import ALL, Tag
from hexa_fx.passes.detect.verdict import Refuse

TIED = (
    "the experts share a matrix and have biases of their own in one layer; with the bias added to the product "
    "(F.linear(x, weight) + bias) they are rewritten"
)

ONE_RAN = (
    "only one of the experts gets tokens here, and what experts of this form compute is read from several: give an example that "
    "reaches more of them"
)


@dataclass(frozen=True)
class TokenRows:
    """The rows' tokens: rows of ``source``."""

    source: Node


@dataclass(frozen=True)
class RowFactor:
    """One number per row: the product of routing quantities, or 1 if there are none."""

    sources: tuple[RoutingSource, ...]


@dataclass(frozen=True)
class RowCount:
    """The number of rows."""


@dataclass(frozen=True)
class Outside:
    """A value computed before the experts and used by all of them."""


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer that all experts use, by its name."""

    name: str


@dataclass(frozen=True)
class Literal:
    """A number that follows from the shapes of parameters."""

    value: int | float | bool


@dataclass(frozen=True)
class OfExpert:
    """A parameter of the row's expert, as (E, *shape) of ``base``."""

    base: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FromExpert:
    """The recorded operation, element by element, on a parameter of the row's expert: ``1 + weight``, ``softplus(beta)``, IA3's."""


@dataclass(frozen=True)
class Product:
    """``data @ W[e].T + b[e]``."""

    data: Node
    base: str
    bias: str | None
    layout: Layout


@dataclass(frozen=True)
class Copy:
    """The recorded operation on the new operands."""


Role = TokenRows | RowFactor | RowCount | Outside | Shared | Literal | OfExpert | FromExpert | Product | Copy


@dataclass(frozen=True)
class FreeBody:
    """An expert as steps over rows.

    Args:
        steps: the role of every node of one expert's run, in recorded order.
        output: the node whose rows are combined.
        experts: E.
        hidden_size, intermediate_size: width of the tokens, and of the widest value that a product reads.
        form: how the first expert parameter is stored.
        runs: the nodes of all runs that do the step.
        slots_first: whether an expert's rows come in the order of the slots that chose it, and then of tokens; else of tokens.
        lead: how many dimensions hold an expert's rows in the code, such as batch and sequence.
    """

    steps: Mapping[Node, Role]
    output: Node
    experts: int
    hidden_size: int
    intermediate_size: int
    form: Form
    runs: Mapping[Node, tuple[Node, ...]]
    slots_first: bool = False
    lead: int = 1

    def row_shape(self, node: Node) -> tuple[int, ...]:
        """Of what a step has for every row."""
        return tuple(record_of(node).value.shape[self.lead :])

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of what an expert computes, products as ``linear``."""
        names = {node: operation(node) for node, role in self.steps.items() if isinstance(role, (Product, Copy))}
        steps = self.steps
        return tuple("linear" if isinstance(steps[n], Product) else name for n, name in names.items() if name != "size")

    @property
    def dropouts(self) -> list[Node]:
        """The steps that drop numbers at random, in the order in which an expert draws."""
        return [node for node in self.steps if node.target is row_dropout]

    @property
    def roots(self) -> list[Node]:
        """Recorded nodes outside the experts that the steps read."""
        found: list[Node] = []
        for node, role in self.steps.items():
            if isinstance(role, TokenRows):
                found.append(role.source)
            elif isinstance(role, Outside):
                found.append(node)
            elif isinstance(role, RowFactor):
                found.extend(n for source in role.sources for n in source.nodes)
        return found


def width_of(node: Node) -> int:
    return int(record_of(node).value.shape[-1])


Column = tuple[Node, ...]
"""The same value in every run of an expert, in the order of the runs."""


class AlikeRuns(NamedTuple):
    """Columns at which runs of experts that do the same may end, those of matrices first, and what reads an expert's parameter."""

    ends: tuple[Column, ...]
    readers: tuple[Node, ...]


def find_alike_runs(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> AlikeRuns | None:
    """Runs of single experts that do the same thing, by the structure of what they compute.

    None if fewer than two experts are run one at a time, or if they differ in what they compute.
    """
    readers = _readers(captured, tags)
    if not readers or not all(in_one_expert(reader, tags) for reader in readers):
        return None
    signature = _signatures(captured, tags)
    classes: dict[Hashable, list[Node]] = defaultdict(list)
    for node, value in signature.items():
        classes[value].append(node)
    runs = len(classes[signature[readers[0]]])
    if runs < 2 or any(len(classes[signature[reader]]) != runs for reader in readers):
        return None
    ends = [tuple(column) for column in classes.values() if len(column) == runs and _may_end(column, readers)]
    ends.sort(key=lambda end: record_of(end[0]).value.dim())
    return AlikeRuns(tuple(ends), readers) if ends else None


def lone_run(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> Node | None:
    """What first reads a parameter of the only expert that runs; None if several do, or they run at once."""
    readers = _readers(captured, tags)
    alone = len({tags[reader].experts for reader in readers}) == 1 and all(in_one_expert(n, tags) for n in readers)
    return readers[0] if alone else None


def _readers(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> tuple[Node, ...]:
    live = live_nodes(captured.graph)
    computed = (n for n in captured.graph.nodes if n in live and n.op != "output" and not tags[n].weight)
    return tuple(n for n in computed if is_tensor(n) and expert_operands(n, tags))


def experts_of(column: Column, tags: Mapping[Node, Tag]) -> tuple[int, ...]:
    """The expert of every run."""
    return tuple(next(iter(tags[node].experts)) for node in column)


def in_one_expert(node: Node, tags: Mapping[Node, Tag]) -> bool:
    """Whether the value is computed with the parameters of exactly one expert, and with something else."""
    return not tags[node].weight and len(tags[node].experts) == 1 and ALL not in tags[node].experts


def expert_operands(node: Node, tags: Mapping[Node, Tag]) -> list[Node]:
    """Operands that are parameters of experts."""
    return [n for n in node.all_input_nodes if tags[n].weight and tags[n].experts and is_tensor(n)]


def _may_end(column: list[Node], readers: tuple[Node, ...]) -> bool:
    """Whether a node holds rows that every use of an expert's parameter leads to: a matrix, or one a sequence."""
    values = [record_of(node).value for node in column]
    if not is_float(column[0]) or len({value.dim() for value in values}) > 1 or values[0].dim() < 2:
        return False
    return ancestors(column).issuperset(readers)


def _signatures(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> dict[Node, Hashable]:
    """Gives equal numbers to nodes that compute the same from their run's rows and their expert's parameters."""
    found: dict[Node, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    of_node = partial(_operand, tags=tags, found=found)
    for node in captured.graph.nodes:
        if node.op == "output" or not in_one_expert(node, tags):
            continue
        parts = (node.op, operation(node), record_of(node).gradient, in_words((node.args, node.kwargs), of_node))
        found[node] = numbers.setdefault(parts, len(numbers))
    return found


def _operand(node: Node, tags: Mapping[Node, Tag], found: Mapping[Node, Hashable]) -> Hashable:
    """What can be said about an operand without knowing the run's rows."""
    if node in found:
        return "inside", found[node]
    value, tag = record_of(node).value, tags[node]
    if not isinstance(value, torch.Tensor):
        return "number"
    if tag.weight:
        return "parameter", tuple(sorted(tag.bases)), tuple(value.shape)
    return "tensor", value.dtype, tuple(value.shape[1:])


ACTIVATIONS_WITH_PARAMETER = frozenset(("prelu",))
MADE_OF_A_PARAMETER = "the experts compute with something made from a parameter"
MIXED_WEIGHT = "an expert product mixes several parameters in its weight"


@dataclass
class StepReader:
    """Reads the steps of a block's experts.

    Args:
        sizes, experts: number of rows, and expert, of each run.
        token: which token (R,) every row of all runs is, of ``count``.
        lead: how many dimensions hold a run's rows.
        sources: tensors with a row for every token.
        factor: finds a number per row among the routing's tensors; raises `Refuse` if it is not there.
    """

    weights: WeightTable
    replay: Replay
    sizes: tuple[int, ...]
    experts: tuple[int, ...]
    token: torch.Tensor
    count: int
    lead: int
    sources: tuple[Node, ...]
    factor: Callable[[torch.Tensor], tuple[RoutingSource, ...]]
    roles: dict[Node, Role] = field(default_factory=dict)
    columns: dict[Node, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph, self.tags = self.weights.captured.graph, self.weights.tags
        self.twin = twins(self.graph)
        self.run = self.sizes.index(max(self.sizes))
        """The run that the steps are taken from."""

    def read(self, end: Column) -> dict[Node, Role]:
        """Roles of the nodes of one run, in recorded order."""
        self._visit(end)
        self.roles = {node: self.roles[node] for node in self.graph.nodes if node in self.roles}
        return self.roles

    def _visit(self, column: Column) -> None:
        node = column[self.run]
        if node in self.columns:
            if self.columns[node] != column:
                raise Refuse("experts use a value in different ways", node)
            return
        self.columns[node] = column
        self.roles[node] = self._role(column)

    def _role(self, column: Column) -> Role:
        node = column[self.run]
        tag = self.tags[node]
        if in_one_expert(node, self.tags):
            return self._expert_step(column)
        if tag.weight:
            return self._parameter(column)
        return self._tensor(column) if is_tensor(node) else self._other(column)

    # -- inside the expert ---------------------------------------------------------------------------------------------

    def _expert_step(self, column: Column) -> Role:
        node = column[self.run]
        self._check_rows(column)
        parameters = expert_operands(node, self.tags)
        if ops.contracts(node) and any(record_of(n).value.dim() >= 2 for n in parameters):
            return self._product(column)
        if parameters and not (
            ops.broadcasts(node) or ops.normalizes(node) or operation(node) in ACTIVATIONS_WITH_PARAMETER
        ):
            said = (
                f"the experts apply {operation(node)} with parameters of their own; matrix products, sums, products, layer and RMS "
                "norms are what can be rewritten"
            )
            raise Refuse(TIED if ops.contracts(node) else said, node)
        found = self._copy(column)
        made = any(isinstance(self.roles[n], FromExpert) for n in parameters)
        if made and operation(node) in ACTIVATIONS_WITH_PARAMETER:
            raise Refuse(MADE_OF_A_PARAMETER, node)
        return found

    def _check_rows(self, column: Column) -> None:
        node = column[self.run]
        if is_tensor(node) and not all(self._is_of(n, rows) for n, rows in zip(column, self.sizes)):
            of_rows = any(n.op == "placeholder" for n in ancestors([node]))
            mixed = f"{operation(node)} inside the experts does not keep their rows apart"
            raise Refuse(mixed if of_rows else MIXED_WEIGHT, node)

    def _is_of(self, node: Node, rows: int) -> bool:
        """Whether a tensor holds something for each of so many rows."""
        shape = record_of(node).value.shape
        return len(shape) >= self.lead and shape[: self.lead].numel() == rows

    def _product(self, column: Column) -> Product:
        node = column[self.run]
        data = [n for n in node.all_input_nodes if is_tensor(n) and not self.tags[n].weight]
        if len(data) != 1 or {record_of(n).value.dim() for n in (*data, node)} != {self.lead + 1}:
            raise Refuse("an expert product is not one of rows with a matrix", node)
        operands = expert_operands(node, self.tags)
        bases = [next(iter(self.tags[n].bases)) for n in operands if len(self.tags[n].bases) == 1]
        if len(bases) != len(operands) or len(operands) > 2:
            raise Refuse(MIXED_WEIGHT, node)
        place = node.all_input_nodes.index(data[0])
        rows = tuple(n.all_input_nodes[place] for n in column)
        self._visit(rows)
        values = [self.replay.call(n, {}) for n in column]
        for base in bases:
            bias = next((other for other in bases if other != base), None)
            for reading in self.weights.matrices(base, values[0].shape[-1], width_of(data[0])):
                if reading.part == "whole" and self._explains(values, rows, reading.matrices, bias):
                    return Product(data[0], base, bias, reading.layout)
        raise Refuse("an expert product is not one with the expert's whole matrix and bias", node)

    def _explains(self, values: list[torch.Tensor], rows: Column, matrices: torch.Tensor, bias: str | None) -> bool:
        vectors = None if bias is None else self.weights.vectors(bias)
        if bias is not None and (vectors is None or vectors.shape[1] != matrices.shape[1]):
            return False
        for value, data, expert in zip(values, rows, self.experts):
            expected = self.replay.value(data) @ matrices[expert].T
            if vectors is not None:
                expected = expected + vectors[expert]
            scale = value.abs().amax().clamp(min=1e-12) if value.numel() else 1.0
            if not bool(((value - expected).abs() <= 1e-7 * scale).all()):
                return False
        return True

    def _copy(self, column: Column) -> Copy:
        """The operation itself, on operands that are visited in turn."""
        operands = [n.all_input_nodes for n in column]
        if len({len(nodes) for nodes in operands}) != 1:
            raise Refuse("experts use a value in different ways", column[self.run])
        for item in zip(*operands):
            self._visit(item)
        return Copy()

    # -- what the expert is given --------------------------------------------------------------------------------------

    def _parameter(self, column: Column) -> Role:
        node = column[self.run]
        value = record_of(node).value
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, float)) and all(record_of(n).value == value for n in column):
                return Literal(value)
            raise Refuse("experts use numbers that follow from parameters in different ways", node)
        if self.tags[node].experts:
            return self._of_expert(column)
        if node.op == "get_attr":
            if len({n.target for n in column}) > 1:
                forms = Counter(record_of(n).value.shape for n in column)
                odd = min(column, key=lambda n: forms[record_of(n).value.shape])
                raise Refuse(
                    f"the experts differ in shape or structure: {odd.target} has no like in the others; only experts of one shape "
                    "are rewritten",
                    odd,
                )
            return Shared(str(node.target))
        return self._copy(column)

    def _of_expert(self, column: Column) -> OfExpert | FromExpert:
        node = column[self.run]
        bases = self.tags[node].bases
        stored = self.weights.table(next(iter(bases))) if len(bases) == 1 else None
        if stored is None:
            raise Refuse("the experts compute with a combination of their parameters", node)
        table, by_element = stored[1], ops.works_on_one(node) or ops.broadcasts(node)
        same = all(
            expert < len(table) and torch.equal(self.replay.value(member).flatten(), table[expert])
            for member, expert in zip(column, self.experts)
        )
        # what may do nothing on the example, as a clamp, is done all the same
        if same and not (by_element and len(node.all_input_nodes) == 1):
            return OfExpert(next(iter(bases)), tuple(record_of(node).value.shape))
        operands = [n.all_input_nodes for n in column]
        done = {(operation(n), tuple(literals([n])), len(given)) for n, given in zip(column, operands)}
        known = by_element and len(done) == 1 and len(operands[0]) == 1 and not record_of(node).writes
        if not known or record_of(operands[self.run][0]).value.shape != record_of(node).value.shape:
            raise Refuse(MADE_OF_A_PARAMETER, node)
        self._visit(tuple(given for (given,) in operands))
        return FromExpert()

    def _tensor(self, column: Column) -> Role:
        found = self._token_rows(column) or self._row_factor(column)
        if found is not None:
            return found
        node = column[self.run]
        same = len({self.twin[n] for n in column}) == 1  # a mask over features, say, that every run inverts anew
        if same and not all(self._is_of(node, rows) for rows in self.sizes):
            return Outside()
        if node.op in ("get_attr", "placeholder") or not all(n.all_input_nodes for n in column) or not is_float(node):
            raise Refuse("the experts compute with a tensor that is neither their tokens' nor shared by all", node)
        if len({operation(n) for n in column}) != 1:
            raise Refuse("experts are given their rows in different ways", node)
        self._check_rows(column)
        return self._copy(column)

    def _token_rows(self, column: Column) -> TokenRows | None:
        if not is_float(column[0]) or record_of(column[0]).value.dim() <= self.lead:
            return None
        values = [self.replay.value(n).flatten(0, self.lead - 1) for n in column]
        if [len(value) for value in values] != [*self.sizes] or len({value.shape[1:] for value in values}) != 1:
            return None
        rows = torch.cat(values)
        for source in self.sources:
            whole = self.replay.value(source)
            if whole.shape[-1:] != rows.shape[1:] or whole.shape[:-1].numel() != self.count:
                continue
            same = torch.equal(whole.reshape(self.count, -1)[self.token], rows)
            if same and all(moved_from(node, source) for node in column):
                return TokenRows(source)
        return None

    def _row_factor(self, column: Column) -> RowFactor | None:
        values = [self.replay.value(n) for n in column]
        if any(v.numel() != rows or not self._is_of(n, rows) for v, n, rows in zip(values, column, self.sizes)):
            return None
        try:
            sources = self.factor(torch.cat([value.double().flatten() for value in values]))
        except Refuse:
            return None
        nodes = [node for source in sources for node in source.nodes]
        read = all(any(moved_from(n, node) for node in nodes) for n in column) if nodes else all(map(ops.makes, column))
        return RowFactor(sources) if read else None

    def _other(self, column: Column) -> Role:
        """Sizes, and tuples of tensors."""
        node = column[self.run]
        values = [record_of(n).value for n in column]
        if all(isinstance(v, int) and v == r for v, r in zip(values, self.sizes)):
            return RowCount()
        if len(set(column)) == 1:
            return Outside()
        if len({operation(n) for n in column}) != 1 or not node.all_input_nodes:
            raise Refuse("experts are given different numbers", node)
        return self._copy(column)


def moved_from(node: Node, source: Node) -> bool:
    """Whether ``node`` holds rows of ``source``, moved by operations that change no number."""
    views = {*traced(source, ops.keeps_numbers)}  # what it is a view or cast of, too

    def given(item: Node) -> list[Node]:
        if item in views or ops.makes(item):
            return []
        return [n for n in item.all_input_nodes if is_float(n) or isinstance(record_of(n).value, (tuple, list))]

    behind = reached([node], given)
    moved = all(item in views or ops.makes(item) or (ops.moves(item) and given(item)) for item in behind)
    return moved and not behind.isdisjoint(views)
