"""``.grad`` as what kernels add to: a second micro-batch's gradient of experts is added to the first one's as a tile is finished.

Else autograd is given a gradient as large as the weight, and reads it again to add it. What torch does there (`AccumulateGrad`) is
kept: the same tensor is added to in place, only where a backward pass would have added to it, and not where hooks are to see the
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import Tensor, nn

from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table_layers import PARAMETERS, SOURCES_OPERANDS
from hexa_fx.torch_private import _will_engine_execute_node

Node = Any
"""Of autograd's graph."""
ONLY_TENSORS = (Tensor, nn.Parameter)
"""Classes of tensors that lie in memory as they say."""
_WEIGHTS = tuple(name in PARAMETERS for name in SOURCES_OPERANDS[1:])


def owner_of(node: Node | None, operand: Tensor | None) -> Tensor | None:
    """The parameter that an operand is, or is a copy of in another dtype, as autocast makes it; else the operand.

    What was saved for backward may be another tensor than the parameter, as under checkpoints.

    Args:
        node: where autograd takes the operand's gradient.
    """
    leaf = _leaf(node)
    return operand if leaf is None else leaf.variable  # type: ignore[no-any-return]


def _leaf(node: Node | None) -> Node | None:
    """The node that adds to ``.grad``, straight behind a node or behind a cast."""
    if node is not None and type(node).__name__ == "ToCopyBackward0":
        node, _ = node.next_functions[0]
    return node if type(node).__name__ == "AccumulateGrad" else None


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks are to see the gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def beside(
    taken: Sequence[Tensor | None],
    owners: Sequence[Tensor | None],
    operands: Sequence[Tensor | None],
    nodes: Sequence[Node | None],
) -> tuple[Tensor | None, ...]:
    """What gradients are added to, with every ``.grad`` that may be; empty for nothing.

    Args:
        taken: buffers that do, or empty; by operand, as all that follow.
        owners: of those whose gradient is wanted.
        operands, nodes: and where autograd takes the gradient of each.
    """
    if not any(t is not None and type(t) in ONLY_TENSORS and t.is_leaf and t.grad is not None for t in owners):
        return tuple(taken)
    found = [*taken] or [None] * len(owners)
    each = zip(_WEIGHTS, found, owners, operands, nodes)
    for place, (is_weight, buffer, parameter, operand, node) in enumerate(each):
        if is_weight and buffer is None and parameter is not None and operand is not None:
            found[place] = _sum(parameter, operand, node)
    if found.count(None) == len(found):
        return ()
    torch.autograd.graph.increment_version(
        [t for t, old in zip(found, taken or found) if t is not None and t is not old]
    )
    return tuple(found)


def _sum(parameter: Tensor, operand: Tensor, node: Node | None) -> Tensor | None:
    """A parameter's ``.grad`` if the gradient of an operand may be added to it here."""
    leaf, total = _leaf(node), parameter.grad if parameter.is_leaf else None
    if leaf is None or total is None or getattr(parameter, "main_grad", None) is not None:
        return None
    if has_hooks(parameter) or has_hooks(operand) or operand.retains_grad:
        return None
    if type(total) not in ONLY_TENSORS or total.layout is not torch.strided or total.requires_grad:
        return None
    if total.device != operand.device or total.stride() != operand.stride() or total.shape != operand.shape:
        return None
    wide = total.dtype is accumulate_dtype(operand.dtype)
    if not (wide or (total.is_cuda and total.dtype is operand.dtype)) or not _is_in_order(total):
        return None
    return total if _adds(leaf) else None


def _is_in_order(total: Tensor) -> bool:
    """Whether all who add to the sum or read it come after one another: not on a stream of its own, nor in several threads on a
    CPU, of which torch's node lets one add at a time.
    """
    if not total.is_cuda:
        return current_thread() is main_thread()
    on_default = torch.cuda.current_stream(total.device) == torch.cuda.default_stream(total.device)
    return on_default or torch.cuda.is_current_stream_capturing()


def _adds(leaf: Node) -> bool:
    """Whether this backward pass is to add to ``.grad``: not in ``torch.autograd.grad``, nor beside ``inputs=``."""
    try:
        return bool(_will_engine_execute_node(leaf))
    except RuntimeError:  # the leaf's gradient is a result
        return False
