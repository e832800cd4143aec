"""Makes products with all pieces of a weight, one after another, the product with the whole weight.

Code for tensor parallelism computes so on one device too (``pretraining_tp`` of LLaMA, DeepSeek and DiT-MoE): pieces of output
features are joined, and products with pieces of input features are added up.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch.fx
from torch.nn.functional import linear

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import kind, operation

Node = torch.fx.Node


def join_products(graph: torch.fx.Graph, kept: Container[Node] = ()) -> bool:
    """Joins them, and erases the pieces' products. Whether there were any. Recorded values stay as they are.

    ``kept``: nodes that are referred to outside of the graph.
    """
    before = set()
    for node in graph.nodes:
        operands = _of_joined(node) or _of_summed(node)
        if operands is not None:
            before |= {*_made_of(node)}
            node.op, node.target, node.args, node.kwargs = "call_function", linear, operands, {}
    erased = False
    for node in reversed(graph.nodes) if before else ():
        if node in before and not node.users and node not in kept:
            graph.erase_node(node)
            erased = True
    return erased


def _made_of(node: Node) -> Iterator[Node]:
    """The products that are joined or added up, and the sums on the way."""
    for operand in node.all_input_nodes:
        if operation(operand) == "linear" or kind(operand) == "add":
            yield operand
        if kind(operand) == "add":
            yield from _made_of(operand)


def _of_joined(node: Node) -> tuple[Node, Node] | None:
    """Rows and weight of ``cat([linear(rows, piece) for piece in weight.split(size, 0)], -1)``."""
    pieces = node.args[0] if kind(node) == "cat" and node.args else None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(pieces, (list, tuple)) or dim not in (-1, record_of(node).value.dim() - 1):
        return None
    products = _products(pieces)
    if products is None or len({rows for rows, _ in products}) != 1:
        return None
    weight = _whole([piece for _, piece in products], 0)
    return None if weight is None else (products[0][0], weight)


def _of_summed(node: Node) -> tuple[Node, Node] | None:
    """Rows and weight of a sum of products of pieces of the rows with pieces of the weight, both of input features."""
    if kind(node) != "add" or any(kind(user) == "add" for user in node.users):
        return None
    products = _products(_summands(node))
    if products is None:
        return None
    rows, weight = (_whole(pieces, -1) for pieces in zip(*products))
    return None if rows is None or weight is None else (rows, weight)


def _summands(node: Any) -> list[Any]:
    """What Python's ``sum`` adds up, first to last, without the 0 that it starts with."""
    if not isinstance(node, Node) or kind(node) != "add" or record_of(node).writes or node.kwargs:
        return [] if type(node) in (int, float) and node == 0 else [node]
    return [summand for operand in node.args for summand in _summands(operand)]


def _products(values: Sequence[Any]) -> list[tuple[Node, Node]] | None:
    """Rows and weight of each of several products without bias."""
    found = []
    for value in values:
        if not isinstance(value, Node) or operation(value) != "linear" or value.kwargs.get("bias") is not None:
            return None
        rows, weight, *bias = value.args
        if bias not in ([], [None]) or not isinstance(rows, Node) or not isinstance(weight, Node):
            return None
        found.append((rows, weight))
    return found if len(found) > 1 else None


def _whole(pieces: Sequence[Node], dim: int) -> Node | None:
    """What was cut along ``dim`` into just these pieces."""
    first = pieces[0]
    cut = first.args[0] if kind(first) == "getitem" else None
    if not isinstance(cut, Node) or not ops.cuts(cut) or not isinstance(cut.args[0], Node):
        return None
    along = cut.kwargs.get("dim", cut.args[2] if len(cut.args) > 2 else 0)
    dims = record_of(cut.args[0]).value.dim()
    if not isinstance(along, int) or along % dims != dim % dims or kind(cut) == "unbind":
        return None
    expected = [(cut, place) for place in range(len(record_of(cut).value))]
    return cut.args[0] if [tuple(piece.args) for piece in pieces] == expected else None
