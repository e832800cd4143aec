"""What leaves no trace in the numbers of one run: comparisons that all values pass, and conditions on ids that are no expert's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import adds_dimension, is_float, literals

Node = torch.fx.Node


def is_constant(node: Node) -> bool:
    value = record_of(node).value
    if not isinstance(value, torch.Tensor) or not value.numel():
        return True
    return bool((value == value.flatten()[0]).all())


def levels_out(node: Node) -> bool:
    """Whether it makes one number of different ones, as a weight over the sum of the chosen ones is 1 where one is chosen.

    On other inputs, and in backward, it is more than that number.
    """
    inputs = (record_of(n).value for n in node.all_input_nodes if is_float(n))
    return _is_level(record_of(node).value) and any(
        not _is_level(value) and not bool(((value == 0) | (value == 1)).all()) for value in inputs
    )


def _is_level(value: torch.Tensor) -> bool:
    first = value.flatten()[:1]
    return torch.allclose(value, first.expand(value.shape) if value.numel() else value, rtol=_LEVEL, atol=0.0)


_LEVEL = 1e-5


def restricts(node: Node) -> bool:
    """Whether an operation compares or bounds numbers, other than to ask which ids are an expert's, or what is not zero."""
    if kind(node) in ("where", "max", "min", "minimum", "maximum") and len(node.args) + len(node.kwargs) < 2:
        return False
    if ops.compares_for_equality(node):
        return any(is_float(n) for n in node.all_input_nodes) and literals([node]) != [0.0]
    if kind(node) == "gt" and literals([node]) == [0.0]:
        return is_float(node.all_input_nodes[0]) and is_constant(node)
    return ops.compares(node) or (is_float(node) and ops.bounds(node) and kind(node) not in ("min", "max"))


def leaves_out_sentinels(node: Node, from_index: Container[Node], experts: int) -> bool:
    """Whether it tells ids that are no expert's from those that are, and only sets what belongs to the former to zero.

    The operator leaves such slots out, so nothing is lost.

    Args:
        from_index: what is computed from the routing's ids.
        experts: E.
    """
    ids, bounds = node.args[0] if node.args else None, literals([node])
    if kind(node) not in _ORDER or not isinstance(ids, Node) or len(bounds) != 1:
        return False
    if ids not in from_index or is_float(ids):
        return False
    holds = {_ORDER[kind(node)](expert, bounds[0]) for expert in range(experts)}
    return len(holds) == 1 and _zeroes_rows(node, not holds.pop())


def _zeroes_rows(condition: Node, where: bool) -> bool:
    """Whether a condition only says which values are set to zero: those at which it is ``where``."""
    return all(_is_zeroing(user, condition, where) for user in condition.users)


def _is_zeroing(user: Node, condition: Node, where: bool) -> bool:
    if ops.views(user) or adds_dimension(user) or (ops.casts(user) and not where):
        return _zeroes_rows(user, where)
    if kind(user) in ("invert", "logical_not", "bitwise_not"):
        return _zeroes_rows(user, not where)
    if kind(user) == "masked_fill":
        return where and user.args[1] is condition and literals([user]) == [0.0]
    if kind(user) == "where" and len(user.args) == 3:
        return user.args[0] is condition and _is_zero(user.args[1 if where else 2])
    return kind(user) == "mul" and not where


def sets_to_zero(node: Node) -> bool:
    """Whether an operation sets numbers to zero where a condition holds, or where it does not, and changes nothing else."""
    if operation(node) == "where":
        return len(node.args) == 3 and any(map(_is_zero, node.args[1:]))
    return ops.selects(node) and len(node.args) == 3 and _is_zero(node.args[2])


def _is_zero(value: Any) -> bool:
    if isinstance(value, Node):
        return operation(value) in ("zeros", "zeros_like", "new_zeros")
    return isinstance(value, (int, float)) and value == 0


_ORDER: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ops.ORDERS | ops.EQUALITIES
}
