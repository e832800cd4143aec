"""Tensors of routing weights that are zero where an expert was not chosen, and host code that asks where they are not."""

from __future__ import annotations

from typing import Any

import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.passes.detect.graph import is_chosen, is_float, is_tensor, literals, operation

_PARTS = frozenset(
    "getitem select unbind chunk split squeeze unsqueeze view reshape flatten transpose t permute".split()
)
_CASTS = frozenset("to type_as float double half bfloat16 contiguous clone detach".split())
_POSITIVE = frozenset(
    "softmax sigmoid exp relu softplus abs square one_hot eq ne gt ge lt le zeros zeros_like new_zeros rand rand_like "
    "gumbel_softmax".split()
)
_SCATTERS = frozenset("scatter scatter_ scatter_add scatter_add_ index_put index_put_ set_item".split())
_STAY_POSITIVE = _SCATTERS | frozenset(
    "topk sort max amax gather after sum mean cumsum where "
    "masked_fill masked_fill_ index_select take_along_dim stack cat expand repeat normalize nan_to_num sqrt rsqrt "
    "reciprocal einsum matmul bmm mm".split()
)
"""What gives no negative number of none."""
_ARITHMETIC = frozenset("mul mul_ imul truediv div div_ itruediv add add_ iadd pow clamp clamp_min".split())
"""What gives none of none and of plain numbers that are not negative."""


def asks_who_was_chosen(node: torch.fx.Node) -> bool:
    """Whether ``node`` asks where an expert was chosen, or whether at all, by where weights are not zero: ``gates[:, e] > 0``,
    ``gates.nonzero()``, ``gates[:, e].sum() == 0``."""
    name = _name(node)
    if name in ("nonzero", "argwhere", "count_nonzero", "any", "bool"):
        return _is_sparse(node.args[0])
    if name not in ("gt", "ne", "eq", "le") or len(node.args) != 2 or not _is_zero(node.args[1]):
        return False
    asked: Any = node.args[0]
    while isinstance(asked, torch.fx.Node) and operation(asked) in ("item", "float"):
        asked = asked.args[0]
    adds = isinstance(asked, torch.fx.Node) and operation(asked) in ("sum", "max", "amax")
    told = _is_sparse(asked) or (adds and _is_sparse(asked.args[0]))
    return told and (is_never_negative(asked) or (name in ("ne", "eq") and not adds))


def is_never_negative(value: Any) -> bool:
    """Whether what computes ``value`` gives no negative number, as far as it can be read; of an argument that is left open."""
    left, seen = [value], set[torch.fx.Node]()
    while left:
        node = left.pop()
        if not isinstance(node, torch.fx.Node) or node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        name = _name(node)
        if name in _POSITIVE or (is_tensor(node) and not is_float(node)):
            continue
        negative = name in _ARITHMETIC and any(number < 0 for number in literals([node]))
        if negative or name not in _STAY_POSITIVE | _ARITHMETIC | _PARTS | _CASTS:
            return False
        left += node.all_input_nodes
    return True


def _name(node: torch.fx.Node) -> str:
    return operation(node).removeprefix("__").removesuffix("__")


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and bool(value == 0)


def _is_sparse(value: Any) -> bool:
    """Whether ``value`` is (part of) a matrix with zeros and other numbers in every row, as a matrix of routing weights is.

    Or a sum of routing weights where an expert was chosen, ``(weights * (ids == e)).sum(-1)``.
    """
    if _is_masked(value) or (
        isinstance(value, torch.fx.Node) and operation(value) == "sum" and _is_masked(value.args[0])
    ):
        return True
    while isinstance(value, torch.fx.Node) and is_float(value):
        numbers = record_of(value).value
        if operation(value) in _SCATTERS:
            return True
        if numbers.dim() > 1 and bool(((numbers == 0).any(-1) & (numbers != 0).any(-1)).all()):
            return True
        if not value.op.startswith("call") or operation(value) not in _PARTS:
            return False
        value = value.args[0]
    return False


def _is_masked(value: Any) -> bool:
    """Whether ``value`` is zero wherever another number than one was chosen."""
    if not isinstance(value, torch.fx.Node) or operation(value) not in ("mul", "__mul__", "where"):
        return False
    masks = [n for n in value.all_input_nodes if n.op.startswith("call")]
    masks = [n.all_input_nodes[0] if operation(n) in _CASTS else n for n in masks if n.all_input_nodes]
    return any(
        operation(n) in ("eq", "__eq__") and is_chosen(n) and not any(map(is_float, n.all_input_nodes)) for n in masks
    )
