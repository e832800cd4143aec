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
from collections.abc import Container, Sequence
from itertools import combinations

import torch
import torch.fx
from torch.fx import Node
from torch.nn.functional import linear

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, NodeRecord, record_of
from hexa_fx.capture.records import number_of_new, reached
from hexa_fx.operations import kind, operation
from hexa_fx.passes.canonicalize.size_origins import trace_sizes
from hexa_fx.passes.detect.graph import ancestors, einsum_of, is_float, literals, nodes_in, traced


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
    joined = [node for node in captured.graph.nodes if _to_each_part(captured.graph, node)]
    given = [(call.args, call.kwargs, call.output) for call in (*captured.calls, *captured.functions)]
    stored = [stored.value for stored in captured.stored]
    erased = join_products(captured.graph, frozenset(nodes_in([*given, *stored])))
    return dataclasses.replace(captured, as_recorded=before) if erased or split or joined else captured


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
    """Makes an einsum over more than two tensors, or one that adds up what experts give, one product after another, of which those
    with experts' weights keep experts apart. Returns whether it did."""
    read = einsum_of(node) if node.op == "call_function" and operation(node) == "einsum" else None
    if read is None or any(len({*term}) != len(term) for term in (*read[0], read[2])):
        return False
    terms, operands, result = read
    if not all(isinstance(operand, Node) for operand in operands):
        return False
    expert = _added_up(terms, operands, result)
    while len(operands) > 2 or expert:
        pair = _weight_and_data(terms, operands, result)
        if pair is None:
            return False
        rest = [i for i in range(len(operands)) if i not in pair]
        kept = {*result, *expert}.union(*(terms[i] for i in rest))
        term = "".join(dict.fromkeys(c for i in pair for c in terms[i] if c in kept))
        equation, chosen = f"{terms[pair[0]]},{terms[pair[1]]}->{term}", [operands[i] for i in pair]
        with graph.inserting_before(node):
            product = graph.call_function(torch.einsum, (equation, *chosen))
        value, record = torch.einsum(equation, *[record_of(operand).value for operand in chosen]), record_of(node)
        storage = number_of_new(value)
        product.meta["hexa"] = NodeRecord(value, record.scope, record.location, storage=storage, calls=record.calls)
        terms, operands, expert = [term, *(terms[i] for i in rest)], [product, *(operands[i] for i in rest)], ""
    if operands == read[1]:
        return False
    node.args = (f"{','.join(terms)}->{result}", *operands)
    return True


def _added_up(terms: Sequence[str], operands: Sequence[Node], result: str) -> str:
    """The letter of the experts, if a product of rows of all experts with their weights adds up over them; else empty."""
    if len(operands) != 2 or not result or _is_weight(operands[0]) == _is_weight(operands[1]):
        return ""
    (rows, data), (weight, _) = sorted(zip(terms, operands), key=lambda each: _is_weight(each[1]))
    expert, *features = [letter for letter in weight if letter in rows and letter not in result] or [""]
    if len(weight) != 3 or expert != weight[0] or len(features) != 1:
        return ""
    for before in ancestors([data]):  # heads of an attention are no experts
        tokens = [operand for operand in before.all_input_nodes if not _is_weight(operand)]
        mixes = operation(before) in ops.CONTRACTIONS and len(tokens) > 1
        if mixes or kind(before) == "scaled_dot_product_attention":
            return ""
    return expert


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
    behind = traced(node, lambda n: operation(n) == "getitem" or ops.casts(n))[-1:]
    return not any(n.op == "placeholder" for n in ancestors(behind))


def join_products(graph: torch.fx.Graph, kept: Container[Node] = ()) -> bool:
    """Makes products with all pieces of a weight, one after another, the product with the whole weight, and erases the others.

    Code for tensor parallelism computes so on one device too (``pretraining_tp`` of LLaMA, DeepSeek and DiT-MoE): pieces of output
    features are joined, and products with pieces of input features are added up. Recorded values stay as they are.

    Returns whether there were any.

    ``kept``: nodes that are referred to outside of the graph.
    """
    before = set()
    for node in graph.nodes:
        made = reached([node], lambda n: n.all_input_nodes if _joins(n) else ())
        operands = _one_product(node, [n for n in made if not _joins(n)])
        if operands is not None:
            before |= made - {node}
            node.op, node.target, node.args, node.kwargs = "call_function", linear, operands, {}
    erased = False
    for node in reversed(graph.nodes) if before else ():
        if node in before and not node.users and node not in kept:
            graph.erase_node(node)
            erased = True
    return erased


_ROUNDING = 0.02
"""Of the largest number, as what is multiplied may be in 16 bits."""


def _joins(node: Node) -> bool:
    """Whether it joins tensors, or adds them up: Python's ``sum`` starts with 0."""
    plain = kind(node) == "add" and not node.kwargs and not record_of(node).writes
    return kind(node) == "cat" or (plain and not any(literals([node])))


def _one_product(node: Node, products: Sequence[Node]) -> tuple[Node, Node] | None:
    """Rows and weight of the product that ``node`` is, made of ``products`` with all pieces of the weight."""
    if len(products) < 2 or not all(operation(n) == "linear" and len(n.all_input_nodes) == 2 for n in products):
        return None
    given, pieces = zip(*(n.all_input_nodes for n in products))
    rows, weight = given[0] if len({*given}) == 1 else _uncut(given), _uncut(pieces)
    if rows is None or weight is None:
        return None
    data, matrix, value = (record_of(n).value for n in (rows, weight, node))
    if data.shape[-1:] != matrix.shape[1:] or value.shape != (*data.shape[:-1], len(matrix)):
        return None
    with torch.no_grad():  # pieces in another order give other numbers
        off = (linear(data, matrix) - value).abs()
        near = not value.numel() or bool((off <= _ROUNDING * value.abs().max()).all())
    return (rows, weight) if near else None


def _uncut(pieces: Sequence[Node]) -> Node | None:
    """What was cut into just these pieces."""
    cut, *others = {piece.args[0] for piece in pieces if kind(piece) == "getitem"} or [None]
    if others or not isinstance(cut, Node) or not ops.cuts(cut) or len({*pieces}) < len(record_of(cut).value):
        return None
    return cut.args[0] if isinstance(cut.args[0], Node) else None
