"""Brings computations that people write in several ways into one form, so that detection has to know only that.

An einsum over three or more tensors, expert weights among them, does a product and the combine in one call. It is split into
einsums over two: first the weight with the operand that it is contracted with. A product that also adds up what experts give
(``einsum("tei,eid->td", ...)``, ``tensordot``, ``addbmm``) becomes one that keeps them apart, and a sum. Products with all pieces
of a weight become one, and functions of single numbers are taken of parts before these are joined.
Parts taken of a weight along its first dimension by ``index_select``, ``select`` and ``narrow`` become subscripts, ``mv`` and
``inner`` the usual products. Sizes that decisions hinge on are traced to the inputs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.nn.functional import linear

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, NodeRecord, record_of
from hexa_fx.capture.records import number_of_new
from hexa_fx.operations import kind, operation
from hexa_fx.passes.canonicalize.size_origins import trace_sizes
from hexa_fx.passes.detect.graph import ancestors, einsum_of, is_float, nodes_in


def canonicalize_block(captured: CapturedBlock) -> CapturedBlock:
    """The block in that form. Changes the recorded graph; recorded values and module calls stay valid."""
    for node in captured.graph.nodes:
        _as_subscript(node)
        _as_usual_product(node)
        _as_cast(node)
        _past_other_writes(node)
    trace_sizes(captured.graph)
    before = torch.fx.Graph()
    before.output(before.graph_copy(captured.graph, val_map={})).meta["hexa"] = NodeRecord(None)
    split = [node for node in captured.graph.nodes if _split(captured.graph, node)]
    summed = [node for node in captured.graph.nodes if _over_experts(captured.graph, node)]
    joined = [node for node in captured.graph.nodes if _to_each_part(captured.graph, node)]
    given = [(call.args, call.kwargs, call.output) for call in (*captured.calls, *captured.functions)]
    stored = [stored.value for stored in captured.stored]
    erased = join_products(captured.graph, frozenset(nodes_in([*given, *stored])))
    return dataclasses.replace(captured, as_recorded=before) if erased or split or joined or summed else captured


def _as_subscript(node: Node) -> None:
    """Makes ``weight.index_select(0, ids)``, ``weight.select(0, number)`` and ``weight.narrow(0, start, length)`` subscripts."""
    if not node.op.startswith("call") or len(node.args) != _ARGUMENTS.get(operation(node)):
        return
    weight, dim, place, *length = node.args
    if dim != 0 or not isinstance(weight, Node) or any(n.op == "placeholder" for n in ancestors([weight])):
        return
    several = operation(node) == "index_select"
    if several and (not isinstance(place, Node) or record_of(place).value.dim() != 1):
        return
    if length:
        if not isinstance(place, int) or not isinstance(length[0], int) or place < 0:
            return
        place = slice(place, place + length[0])
    node.op, node.target, node.args = "call_function", operator.getitem, (weight, place)


_ARGUMENTS = {"index_select": 3, "select": 3, "narrow": 4}


def _as_usual_product(node: Node) -> None:
    """Makes ``weight.mv(row)`` a matmul, and ``inner(rows, weight)`` what a linear layer calls."""
    second = node.args[1] if len(node.args) == 2 and node.op.startswith("call") and not node.kwargs else None
    if operation(node) == "mv" and second is not None:
        node.op, node.target = "call_function", torch.matmul
    elif operation(node) == "inner" and isinstance(second, Node) and record_of(second).value.dim() == 2:
        node.op, node.target = "call_function", linear


def _as_cast(node: Node) -> None:
    """Makes ``weight.type_as(rows)`` and ``weight.to(rows)`` casts to the dtype that rows have: no number of theirs is read."""
    weight, like = node.args if len(node.args) == 2 and kind(node) in ("type_as", "to") else (None, None)
    if not isinstance(weight, Node) or not isinstance(like, Node):
        return
    given, made = record_of(weight).value, record_of(node).value
    if made.device == given.device and _is_weight(weight):
        node.op, node.target, node.args = "call_method", "to", (weight, made.dtype)


def _past_other_writes(node: Node) -> None:
    """Makes a read of ``rows[1, ...]`` after writes to ``rows[0, ...]`` one of the rows as they were before these."""
    place = _first_place(node) if operation(node) == "getitem" else None
    while place is not None and isinstance(node.args[0], Node) and operation(node.args[0]) == "set_item":
        write = node.args[0]
        if _first_place(write) in (None, place):
            return
        node.args = (write.args[0], *node.args[1:])


def _first_place(node: Node) -> int | None:
    """The place in the first dimension that a read or a write is about; None if it may be about several."""
    index = node.args[1] if len(node.args) > 1 else None
    first = index[0] if isinstance(index, tuple) and index else index
    return first if type(first) is int and first >= 0 else None


def _to_each_part(graph: torch.fx.Graph, node: Node) -> bool:
    """Makes ``f(cat(parts))``, for a function of single numbers, ``cat([f(part) for part in parts])``: what the code does to the
    outputs of all experts at once is done to each expert's. Returns whether it did."""
    whole, *rest = node.all_input_nodes or [node]
    if not ops.works_on_one(node) or ops.casts(node) or rest or kind(whole) != "cat" or len(whole.users) > 1:
        return False
    dim = whole.kwargs.get("dim", whole.args[1] if len(whole.args) > 1 else 0)
    record, made = record_of(node), []
    if dim != 0 or record.writes or not is_float(node):
        return False
    parts: Sequence[Node] = whole.args[0]  # type: ignore[assignment]
    for part, value in zip(parts, record.value.split([len(record_of(part).value) for part in parts])):
        with graph.inserting_before(node):
            made.append(graph.create_node(node.op, node.target, (part, *node.args[1:]), dict(node.kwargs)))
        made[-1].meta["hexa"] = dataclasses.replace(record, value=value, storage=number_of_new(value))
    node.op, node.target, node.args, node.kwargs = "call_function", torch.cat, (made,), {}
    return True


def _split(graph: torch.fx.Graph, node: Node) -> bool:
    """Makes an einsum over more than two tensors that spells out its result several over two. Returns whether it did."""
    read = einsum_of(node) if node.op == "call_function" and operation(node) == "einsum" else None
    if read is None or len(read[0]) < 3 or any(len(set(term)) != len(term) for term in read[0]):
        return False
    terms, operands, result = read
    if not all(isinstance(operand, Node) for operand in operands):
        return False
    while len(operands) > 2:
        pair = _weight_and_data(terms, operands, result)
        if pair is None:
            return False
        rest = [i for i in range(len(operands)) if i not in pair]
        kept = set(result).union(*(terms[i] for i in rest))
        term = "".join(dict.fromkeys(c for i in pair for c in terms[i] if c in kept))
        product = _insert(graph, node, pair, terms, operands, term)
        terms, operands = [term, *(terms[i] for i in rest)], [product, *(operands[i] for i in rest)]
    node.args = (f"{','.join(terms)}->{result}", *operands)
    return True


def _over_experts(graph: torch.fx.Graph, node: Node) -> bool:
    """Makes a product of rows of all experts with their weights, added up over experts, one that is not, and the sum over them."""
    read = _product_of(node)
    if read is None:
        return False
    (rows, weight), operands, result = read
    expert, *features = [letter for letter in weight if letter in rows and letter not in result] or [""]
    if (
        len(weight) != 3
        or expert != weight[0]
        or len(features) != 1
        or not _is_weight(operands[1])
        or _is_weight(operands[0])
    ):
        return False
    if any(_mixes_tokens(other) for other in ancestors([operands[0]])):  # heads of an attention are no experts
        return False
    product = _insert(graph, node, (0, 1), (rows, weight), operands, f"{result[0]}{expert}{result[1:]}")
    node.op, node.target, node.args, node.kwargs = "call_method", "sum", (product, 1), {}
    return True


def _mixes_tokens(node: Node) -> bool:
    """Whether it is a product of two tensors that depend on the inputs."""
    data = [operand for operand in node.all_input_nodes if not _is_weight(operand)]
    return kind(node) == "scaled_dot_product_attention" or (operation(node) in ops.CONTRACTIONS and len(data) > 1)


def _product_of(node: Node) -> tuple[tuple[str, str], tuple[Node, Node], str] | None:
    """Of an einsum of rows and a weight over several dimensions: their terms, the two, and the result's term."""
    found = einsum_of(node) if node.op == "call_function" and operation(node) == "einsum" else None
    if found is None or len(found[0]) != 2 or any(len({*term}) != len(term) for term in (*found[0], found[2])):
        return None
    (one, two), (first, second), result = found
    if not isinstance(first, Node) or not isinstance(second, Node) or not result:
        return None
    turned = _is_weight(first)
    return ((two, one) if turned else (one, two)), ((second, first) if turned else (first, second)), result


def _weight_and_data(terms: Sequence[str], operands: Sequence[Node], result: str) -> tuple[int, int] | None:
    """(data, weight): two operands that share a summed index with no other operand."""
    weights = [_is_weight(operand) for operand in operands]
    for first, second in combinations(range(len(operands)), 2):
        if weights[first] == weights[second]:
            continue
        others = set(result).union(*(term for i, term in enumerate(terms) if i not in (first, second)))
        if set(terms[first]) & set(terms[second]) - others:
            return (second, first) if weights[first] else (first, second)
    return None


def _is_weight(node: Node) -> bool:
    """Whether it is computed from parameters alone, or is those parts of one that ids choose."""
    while (operation(node) == "getitem" or ops.casts(node)) and isinstance(node.args[0], Node):
        node = node.args[0]
    return not any(n.op == "placeholder" for n in ancestors([node]))


def _insert(
    graph: torch.fx.Graph, node: Node, pair: tuple[int, int], terms: Sequence[str], operands: Sequence[Node], term: str
) -> Node:
    """The product of a pair as a node of its own before ``node``."""
    equation = f"{terms[pair[0]]},{terms[pair[1]]}->{term}"
    chosen = [operands[i] for i in pair]
    with graph.inserting_before(node):
        product = graph.call_function(torch.einsum, (equation, *chosen))
    value = torch.einsum(equation, *[record_of(operand).value for operand in chosen])
    record, storage = record_of(node), number_of_new(value)
    product.meta["hexa"] = NodeRecord(value, record.scope, record.location, storage=storage, calls=record.calls)
    return product


def join_products(graph: torch.fx.Graph, kept: Container[Node] = ()) -> bool:
    """Makes products with all pieces of a weight, one after another, the product with the whole weight, and erases the others.

    Code for tensor parallelism computes so on one device too (``pretraining_tp`` of LLaMA, DeepSeek and DiT-MoE): pieces of output
    features are joined, and products with pieces of input features are added up. Recorded values stay as they are.

    Returns whether there were any.

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
