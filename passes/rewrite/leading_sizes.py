"""Where the leading sizes of a recorded tensor come from: an input of the block, or the numbers that the code reshapes with.

Sizes that are equal on the example need not be so on other inputs: windows of seven tokens, and sentences of seven tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import einsum_of, is_tensor

Node = torch.fx.Node

_keeps_sizes = ops.of(
    "linear matmul mm bmm baddbmm addmm grouped_mm grouped_mm_fallback clone contiguous detach dropout softmax log_softmax "
    "layer_norm rms_norm cumsum zeros_like empty_like ones_like full_like index_add scatter scatter_add index_copy index_put "
    "set_item copy zero fill masked_scatter after view_as reshape_as expand_as segment_reduce"
)


def leading_sizes(node: Node) -> Node | tuple[Any, ...] | None:
    """The input with all but the last size of ``node``, or these sizes as numbers and nodes; None if that cannot be told."""
    leading = record_of(node).value.shape[:-1]
    while node.op != "placeholder":
        if not node.op.startswith("call"):
            return None
        if operation(node) in ("view", "reshape"):
            sizes = tuple(flat(node.args[1:]))
            return sizes[:-1] if len(sizes) == len(leading) + 1 else None
        given = [n for n in _operands(node) if record_of(n).value.shape[:-1] == leading]
        if not given:
            return None
        node = given[0]
    return node


def _operands(node: Node) -> list[Node]:
    """Operands that give the result their leading sizes, if these are equal."""
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if operation(node) != "einsum":
        return tensors if _keeps_sizes(node) or ops.works_on_each(node) or ops.casts(node) else []
    terms, operands, result = einsum_of(node) or ([], [], "")
    return [n for n, term in zip(operands, terms) if n in tensors and term[:-1] == result[:-1]]


def flat(value: Any) -> Iterator[Any]:
    """What lies in tuples and lists, however deep: sizes are given one by one or as one tuple."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    else:
        yield value
