"""Sizes that the host asks for, and counts among them: sizes that are known only once tokens have been given to experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import ancestors, is_chosen, is_float, is_tensor

Node = torch.fx.Node

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
    return kind(node) == "getitem" and _has_mask(node.args[1])


def _has_mask(index: Any) -> bool:
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


def is_exact(decision: Node) -> bool:
    """Whether a decision hinges on an exact number of rows or choices, or on its remainder, which no example need have."""
    asked = ancestors([decision], stop=lambda n: is_count(n) or ops.finds(n) or ops.chooses(n))
    counts = {n for n in asked if is_count(n)}
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
