"""Small questions about recorded graphs, shared by the detection steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.functional import row_dropout
from hexa_fx.capture.records import nodes_by_call, reached
from hexa_fx.operations import operation


def is_tensor(node: Node) -> bool:
    return isinstance(record_of(node).value, torch.Tensor)


def is_float(node: Node) -> bool:
    value = record_of(node).value
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def nodes_in(value: Any) -> list[Node]:
    """Nodes in a value that an argument of a call can be."""
    found: list[Node] = []
    torch.fx.map_arg(value, found.append)
    return found


def einsum_of(node: Node) -> tuple[list[str], list[Any], str] | None:
    """Terms, operands and result of a recorded einsum; None if its equation leaves a part to torch, such as ``...``."""
    equation, *given = node.args
    operands: Any = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    return (terms, list(operands), result) if len(terms) == len(operands) else None


def ancestors(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> set[Node]:
    """``roots`` and everything they depend on. Nodes for which ``stop`` holds are included, but not what they depend on."""
    if stop is None:
        return reached(roots, _inputs_of)
    return reached(roots, lambda node: () if stop(node) else node.all_input_nodes)


def descendants(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> set[Node]:
    """The roots and all that is computed from them, but not from nodes at which to ``stop``."""
    return reached(roots, _users_of if stop is None else lambda node: () if stop(node) else node.users)


def traced(node: Node, through: Callable[[Node], bool]) -> list[Node]:
    """``node``, and what it was made of, each by its first operand, as far as operations go ``through``, the latest first."""
    found = [node]
    while through(found[-1]) and found[-1].all_input_nodes:
        found.append(found[-1].all_input_nodes[0])
    return found


_inputs_of, _users_of = operator.attrgetter("all_input_nodes"), operator.attrgetter("users")


def is_chosen(node: Node) -> bool:
    """Whether it follows from a choice by scores."""
    return any(map(ops.chooses, ancestors([node])))


def is_scored(node: Node) -> bool:
    """Whether it is chosen from by what follows from it."""
    return any(map(ops.chooses, descendants([node])))


def inside_calls(captured: CapturedBlock) -> frozenset[Node]:
    """Values inside a submodule's call, other than its arguments and results."""
    inside = nodes_by_call(captured.graph)
    return frozenset().union(*({*inside[call.number]} - {*nodes_in(call.output)} for call in captured.calls))


def effects(graph: torch.fx.Graph) -> set[Node]:
    """Writes to parameters, buffers or inputs of the block, which count as results: of those that build on each other the last."""
    held = {record_of(node).storage for node in _held(graph)} - {None}
    found = {node for node in graph.nodes if node.op != "output" and record_of(node).writes}
    found = {node for node in found if record_of(node).storage in held}
    earlier = {node for last in found for node in found & ancestors([last]) - {last} if _same_storage(node, last)}
    return found - earlier


def draws(node: Node) -> bool:
    """Whether it draws random numbers in this run."""
    if not ops.is_random(node):
        return False
    training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
    return bool(training and probability != 0.0)


def writes_outside(node: Node) -> bool:
    """Whether it writes to a parameter, a buffer or an input of the block."""
    if node.op == "output" or not record_of(node).writes:
        return False
    return any(_same_storage(node, n) for n in _held(node.graph))


def _held(graph: torch.fx.Graph) -> list[Node]:
    """Parameters, buffers and inputs of the block."""
    return [*graph.find_nodes(op="placeholder", sort=False), *graph.find_nodes(op="get_attr", sort=False)]


def written_from(write: Node) -> Node:
    """The tensor that ``write``, and the writes that it builds on, go to, as it was before the first of them."""
    node = write
    while record_of(node).writes and isinstance(node.args[0], Node) and _same_storage(node.args[0], write):
        node = node.args[0]
    return node


def _same_storage(first: Node, second: Node) -> bool:
    return record_of(first).storage is not None and record_of(first).storage == record_of(second).storage


def live_nodes(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that the output or an effect depends on."""
    return ancestors([graph.output_node(), *effects(graph)])


def twins(graph: torch.fx.Graph) -> dict[Node, Node]:
    """For every node the first one that computes the same from the same values."""
    first: dict[Hashable, Node] = {}
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        own = record_of(node).writes or ops.is_random(node) or ops.is_uninitialised(node) or node.target is row_dropout
        key = node if own else (node.op, repr(node.target), in_words((node.args, node.kwargs), found.__getitem__))
        found[node] = first.setdefault(key, node)
    return found


def in_words(value: Any, of_node: Callable[[Node], Hashable]) -> Hashable:
    """Arguments of a call in a form that can be compared, with ``of_node`` of the nodes in them."""
    if isinstance(value, Node):
        return of_node(value)
    if isinstance(value, (tuple, list)):
        return tuple(in_words(item, of_node) for item in value)
    if isinstance(value, slice):
        return "slice", in_words((value.start, value.stop, value.step), of_node)
    if isinstance(value, dict):
        return tuple((key, in_words(item, of_node)) for key, item in value.items())
    return repr(value)


def literals(nodes: Iterable[Node]) -> list[float]:
    """Plain numbers in the arguments of ``nodes``, in order of appearance, each once."""

    def visit(value: Any) -> Iterator[float]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (tuple, list)):
            for item in value:
                yield from visit(item)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)

    return list(dict.fromkeys(number for node in nodes for number in visit((node.args, node.kwargs))))


def adds_dimension(node: Node) -> bool:
    """``m[:, None]``: an index of full slices and None."""
    index = node.args[1] if operation(node) == "getitem" and len(node.args) > 1 else None
    return isinstance(index, tuple) and all(item is None or item is Ellipsis or item == slice(None) for item in index)
