"""Sorts the host decisions of a run (if, while, item()) into those that the rewrite replaces, guards, or cannot allow."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.finite_checks import is_check_of_numbers, refuse_unless_of_outputs
from hexa_fx.passes.detect.graph import RANDOM, ancestors, descendants, effects, is_float, is_tensor, operation
from hexa_fx.passes.detect.size_decisions import (
    COUNTING,
    SIZES,
    counts_pieces,
    is_condition,
    refuse_exact_count,
    refuse_exact_place,
    sizes_asked,
)
from hexa_fx.passes.detect.sparse_weights import asks_who_was_chosen
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

_CHOICES = frozenset(
    "topk argmax argmin argsort sort max min nonzero where one_hot multinomial bincount unique".split()
)
_FILLED = frozenset("zeros_like ones_like empty_like new_zeros new_ones new_empty".split())
"""Of what these are given they take the size alone."""
ON_DATA = (
    "the code takes a host decision (if, while, item()) on the data, not on the routing; torch.where in its place, or the decision "
    "outside of the block, can be rewritten"
)


@dataclass(frozen=True)
class ShapeBranch:
    """A host decision on sizes, on whether numbers are finite, or on parameters and buffers: the rewritten graph holds only while
    ``condition`` keeps its recorded ``outcome``; while it gives as many ``pieces``; or, for a check of what experts give, while all
    of that is finite.
    """

    condition: torch.fx.Node
    outcome: bool
    of_outputs: bool = False
    pieces: int | None = None

    def holds(self, asked: torch.fx.Node) -> torch.fx.Node:
        """Emits whether it does, in the graph of ``asked``, which is the condition there."""
        graph = asked.graph
        if self.pieces is not None:
            return graph.call_function(operator.eq, (graph.call_function(len, (asked,)), self.pieces))
        return asked if self.outcome else graph.call_function(operator.not_, (asked,))

    def as_recorded(self) -> str:
        """In words, for the log line when it goes the other way."""
        record = record_of(self.condition)
        if self.pieces is not None:
            return f"the loop at {record.location} to go {self.pieces} times"
        return f"the condition at {record.location} to be {record.value}"


def leaves_decision(ends: Sequence[torch.fx.Node], opaque: set[torch.fx.Node]) -> bool:
    """Whether code after ``ends``, or beside them, still has a host loop or branch on data, which one run would fix."""
    graph = ends[0].graph
    left = ancestors([graph.output_node(), *effects(graph)], stop=lambda node: node in ends)
    return any(record_of(n).decision and n not in opaque and depends_on_data(n) for n in left)


def depends_on_data(decision: torch.fx.Node) -> bool:
    """Whether a decision depends on data. A size does only if it counts what was found; unbinding a tensor asks for a size."""
    if operation(decision) in (*SIZES, "unbind"):
        return any(operation(n) in COUNTING for n in ancestors([decision]))
    return True


def shape_branches(
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    routing: set[torch.fx.Node],
    opaque: set[torch.fx.Node],
    ends: Sequence[torch.fx.Node],
    output: torch.fx.Node,
    stacked: int,
) -> tuple[ShapeBranch, ...]:
    """Checks every host decision of the run.

    Args:
        tags: those of all experts.
        routing: nodes that hold the ids.
        opaque: nodes in submodule calls that stay calls.
        ends: what the experts give.
        output: where the region ends.
        stacked: how many experts its weights hold; tags count those of lists, other regions' too.

    A decision that follows from the routing is replaced by the expert-specific operators. One that follows from sizes alone
    becomes a guard. Any other makes the trace valid for this input only, unless it does no more than raise an error.

    Raises:
        Refuse: a decision depends on data other than the routing, or on an exact number of tokens of an expert.
    """
    experts = max(stacked, *(1 + number for tag in tags.values() for number in tag.experts))
    after = descendants([output]) | {output}
    follows = _follows_choices(captured.graph, tags, routing)

    def guards_of(node: torch.fx.Node) -> list[ShapeBranch]:
        behind = ancestors([node])
        kept = _kept_values(captured, node)
        if kept and not any(n.op == "placeholder" for n in behind):
            return [_guard_of_kept(captured, node, kept)]
        sizes = _sizes(node)
        if sizes:
            return _of_sizes(node, sizes, tags, (output,), after, routing)
        asked = _asked(node, output, follows)
        of_experts = {n for n in asked if is_float(n) and tags[n].experts and not tags[n].weight}
        if is_check_of_numbers(node) and isinstance(record_of(node).value, bool):
            if not of_experts <= after:
                refuse_unless_of_outputs(captured, node, of_experts, ends)
            return [ShapeBranch(node, record_of(node).value, of_outputs=not of_experts <= after)]
        if of_experts:
            raise Refuse(
                "the code takes a host decision (if, while, assert, item()) on what the experts computed", node
            )
        if any(n.op == "placeholder" and is_float(n) for n in asked):
            raise Refuse(ON_DATA, node)
        if behind & (routing | follows):
            refuse_exact_count(node)
            refuse_exact_place(node, experts)
            return []
        return _of_inputs(node, behind)

    return tuple(_of_decisions(captured, opaque, guards_of))


def _of_decisions(
    captured: CapturedBlock, opaque: set[torch.fx.Node], guards_of: Callable[[torch.fx.Node], list[ShapeBranch]]
) -> Iterator[ShapeBranch]:
    for node in captured.graph.nodes:
        if node.op == "output" or not record_of(node).decision or node in opaque:
            continue
        try:
            yield from guards_of(node)
        except Refuse:
            if not record_of(node).only_raises:
                raise


def size_branches(
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    opaque: set[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    routing: set[torch.fx.Node],
) -> list[ShapeBranch]:
    """Decisions on sizes that can be checked once the regions that end at ``outputs`` are there; of one alone, not all can.

    Raises:
        Refuse: a decision is on a size that can be neither checked nor seen.
    """
    after = descendants(outputs)
    found = _of_decisions(captured, opaque, lambda n: _of_sizes(n, _sizes(n), tags, outputs, after, routing))
    return list(found)


def _sizes(decision: torch.fx.Node) -> set[torch.fx.Node]:
    return {decision} if counts_pieces(decision) else sizes_asked(decision)


def _of_sizes(
    decision: torch.fx.Node,
    sizes: set[torch.fx.Node],
    tags: Mapping[torch.fx.Node, Tag],
    outputs: Sequence[torch.fx.Node],
    after: set[torch.fx.Node],
    routing: set[torch.fx.Node],
) -> list[ShapeBranch]:
    if not sizes or not is_condition(decision, sizes, tags, outputs, after, routing):
        return []
    value = record_of(decision).value
    return [ShapeBranch(decision, bool(value), pieces=len(value) if decision in sizes else None)]


def _kept_values(captured: CapturedBlock, decision: torch.fx.Node) -> list[str]:
    """The parameters and buffers of which the decision reads numbers, not only sizes."""
    if operation(decision) == "unbind":
        return []
    read = ancestors([decision], stop=lambda n: operation(n) in SIZES)
    return sorted(str(n.target) for n in read if n.op == "get_attr" and n.target not in captured.constants)


def _guard_of_kept(captured: CapturedBlock, decision: torch.fx.Node, kept: list[str]) -> ShapeBranch:
    """A condition on parameters and buffers, checked at the start of every call, before anything that must not happen twice.

    Raises:
        Refuse: a write comes before it, or it is no plain condition.
    """
    value, written = record_of(decision).value, effects(captured.graph)
    before = itertools.takewhile(lambda n: n is not decision, captured.graph.nodes)
    drawn = any(operation(n) in RANDOM for n in ancestors([decision]) if n.op.startswith("call"))
    if isinstance(value, bool) and not drawn and not any(n in written for n in before):
        return ShapeBranch(decision, value)
    raise Refuse(
        f"the code takes a host decision (if, while, item()) on {', '.join(kept)}, which may change; an if that is reached before "
        "any buffer is written can be rewritten",
        decision,
    )


def _follows_choices(
    graph: torch.fx.Graph, tags: Mapping[torch.fx.Node, Tag], routing: set[torch.fx.Node]
) -> set[torch.fx.Node]:
    """What follows from choices by which experts get tokens, or the code takes items of lists, and from others made with the
    parameters of these, as where a router runs twice. All others are of the data.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    given = [node for node in nodes if tags[node].experts and not tags[node].weight]
    items = [node for node in nodes if record_of(node).subscript or operation(node) == "__index__"]
    choices = {node for node in nodes if node.op.startswith("call") and operation(node) in _CHOICES}
    chosen = choices & ancestors([*given, *items, *routing])
    again = choices & descendants([node for node in ancestors(chosen) if node.op == "get_attr"])
    return descendants(chosen | again) | chosen | again


def _asked(decision: torch.fx.Node, output: torch.fx.Node, follows: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes whose values the decision reads, back to ``output``.

    Not those that only determine sizes, or choices such as a later router's ids, which are among what ``follows`` from choices.
    """
    if operation(decision) == "unbind":  # asks for a size
        return set()
    return ancestors([decision], stop=lambda node: node is output or _is_size_or_choice(node, follows))


def _is_size_or_choice(node: torch.fx.Node, follows: set[torch.fx.Node]) -> bool:
    if not node.op.startswith("call"):
        return False
    made = node.args[0] if operation(node) == "getitem" else node
    chosen = isinstance(made, torch.fx.Node) and made.op.startswith("call") and operation(made) in _CHOICES
    if operation(node) in SIZES | _FILLED or (chosen and node in follows and is_tensor(node) and not is_float(node)):
        return True
    return asks_who_was_chosen(node)


def _read_by_value(node: torch.fx.Node, behind: set[torch.fx.Node]) -> bool:
    """Whether a value (not just a size) of a float tensor reaches the decision."""
    return any(user in behind and operation(user) not in SIZES for user in node.users)


def _of_inputs(node: torch.fx.Node, behind: set[torch.fx.Node]) -> list[ShapeBranch]:
    """A decision that follows from inputs beside the tokens, if from any; ``behind`` is all that it follows from.

    Raises:
        Refuse: it depends on the numbers of a float tensor.
    """
    if not any(n.op == "placeholder" for n in behind):
        return []
    if any(is_float(n) and n.op != "placeholder" and _read_by_value(n, behind) for n in behind):
        raise Refuse(ON_DATA, node)
    value = record_of(node).value
    if operation(node) in SIZES:
        return []  # len(x), range(n): a loop over rows is only legitimate inside the experts, which verification sees
    return [ShapeBranch(node, value)] if isinstance(value, bool) else []
