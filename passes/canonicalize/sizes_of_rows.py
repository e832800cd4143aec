"""Asks tensors that the block is given for numbers of rows, where the code asks what it has computed of them row by row.

A condition on how many tokens there are can then be checked before anything is drawn or called, though the code asks the logits.
"""

from __future__ import annotations

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.counts import sizes_asked
from hexa_fx.passes.detect.graph import ancestors, is_tensor, keeps_rows_apart

Node = torch.fx.Node

_BY_ROW = frozenset("linear matmul mm dropout topk sort".split())
"""Operations besides the element-wise ones that give a row for every row of their first operand."""


def ask_given_tensors(captured: CapturedBlock) -> None:
    """Changes the sizes that host decisions hinge on. Recorded values stay as they are."""
    decisions = [n for n in captured.graph.nodes if n.op != "output" and record_of(n).decision]
    for size in {size for decision in decisions for size in sizes_asked(decision)}:
        if operation(size) != "size" or len(size.args) != 2 or not all(map(_is_known, size.args)):
            continue
        tensor, dim = size.args
        assert isinstance(tensor, Node)
        assert isinstance(dim, int)
        dims = record_of(tensor).value.dim()
        if dim % dims < dims - 1:
            size.args = (_with_as_many_rows(tensor), dim % dims)


def _is_known(argument: object) -> bool:
    return isinstance(argument, int) or (isinstance(argument, Node) and is_tensor(argument))


def _with_as_many_rows(tensor: Node) -> Node:
    """The earliest tensor that this one is computed of row by row."""
    while (before := _rows_of(tensor)) is not None:
        tensor = before
    return tensor


def _rows_of(node: Node) -> Node | None:
    if not node.op.startswith("call") or record_of(node).writes:
        return None
    shape = record_of(node).value.shape
    if kind(node) == "getitem" and node.all_input_nodes and kind(node.all_input_nodes[0]) in ("topk", "sort"):
        node = node.all_input_nodes[0]  # of which this is one of two results
    if not (keeps_rows_apart(node) or kind(node) in _BY_ROW) or not _is_along_rows(node):
        return None
    operands = node.all_input_nodes[:1] if kind(node) in _BY_ROW else node.all_input_nodes
    rows = (n for n in operands if is_tensor(n) and record_of(n).value.shape[:-1] == shape[:-1] and len(shape) > 1)
    return next((n for n in rows if any(m.op == "placeholder" for m in ancestors([n]))), None)


def _is_along_rows(node: Node) -> bool:
    """Whether what chooses does so in every row."""
    place = {"topk": 2, "sort": 1}.get(kind(node))
    if place is None:
        return True
    dim: object = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1)
    return dim == -1
