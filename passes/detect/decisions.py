"""Host decisions of a run (if, while, item()): asked again in every call, left to verification, or refused.

What can be computed from what the block is given, or is known once its experts have run, is a condition of every call. What
follows from the routing may be a test for nothing, a limit, or a loop over what was chosen: verification varies these. Everything
else the recorded run fixes as it went, so the block is refused with the line.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.calls import TEXTS
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import ancestors, descendants, draws, effects, is_chosen, is_float, is_tensor, literals
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

_parts_of_ids = ops.of("getitem select unbind chunk split squeeze unsqueeze view reshape flatten transpose t permute")


def is_size(node: Node) -> bool:
    """Whether it asks a tensor for a size, or for how many there are."""
    return (node.op == "call_method" and operation(node) in ops.SIZES) or node.target is len


def is_width(size: Node) -> bool:
    """Whether it is the last size of a float matrix, which weights decide."""
    of = size.args[0]
    if operation(size) == "dim" or not isinstance(of, Node) or len(size.args) < 2:
        return operation(size) == "dim"
    dim = record_of(of).value.dim()
    return is_float(of) and dim > 1 and size.args[1] in (-1, dim - 1)


def sizes_asked(decision: Node) -> set[Node]:
    """The sizes that a decision hinges on, also by way of tensors made of them; empty if it hinges on values, or on none."""
    if is_tensor(decision) or operation(decision) == "unbind":
        return set()
    asked = ancestors([decision], stop=is_size)
    sizes = {n for n in asked if is_size(n)}
    reads_values = any(not n.op.startswith("call") or ops.is_random(n) for n in asked - sizes)
    return set() if reads_values else sizes


def depends_on_values(node: Node) -> bool:
    """Whether the size of the result depends on values."""
    if ops.finds(node) or ops.gives_numbers(node):
        return True
    if kind(node) == "repeat_interleave":
        return any(isinstance(repeats, Node) and is_tensor(repeats) for repeats in node.args[1:])
    index = node.args[1] if kind(node) == "getitem" else ()
    parts = index if isinstance(index, (tuple, list)) else (index,)
    tensors = (record_of(n).value for n in parts if isinstance(n, Node) and is_tensor(n))
    return any(value.dtype in (torch.bool, torch.uint8) for value in tensors)


def is_count(node: Node) -> bool:
    """Whether it says how many there are of something, if what it is given follows from the routing."""
    if ops.adds_up_counts(node):
        return True
    if kind(node) == "getitem" and isinstance(node.args[1], int) and node.args[1] != 0:
        return kind(node.all_input_nodes[0]) in ("unique", "unique_consecutive")
    return is_size(node) and not is_width(node) and any(map(depends_on_values, ancestors([node])))


def is_exact(decision: Node, chosen: set[Node]) -> bool:
    """Whether a decision hinges on an exact number of rows or choices, or on its remainder, which no example need have.

    ``chosen``: the choices; what is added up before any of them, as in a norm, counts nothing.
    """
    asked = ancestors([decision], stop=lambda n: is_count(n) or ops.finds(n) or ops.chooses(n))
    counts = {n for n in asked if is_count(n) and not chosen.isdisjoint(ancestors([n]))}
    exact = (n for n in asked - counts if _asks_for_one_number(n))
    return any(not counts.isdisjoint(ancestors([n])) for n in exact)


def _asks_for_one_number(node: Node) -> bool:
    if kind(node) in ("remainder", "and"):
        return any(type(n) is int for n in node.args)
    return kind(node) == "equal" or (ops.compares_for_equality(node) and any(map(_is_certain_number, node.args)))


def _is_certain_number(value: Any) -> bool:
    """Whether a count is compared with a number that was not counted too: a constant, or a size of the inputs."""
    if isinstance(value, Node):
        return not is_tensor(value) and not any(map(is_count, ancestors([value])))
    return type(value) in (int, float) and value not in (0, 1)


def counts_pieces(node: Node) -> bool:
    """Whether the code took a tensor apart, as a loop over its rows does, and reads none of the parts: it can only have counted."""
    return operation(node) == "unbind" and not any(operation(n) != "getitem" or n.users for n in node.users)


def cuts_rows(node: Node) -> bool:
    """Whether it takes a tensor apart by a number, so that there are more parts of more rows, and the code may go through all.

    Those of features, which weights decide, are always as many.
    """
    if not ops.cuts(node) or kind(node) == "split_with_sizes":
        return False
    whole, *rest = node.args
    rest = [1, *rest] if kind(node) == "unbind" else rest
    by = (*rest, *(node.kwargs.get(name) for name in ("split_size", "split_size_or_sections", "chunks", "sections")))
    dim = node.kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
    if isinstance(next(filter(None, by), None), (list, tuple)) or not isinstance(whole, Node):
        return False
    dims = record_of(whole).value.dim()
    of_features = dims > 1 and isinstance(dim, int) and dim % dims == dims - 1
    return not of_features and any(n.op == "placeholder" for n in ancestors([whole]))


def asks_who_was_chosen(node: Node) -> bool:
    """Whether it asks where an expert was chosen, or whether at all, by where weights are not zero: ``gates[:, e] > 0``,
    ``gates.nonzero()``, ``gates[:, e].sum() == 0``.
    """
    if kind(node) in ("nonzero", "argwhere", "count_nonzero", "any", "bool"):
        return _has_zeros(node.args[0])
    if not (ops.compares_for_equality(node) or ops.orders(node)) or len(node.args) != 2:
        return False
    asked, bound = node.args
    while isinstance(asked, Node) and operation(asked) in ("item", "float", "sum", "max", "amax"):
        asked = asked.args[0]
    return type(bound) in (int, float) and bool(bound == 0) and _has_zeros(asked)


def _has_zeros(value: Any) -> bool:
    """Whether ``value`` is (part of) a matrix with zeros and other numbers in every row, as a matrix of routing weights is.

    Or (a sum of) routing weights where an expert was chosen, ``(weights * (ids == e)).sum(-1)``.
    """
    while isinstance(value, Node) and is_float(value):
        numbers = record_of(value).value
        if ops.scatters(value) or (kind(value) in ("mul", "where") and _is_masked(value.all_input_nodes)):
            return True
        if numbers.dim() > 1 and bool(((numbers == 0).any(-1) & (numbers != 0).any(-1)).all()):
            return True
        if not _parts_of_ids(value) and kind(value) != "sum":
            return False
        value = value.args[0]
    return False


def _is_masked(operands: Iterable[Node]) -> bool:
    """Whether one operand is a mask of an expert that was chosen."""
    masks = [n.all_input_nodes[0] if ops.casts(n) and n.all_input_nodes else n for n in operands]
    return any(kind(n) == "eq" and is_chosen(n) and not any(map(is_float, n.all_input_nodes)) for n in masks)


ON_DATA = (
    "the code takes a host decision (if, while, item()) on the data, or on random numbers, not on the routing; torch.where in its "
    "place, or the decision outside of the block, can be rewritten"
)
_ON_EXPERTS = "the code takes a host decision (if, while, assert, item()) on what the experts computed"
_EXACT = (
    "the code takes a host decision on the exact number of tokens that an expert gets, or on a remainder of it, which is "
    "known only after the routing; a decision on whether there are any can be rewritten"
)
_STRIDE = (
    "the code takes a host decision on how something that it computes lies in memory (stride()), which the rewritten "
    "block need not keep; one on sizes can be rewritten"
)
_SIZE_INSIDE = (
    "the code takes a host decision on a size of what the experts compute, with a number other than 0 or another size; one "
    "on a size of what the block is given can be rewritten"
)
_FINITE_INSIDE = "the code takes a host decision on whether numbers inside the experts are finite"
_FINITE_AGAIN = (
    "the code asks whether what experts give is finite, and draws random numbers or writes to buffers: if it is not, the "
    "block would have to start again"
)
_KEPT = (
    "the code takes a host decision (if, while, item()) on {}, which may change; an if that is reached before any buffer is "
    "written can be rewritten"
)
_LEFT = (
    "the code makes an array of numpy, or a text, of what it is given, and no graph says what comes of that; torch's own functions "
    "can be rewritten"
)
_UNFOLLOWED = TEXTS | {"numpy", "__array__"}
_choices = ops.of(
    "topk argmax argmin argsort sort max min nonzero where one_hot multinomial bincount unique unique_consecutive"
)
_FILLED = frozenset("zeros_like ones_like empty_like new_zeros new_ones new_empty".split())
"""Of what these are given they take the size alone."""


class Verdict(enum.Enum):
    """What becomes of a host decision."""

    CONDITION = "asked in every call"
    VARIED = "left to verification, which varies it"
    REFUSED = "refused"


@dataclass(frozen=True)
class Condition:
    """A host decision that the rewritten graph holds for as it went: while ``node`` has its recorded ``outcome``, which may be a
    number; while it gives as many ``pieces``; or, for a check of what experts give, while all of that is finite.
    """

    node: Node
    outcome: bool | float
    of_outputs: bool = False
    pieces: int | None = None

    def holds(self, asked: Node) -> Node:
        """Emits whether it does, in the graph of ``asked``, which is the node there."""
        graph = asked.graph
        if self.pieces is not None:
            return graph.call_function(operator.eq, (graph.call_function(len, (asked,)), self.pieces))
        if not isinstance(self.outcome, bool):
            return graph.call_function(operator.eq, (asked, self.outcome))
        return asked if self.outcome else graph.call_function(operator.not_, (asked,))

    def as_recorded(self) -> str:
        """In words, for the log line when it goes the other way."""
        record = record_of(self.node)
        if self.pieces is not None:
            return f"the loop at {record.location} to go {self.pieces} times"
        return f"the condition at {record.location} to be {record.value}"


def decision_left(ends: Sequence[Node], opaque: set[Node]) -> Node | None:
    """A host loop or branch on data that code after ``ends``, or beside them, still has, which one run would fix."""
    graph = ends[0].graph
    left = ancestors([graph.output_node(), *effects(graph)], stop=lambda node: node in ends)
    return next((n for n in left if record_of(n).decision and n not in opaque and depends_on_data(n)), None)


def depends_on_data(decision: Node) -> bool:
    """Whether a decision depends on data. A size does only if it counts what was found; unbinding a tensor asks for a size."""
    if operation(decision) in ops.SIZES or operation(decision) == "unbind":
        return any(map(ops.finds, ancestors([decision])))
    return True


def is_check_of_numbers(node: Node) -> bool:
    """Whether it is ``isfinite`` or the like, or compares a tensor with itself, which detects NaN."""
    return ops.checks_finite(node) or (ops.compares_for_equality(node) and len(set(node.args)) == 1)


def _is_number(decision: Node) -> bool:
    """Whether the code went on with a plain number, as to look something up by it."""
    return type(record_of(decision).value) in (int, float)


@dataclass
class Decisions:
    """Judges the host decisions of a run.

    Args:
        tags: those of all experts.
        routing: nodes that hold the ids.
        ends: what the experts give.
        outputs: where regions end.
        opaque: nodes in submodule calls that stay calls, which decide again.
    """

    captured: CapturedBlock
    tags: Mapping[Node, Tag]
    routing: set[Node]
    ends: Sequence[Node]
    outputs: Sequence[Node]
    opaque: set[Node]
    after: set[Node] = field(init=False)
    chosen: set[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.after = descendants(self.outputs)
        self.chosen = self._follow_choices()

    def conditions(self, of_sizes: bool = False) -> tuple[Condition, ...]:
        """Those of all decisions, or only of those ``of_sizes``."""
        found = []
        for node in self.captured.graph.nodes:
            if node.op == "output" or not record_of(node).decision or node in self.opaque:
                continue
            if of_sizes and not self._sizes(node):
                continue
            verdict, reason = self.judged(node)
            if verdict is Verdict.REFUSED and not record_of(node).only_raises:
                raise Refuse(reason, node)
            if verdict is Verdict.CONDITION:
                value = record_of(node).value
                pieces = len(value) if counts_pieces(node) or operation(node) == "tolist" else None
                of_outputs = not self._sizes(node) and not self._inside(self._asked(node)) <= self.after
                found.append(Condition(node, value if _is_number(node) else bool(value), of_outputs, pieces))
        return tuple(found)

    def judged(self, decision: Node) -> tuple[Verdict, str]:
        """The verdict on a decision, and the sentence of a refusal."""
        reads_inputs = any(n.op == "placeholder" for n in ancestors([decision]))
        kept = self._kept_values(decision)
        if kept and not reads_inputs:
            return self._of_kept(decision, kept)
        if sizes := self._sizes(decision):
            return self._of_sizes(decision, sizes)
        asked = self._asked(decision)
        is_bool = isinstance(record_of(decision).value, bool)
        if is_bool and (checks := self._checks(decision)):
            return self._of_finite(checks)
        if self._inside(asked):
            return Verdict.REFUSED, _ON_EXPERTS
        if any(n.op == "placeholder" and is_float(n) for n in asked):
            return Verdict.REFUSED, ON_DATA
        if not self.chosen.isdisjoint(ancestors([decision])):
            return (Verdict.REFUSED, _EXACT) if is_exact(decision, self.chosen) else (Verdict.VARIED, "")
        return self._of_inputs(decision, reads_inputs, is_bool)

    # -- what a decision asks ------------------------------------------------------------------------------------------

    def _sizes(self, decision: Node) -> set[Node]:
        return {decision} if counts_pieces(decision) else sizes_asked(decision)

    def _kept_values(self, decision: Node) -> list[str]:
        """The parameters and buffers of which the decision reads numbers, not only sizes."""
        if operation(decision) == "unbind":
            return []
        read = ancestors([decision], stop=lambda n: operation(n) in ops.SIZES)
        return sorted(str(n.target) for n in read if n.op == "get_attr" and n.target not in self.captured.constants)

    def _asked(self, decision: Node) -> set[Node]:
        """The nodes whose values the decision reads, back to the outputs.

        Not those that only determine sizes, or choices such as a later router's ids.
        """
        if operation(decision) == "unbind":  # asks for a size
            return set()
        return ancestors([decision], stop=lambda n: n in self.outputs or self._is_size_or_choice(n))

    def _is_size_or_choice(self, node: Node) -> bool:
        made = node.args[0] if kind(node) == "getitem" else node
        of_choice = isinstance(made, Node) and ((_choices(made) and node in self.chosen) or node in self.routing)
        is_ids = of_choice and is_tensor(node) and not is_float(node)
        of_size = node.op.startswith("call") and operation(node) in ops.SIZES | _FILLED
        return of_size or is_ids or asks_who_was_chosen(node)

    def _follow_choices(self) -> set[Node]:
        """What follows from choices by which experts get tokens, or the code takes items of lists, and from others made with the
        parameters of these, as where a router runs twice. All others are of the data.
        """
        nodes = [node for node in self.captured.graph.nodes if node.op != "output"]
        computed = [node for node in nodes if self.tags[node].experts and not self.tags[node].weight]
        items = [node for node in nodes if record_of(node).subscript or operation(node) == "__index__"]
        choices = set(filter(_choices, nodes))
        chosen = choices & ancestors([*computed, *items, *self.routing])
        again = choices & descendants([node for node in ancestors(chosen) if node.op == "get_attr"])
        return descendants(chosen | again) | self.routing

    def _inside(self, nodes: set[Node]) -> set[Node]:
        """Values among ``nodes`` that experts computed."""
        return {n for n in nodes if is_float(n) and self.tags[n].experts and not self.tags[n].weight}

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def _of_kept(self, decision: Node, kept: list[str]) -> tuple[Verdict, str]:
        """On parameters and buffers: asked at the start of every call, before anything that must not happen twice."""
        value, written = record_of(decision).value, effects(self.captured.graph)
        before = itertools.takewhile(lambda n: n is not decision, self.captured.graph.nodes)
        drawn = any(map(ops.is_random, ancestors([decision])))
        if isinstance(value, bool) and not drawn and not any(n in written for n in before):
            return Verdict.CONDITION, ""
        return Verdict.REFUSED, _KEPT.format(", ".join(kept))

    def _of_sizes(self, decision: Node, sizes: set[Node]) -> tuple[Verdict, str]:
        """What is counted in tokens or masks, before anything is chosen, is known in every call, and hardly varied."""
        if not isinstance(record_of(decision).value, bool) and not counts_pieces(decision):
            # range(n): a loop over rows, which verification sees at other sizes
            return (Verdict.CONDITION if self._is_apart(decision) else Verdict.VARIED), ""
        strides = (size for size in sizes if operation(size) == "stride")
        if any(n.op.startswith("call") for size in strides for n in size.all_input_nodes):
            return Verdict.REFUSED, _STRIDE
        behind = ancestors(sizes, stop=lambda n: n in self.outputs) - self.after
        inside, counts = bool(self._inside(behind)), [n for n in behind if depends_on_values(n)]
        if not inside and not any(is_chosen(n) or not ancestors([n]).isdisjoint(self.routing) for n in counts):
            return Verdict.CONDITION, ""
        if not all(map(is_width, sizes)) and is_exact(decision, self.chosen):
            return Verdict.REFUSED, _EXACT
        if inside and not counts and self._asks_size_inside(decision, sizes):
            return Verdict.REFUSED, _SIZE_INSIDE
        return Verdict.VARIED, ""

    def _asks_size_inside(self, decision: Node, sizes: set[Node]) -> bool:
        """Whether it is on a size of what experts compute that their weights do not have, other than on whether there is anything:
        what they compute may have a row for several tokens.
        """
        weights = (record_of(n).value for n in decision.graph.nodes if n.op == "get_attr" and self.tags[n].weight)
        known = {size for weight in weights for size in weight.shape}
        of_weights = {n for n in sizes if is_width(n) and record_of(n).value in known}
        numbers = literals(ancestors([decision], stop=is_size) - sizes)
        return bool(sizes - of_weights) and (len(sizes) > 1 or set(numbers) != {0})

    def _is_apart(self, decision: Node) -> bool:
        """Whether it asks how many whole numbers are given beside the tokens, such as lengths of sequences: the code goes through
        all, and verification has as many in each of its cases."""
        given = [*filter(is_tensor, self.captured.graph.find_nodes(op="placeholder", sort=False))]
        tokens = [record_of(n).value.shape[:-1] for n in given if is_float(n)]
        asked = [record_of(n).value for n in given if n in ancestors([decision])]
        known = {*itertools.chain(*tokens), *(shape.numel() for shape in tokens)}
        return bool(asked) and not any(v.is_floating_point() or not known.isdisjoint(v.shape) for v in asked)

    def _checks(self, decision: Node) -> set[Node]:
        """The checks whether float tensors are finite, if these are all that a decision asks about such."""
        asked = ancestors([decision], stop=is_check_of_numbers)
        checks = set(filter(is_check_of_numbers, asked))
        return set() if any(map(is_float, asked - checks)) else checks

    def _of_finite(self, checks: set[Node]) -> tuple[Verdict, str]:
        """What is not finite of what the experts give makes the combined result not finite, which is known once they have run. Then
        the block's own code runs from its beginning.
        """
        inside = [n for check in checks for n in check.all_input_nodes if self._inside({n}) and n not in self.after]
        if not all(map(self._is_moved, inside)):
            return Verdict.REFUSED, _FINITE_INSIDE
        graph = self.captured.graph
        if inside and (effects(graph) or any(map(draws, graph.nodes))):
            return Verdict.REFUSED, _FINITE_AGAIN
        return Verdict.CONDITION, ""

    def _is_moved(self, value: Node) -> bool:
        """Whether it is made of the experts' outputs by moves and sums alone."""
        if value in self.ends:
            return True
        inside = [n for n in value.all_input_nodes if not ancestors([n]).isdisjoint(self.ends)]
        return (ops.moves(value) or ops.adds(value)) and bool(inside) and all(map(self._is_moved, inside))

    def _of_inputs(self, decision: Node, reads_inputs: bool, is_bool: bool) -> tuple[Verdict, str]:
        """On inputs beside the tokens, if on any; ``len(x)`` of a loop over rows is legitimate inside the experts alone."""
        behind = ancestors([decision])
        if is_bool and any(map(draws, behind)):
            return Verdict.REFUSED, ON_DATA
        floats = (n for n in behind if is_float(n) and n.op != "placeholder")
        if any(operation(user) not in ops.SIZES for n in floats for user in n.users if user in behind):
            return (Verdict.REFUSED, ON_DATA) if reads_inputs else (Verdict.VARIED, "")
        if reads_inputs and operation(decision) in _UNFOLLOWED:
            return Verdict.REFUSED, _LEFT
        plain = is_bool or _is_number(decision) or operation(decision) == "tolist"
        asked = reads_inputs and plain and operation(decision) not in ops.SIZES
        return (Verdict.CONDITION if asked else Verdict.VARIED), ""
