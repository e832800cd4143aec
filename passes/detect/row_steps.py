"""What is done to single rows before the experts' first products and after their second ones.

Such steps may have no effect on the example: a clamp in range, `nan_to_num`, a mask of ones. So they are read off the recorded
operations, not off numbers. Every step computes a row from that row alone, so it can be done on all tokens before they are given to
experts, and on all expert outputs before they are combined.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import (
    adds_dimension,
    ancestors,
    descendants,
    is_float,
    is_tensor,
    keeps_rows_apart,
    live_nodes,
)
from hexa_fx.passes.detect.rows import Instance
from hexa_fx.passes.detect.tags import Tag

Node = torch.fx.Node


@dataclass(frozen=True)
class RowSteps:
    """Recorded operations on rows, to be done on all rows at once.

    Args:
        nodes: in recorded order.
        inputs: for values that the steps are given: the tensor (of the block) that stands in for them, or None for the rows.
        moved: values that hold the same rows in another order, or some of them, with the value that stands in for them.
        output: the last one.
        alike: the same steps of every run.
    """

    nodes: tuple[Node, ...]
    inputs: Mapping[Node, Node | None]
    moved: Mapping[Node, Node]
    output: Node
    alike: tuple[RowSteps, ...] = ()

    @property
    def roots(self) -> list[Node]:
        """Tensors of the block that the steps read."""
        return [node for node in self.inputs.values() if node is not None]


def steps_before(source: Node, instances: Sequence[Instance], tags: Mapping[Node, Tag]) -> RowSteps | None:
    """The steps between the tokens and the first products; None if there are none, or others than rows allow."""
    found = [_Before(source, tags).read(data) for i in instances for data in {c.data: None for c in i.first}]
    return _common(found)


def steps_of_factor(
    weights: Node, instances: Sequence[Instance], end: Node, tags: Mapping[Node, Tag]
) -> RowSteps | None:
    """The steps between the routing weights and the products of experts' outputs with them, before ``end``."""
    outputs = descendants([instance.second.node for instance in instances])
    factors = [
        operand
        for node in end.graph.nodes
        if node in outputs and ops.scales(node) and node in ancestors([end])
        for operand in node.all_input_nodes
        if operand not in outputs and is_float(operand) and weights in ancestors([operand])
    ]
    return _common([_Before(weights, tags).read(operand) for operand in factors])


def steps_after(instances: Sequence[Instance], tags: Mapping[Node, Tag]) -> RowSteps | None:
    """The steps between the second products and what adds their rows to tokens; None if there are none.

    They are done in every run alike, or on the outputs of all runs together.
    """
    live = live_nodes(instances[0].second.node.graph)
    ends = [instance.second.node for instance in instances]
    alike = _common([_after([end], live, tags) for end in ends])
    if alike is not None or len(ends) == 1:
        return alike
    return _common([_after(ends, live, tags)])


def _common(found: Sequence[RowSteps | None]) -> RowSteps | None:
    """The first one if all do the same."""
    steps = tuple(item for item in found if item is not None)
    if not steps or len(steps) < len(found) or len({_signature(item) for item in steps}) != 1:
        return None
    return replace(steps[0], alike=steps)


def _signature(steps: RowSteps) -> Hashable:
    numbers: dict[Node, Hashable] = {node: repr(given) for node, given in steps.inputs.items()}
    numbers |= dict.fromkeys(steps.moved, "rows")

    def part(value: Any) -> Hashable:
        if isinstance(value, Node):
            return numbers.get(value, repr(value))
        if isinstance(value, (tuple, list)):
            return tuple(map(part, value))
        return tuple((key, part(item)) for key, item in value.items()) if isinstance(value, dict) else repr(value)

    for place, node in enumerate(steps.nodes):
        numbers[node] = place
    return tuple((node.op, operation(node), part(node.args), part(node.kwargs)) for node in steps.nodes)


def is_shared(node: Node, tags: Mapping[Node, Tag]) -> bool:
    """Whether a value is the same for all rows and no expert's: a number, or one number for every feature."""
    value = record_of(node).value
    if not isinstance(value, torch.Tensor) or tags[node].experts:
        return False
    if any(n.op == "placeholder" for n in ancestors([node])):
        return False
    return value.numel() == 1 or value.shape[:-1].numel() == 1


class _Before:
    """Reads steps backwards from what a first product is given."""

    def __init__(self, source: Node, tags: Mapping[Node, Tag]) -> None:
        self.source, self.tags = source, tags
        self.nodes: set[Node] = set()
        self.inputs: dict[Node, Node | None] = {}
        self.moved: dict[Node, Node] = {}

    def read(self, data: Node) -> RowSteps | None:
        if not self._visit(data):
            return None
        steps = tuple(node for node in data.graph.nodes if node in self.nodes)
        return RowSteps(steps, self.inputs, self.moved, data) if steps else None

    def _visit(self, node: Node) -> bool:
        if node in self.nodes or node in self.inputs or node in self.moved:
            return True
        if moved_from(node, self.source):
            self.inputs[node] = None
            return True
        if self.tags[node].experts:
            return False
        given = self._of_same_tokens(node)
        if given is not None:
            self.inputs[node] = given
            return True
        if is_shared(node, self.tags):
            self.inputs[node] = node
            return True
        if not node.op.startswith("call"):
            return False
        if self._holds_rows(node) and _moves(node):
            values = [n for n in node.all_input_nodes if self._holds_rows(n)]
            if len(values) != 1:
                return False
            self.moved[node] = values[0]
            return self._visit(values[0])
        view = ops.views(node) or adds_dimension(node) or _is_like(node)
        if not (keeps_rows_apart(node) or view):
            return False
        self.nodes.add(node)
        return all(self._visit(n) for n in sorted(node.all_input_nodes, key=self._holds_rows, reverse=True))

    def _holds_rows(self, node: Node) -> bool:
        """Whether it may be rows of tokens, or a tuple of such."""
        value = record_of(node).value
        if isinstance(value, (tuple, list)):
            value = next(iter(value), None)
        wide = isinstance(value, torch.Tensor) and value.dim() > 1 and value.is_floating_point()
        return wide and value.shape[-1] == record_of(self.source).value.shape[-1] and self.source in ancestors([node])

    def _of_same_tokens(self, node: Node) -> Node | None:
        """The tensor with a row for every token that ``node`` takes the rows of the same tokens from."""
        if operation(node) not in ("getitem", "index_select") or len(node.all_input_nodes) != 2:
            return None
        base = node.all_input_nodes[0]
        given = [n for n, stands in self.inputs.items() if stands is None]
        same = any(operation(n) == operation(node) and n.args[1:] == node.args[1:] for n in given)
        tokens = record_of(self.source).value.shape[:-1].numel()
        value = record_of(base).value
        same = same and isinstance(value, torch.Tensor) and bool(value.shape) and value.shape[0] == tokens
        return base if same and not self.tags[base].experts else None


def moved_from(node: Node, source: Node) -> bool:
    """Whether ``node`` holds rows of ``source``, moved by operations that change no number."""
    seen: set[Node] = set()
    frontier, reached = [node], False
    behind = ancestors([source])
    while frontier:
        item = frontier.pop()
        if item in seen:
            continue
        seen.add(item)
        if item is source or (item in behind and _is_view_of(source, item)):
            reached = True
            continue
        if ops.makes(item):
            continue
        if not ops.moves(item):
            return False
        values = [n for n in item.all_input_nodes if is_float(n) or isinstance(record_of(n).value, (tuple, list))]
        if not values:
            return False
        frontier.extend(values)
    return reached


def _is_view_of(node: Node, base: Node) -> bool:
    while node is not base:
        if not (ops.views(node) or ops.casts(node)) or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def _after(starts: Sequence[Node], behind: set[Node], tags: Mapping[Node, Tag]) -> RowSteps | None:
    """Steps on what second products give, up to the last value that all paths in ``behind`` go through."""
    width = record_of(starts[0]).value.shape[-1]
    inside: dict[Node, None] = {}
    moved: dict[Node, Node] = {}
    inputs: dict[Node, Node | None] = dict.fromkeys(starts)
    ends: list[Node] = []
    ahead = descendants(starts)
    for node in starts[0].graph.nodes:
        if node not in ahead or node not in behind or node in inputs or node.op == "output":
            continue
        operands = node.all_input_nodes
        known = [n for n in operands if n in inside or n in inputs or n in moved]
        others = [n for n in operands if n not in known]
        if not known:
            continue
        if _moves(node) and not ops.adds_to(node) and not any(is_float(n) for n in others) and _is_wide(node, width):
            moved[node] = known[0]
            continue
        if (
            not is_tensor(node)
            or not (keeps_rows_apart(node) or _is_like(node))
            or not all(is_shared(n, tags) for n in others)
        ):
            continue
        inside[node] = None
        inputs.update({n: n for n in others})
        if is_float(node) and _is_wide(node, width):
            ends.append(node)
    for last in reversed(ends):
        if not _all_through(starts, last, ahead & behind):
            continue
        needed = ancestors([last])
        nodes = tuple(n for n in inside if n in needed)
        if all(map(ops.casts, nodes)):
            return None
        used = {n: given for n, given in inputs.items() if n in starts or any(n in s.all_input_nodes for s in nodes)}
        return RowSteps(nodes, used, {n: rows for n, rows in moved.items() if n in needed}, last)
    return None


def _moves(node: Node) -> bool:
    """Whether it moves numbers as they are."""
    return ops.moves(node) and not ops.casts(node)


def _is_wide(node: Node, width: int) -> bool:
    value = record_of(node).value
    if isinstance(value, (tuple, list)):
        value = next(iter(value), None)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[-1] == width


def _is_like(node: Node) -> bool:
    return operation(node) in ("zeros_like", "ones_like", "full_like") and len(node.all_input_nodes) == 1


def _all_through(starts: Sequence[Node], last: Node, region: set[Node]) -> bool:
    """Whether everything in ``region`` that reads ``starts`` does so by way of ``last``."""
    before = ancestors([last]) & (descendants(starts) | set(starts))
    return all(
        user in before or user not in region or not is_tensor(user) for node in before - {last} for user in node.users
    )
