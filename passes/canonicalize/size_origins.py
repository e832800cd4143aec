"""Traces sizes that the host asks of computed tensors to the sizes that they are copies of, such as those of an input.

A condition on the size of a result would otherwise wait until that is there, perhaps until random numbers have been drawn, though
nearly always it is a condition on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.decisions import is_size
from hexa_fx.passes.detect.graph import ancestors, draws, einsum_of, is_tensor


@dataclass(frozen=True)
class Dim:
    """One size of a tensor of the recorded run; ``dim`` is not negative."""

    tensor: Node
    dim: int


Origin = Dim | Node | int
"""A size as that of a tensor, as a recorded number, or as a constant of the code."""

Rule = Callable[[Node, int], Origin | list[Dim] | None]


def trace_sizes(graph: torch.fx.Graph) -> None:
    """Makes the sizes that decisions and draws hinge on those of the tensors that they are copies of. Recorded values stay as they
    are.
    """
    hinging = [node for node in graph.nodes if node.op != "output" and (record_of(node).decision or draws(node))]
    behind = {node for decision in hinging for node in ancestors([decision], stop=is_size)}
    sizes = {node for node in behind if operation(node) in ("size", "numel", "nelement")}
    asked = {size for size in sizes if isinstance(size.args[0], Node) and size.args[0].op.startswith("call")}
    if not asked:
        return
    behind = ancestors(asked)
    origins = _Origins([node for node in graph.nodes if node in behind])
    for size in [node for node in graph.nodes if node in asked]:
        _trace(size, origins)


def _trace(size: Node, origins: _Origins) -> None:
    tensor = size.args[0]
    assert isinstance(tensor, Node)
    if operation(size) != "size":
        whole = [origins.of(Dim(tensor, dim)) for dim in range(dims_of(tensor))]
        source = whole[0].tensor if whole and isinstance(whole[0], Dim) else tensor
        if whole == [Dim(source, dim) for dim in range(dims_of(source))]:
            size.args = (source, *size.args[1:])
        return
    found = origins.of(_dim_of(size))
    if isinstance(found, Dim):
        size.args = (found.tensor, found.dim)
        return

    def exchanged(node: Node) -> Node | int:
        return found if node is size else node

    for user in list(size.users):
        user.args, user.kwargs = torch.fx.map_arg((user.args, user.kwargs), exchanged)
    if isinstance(found, Node):
        record_of(found).decision |= record_of(size).decision


def _dim_of(size: Node) -> Dim:
    tensor, dim = size.args
    assert isinstance(tensor, Node)
    assert isinstance(dim, int)
    return Dim(tensor, dim % dims_of(tensor))


def leading_sizes(node: Node) -> list[Origin] | None:
    """The sizes of a recorded tensor but for the last, if they are sizes of inputs, numbers that the code computes, or constants;
    one of them may be -1, which the others and the number of elements decide."""
    behind = ancestors([node])
    origins = _Origins([each for each in node.graph.nodes if each in behind])
    found = [origins.of(Dim(node, dim)) for dim in range(dims_of(node) - 1)]
    known = [size if not isinstance(size, Dim) or size.tensor.op == "placeholder" else -1 for size in found]
    return known if known.count(-1) <= 1 else None


class _Origins:
    """What the sizes of recorded tensors are copies of, as far as that is certain for inputs of any sizes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._known: dict[Dim, Origin] = {}
        for node in nodes:
            if is_tensor(node) and node.op.startswith("call") and node.args:
                self._known |= {Dim(node, dim): self._found(node, dim) for dim in range(dims_of(node))}

    def of(self, size: Dim) -> Origin:
        """The size itself if it is a copy of none."""
        return self._known.get(size, size)

    def _found(self, node: Node, dim: int) -> Origin:
        found = copied_from(node, dim)
        if isinstance(found, list):
            found = self._one_of(found)
        if isinstance(found, Node) and is_size(found) and operation(found) == "size":
            found = _dim_of(found)
        if found is None:
            return Dim(node, dim)
        return self.of(found) if isinstance(found, Dim) else found

    def _one_of(self, sizes: Iterable[Dim]) -> Origin | None:
        """The size of a result whose operands have these: known if they are equal, or 1 for sure."""
        found = {item for item in map(self.of, sizes) if item != 1 and not _is_one_of_weight(item)}
        return found.pop() if len(found) == 1 else None


def _is_one_of_weight(size: Origin) -> bool:
    return isinstance(size, Dim) and size.tensor.op == "get_attr" and record_of(size.tensor).value.shape[size.dim] == 1


# -- what operations take sizes from -------------------------------------------------------------------------------------

_keeps_shape = ops.of(
    "to float double half bfloat16 type_as long int cpu cuda clone contiguous detach after dropout softmax log_softmax layer_norm "
    "rms_norm cumsum zeros_like ones_like empty_like full_like rand_like randn_like index_add scatter scatter_add index_copy "
    "index_put requires_grad set_item copy gelu silu relu sigmoid tanh"
)
"""Operations whose result has the shape of the first operand."""

_RESHAPING = frozenset("squeeze_ unsqueeze_ resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ set_".split())


def copied_from(node: Node, dim: int) -> Origin | list[Dim] | None:
    """What gives the result of a call its size ``dim``: one size, or those of operands that are broadcast; None if it is new."""
    name, given = operation(node), node.args[0]
    if "out" in node.kwargs or name in _RESHAPING:
        return None
    if record_of(node).writes or _keeps_shape(node):
        alike = isinstance(given, Node) and is_tensor(given) and dims_of(given) == dims_of(node)
        return _of_operand(given, dim) if alike else None
    rule = _RULES.get(name)
    if rule is None and ops.works_on_each(node) and kind(node) not in ("min", "max"):
        return _broadcast(node, dim)
    return None if rule is None else rule(node, dim)


def _of_operand(operand: Any, dim: int) -> Origin | None:
    return Dim(operand, dim) if isinstance(operand, Node) and is_tensor(operand) else None


def _number(value: Any) -> Origin | None:
    if isinstance(value, Node):
        return None if is_tensor(value) else value
    return value if isinstance(value, int) and value >= 0 else None


def _broadcast(node: Node, dim: int) -> list[Dim]:
    missing = {operand: dims_of(node) - dims_of(operand) for operand in node.all_input_nodes if is_tensor(operand)}
    return [Dim(operand, dim - less) for operand, less in missing.items() if dim >= less]


def dims_of(node: Node) -> int:
    """Number of dimensions of a recorded tensor."""
    return int(record_of(node).value.dim())


def _view(node: Node, dim: int) -> Origin | None:
    sizes: Any = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):  # given as one, not one by one
        (sizes,) = sizes
    return _number(sizes[dim]) if len(sizes) == dims_of(node) else None


def _product(node: Node, dim: int) -> Origin | None:
    """Of a product with a matrix, or of stacks of matrices."""
    matrix = node.args[1] if len(node.args) > 1 else None
    flat = isinstance(matrix, Node) and (operation(node) == "linear" or dims_of(matrix) == 2)
    rows = dim < (2 if operation(node) == "bmm" else dims_of(node) - 1)
    return _of_operand(node.args[0], dim) if rows and (flat or operation(node) == "bmm") else None


def _stack(node: Node, dim: int) -> Origin | list[Dim] | None:
    parts, *given = node.args
    new = node.kwargs.get("dim", given[0] if given else 0)
    if not isinstance(parts, (list, tuple)) or not isinstance(new, int):
        return None
    new %= dims_of(node)
    if dim == new:
        return len(parts)
    return [Dim(part, dim - (dim > new)) for part in parts if isinstance(part, Node) and is_tensor(part)]


def _einsum(node: Node, dim: int) -> list[Dim] | None:
    terms, operands, result = einsum_of(node) or ([], [], "")
    found = ((n, term.find(result[dim])) for n, term in zip(operands, terms)) if dim < len(result) else ()
    return [Dim(operand, at) for operand, at in found if at >= 0] or None


_RULES: dict[str, Rule] = {
    "stack": _stack,
    "einsum": _einsum,
    "view": _view,
    "reshape": _view,
    **dict.fromkeys(("linear", "matmul", "mm", "bmm"), _product),
}
"""Those that matter in routers and between layers; of any other operation's result a size is its own."""
