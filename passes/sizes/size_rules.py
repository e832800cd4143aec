"""Where recorded operations take the sizes of their results from, as far as that is so for inputs of any sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import record_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import einsum_of, is_tensor

Node = torch.fx.Node


@dataclass(frozen=True)
class Dim:
    """One size of a tensor of the recorded run; ``dim`` is not negative."""

    tensor: Node
    dim: int


Origin = Dim | Node | int
"""A size as that of a tensor, as a recorded number, or as a constant of the code."""

Rule = Callable[[Node, int], Origin | list[Dim] | None]

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
    sizes = list(flat(node.args[1:]))
    return _number(sizes[dim]) if len(sizes) == dims_of(node) else None


def _like_second(node: Node, dim: int) -> Origin | None:
    return _of_operand(node.args[1], dim) if len(node.args) > 1 else None


def _made(node: Node, dim: int) -> Origin | None:
    sizes = list(flat(node.args[1:] if operation(node).startswith("new_") else node.args))
    return _number(sizes[dim]) if len(sizes) == dims_of(node) else None


def _expand(node: Node, dim: int) -> Origin | None:
    sizes = list(flat(node.args[1:]))
    if len(sizes) != dims_of(node) or not isinstance(node.args[0], Node):
        return None
    if sizes[dim] != -1:
        return _number(sizes[dim])
    return _of_operand(node.args[0], dim - (dims_of(node) - dims_of(node.args[0])))


def _product(node: Node, dim: int) -> Origin | None:
    """Of a product with a matrix, or of stacks of matrices."""
    matrix = node.args[1] if len(node.args) > 1 else None
    flat = isinstance(matrix, Node) and (operation(node) == "linear" or dims_of(matrix) == 2)
    rows = dim < (2 if operation(node) == "bmm" else dims_of(node) - 1)
    return _of_operand(node.args[0], dim) if rows and (flat or operation(node) == "bmm") else None


def _transpose(node: Node, dim: int) -> Origin | None:
    dims = dims_of(node)
    first, second = (0, 1) if operation(node) == "t" else node.args[1:3] if len(node.args) == 3 else (None, None)
    if not isinstance(first, int) or not isinstance(second, int) or dims < 2:
        return None
    swapped = {first % dims: second % dims, second % dims: first % dims}
    return _of_operand(node.args[0], swapped.get(dim, dim))


def _permute(node: Node, dim: int) -> Origin | None:
    order = [item for item in flat(node.args[1:]) if isinstance(item, int)]
    return _of_operand(node.args[0], order[dim] % dims_of(node)) if len(order) == dims_of(node) else None


def _unsqueeze(node: Node, dim: int) -> Origin | None:
    new = node.args[1] if len(node.args) > 1 else None
    if not isinstance(new, int):
        return None
    new %= dims_of(node)
    return 1 if dim == new else _of_operand(node.args[0], dim - (dim > new))


def _flatten(node: Node, dim: int) -> Origin | None:
    given = dict(zip(("start_dim", "end_dim"), node.args[1:]))
    start, end = ({**given, **node.kwargs}.get(name, default) for name, default in (("start_dim", 0), ("end_dim", -1)))
    if not isinstance(node.args[0], Node) or not isinstance(start, int) or not isinstance(end, int):
        return None
    dims = max(1, dims_of(node.args[0]))
    start, end = start % dims, end % dims
    if dim == start and start != end:
        return None
    return _of_operand(node.args[0], dim if dim < start or start == end else dim + end - start)


def _reduced(node: Node, dim: int) -> Origin | None:
    """Of a sum or the like over given dimensions."""
    over = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    over = [over] if isinstance(over, int) else over
    if not isinstance(over, (list, tuple)) or not all(isinstance(item, int) for item in over):
        return None
    dims = dims_of(node.all_input_nodes[0])
    gone = {item % dims for item in over}
    if dims_of(node) == dims:
        return 1 if dim in gone else _of_operand(node.args[0], dim)
    return _of_operand(node.args[0], [item for item in range(dims) if item not in gone][dim])


def _item(node: Node, dim: int) -> Origin | None:
    """Of a subscript of full slices and None, or of one tensor of numbers; of one of the results of topk or sort."""
    given, index = node.args[0], node.args[1]
    if not isinstance(given, Node):
        return None
    if not is_tensor(given):
        return _chosen(given, dim) if operation(given) in ("topk", "sort") else None
    if isinstance(index, Node) and is_tensor(index) and record_of(index).value.dtype not in (torch.bool, torch.uint8):
        inside = dims_of(index)
        return Dim(index, dim) if dim < inside else Dim(given, dim - inside + 1)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is Ellipsis or part == slice(None) for part in parts):
        return None
    named = sum(part == slice(None) for part in parts)
    whole: list[Any] = []
    for part in (*parts, *([] if Ellipsis in parts else [Ellipsis])):
        whole += [slice(None)] * (dims_of(given) - named) if part is Ellipsis else [part]
    return 1 if whole[dim] is None else Dim(given, sum(part is not None for part in whole[:dim]))


def _chosen(choice: Node, dim: int) -> Origin | None:
    place = {"topk": 2}.get(operation(choice), 1)
    over = choice.kwargs.get("dim", choice.args[place] if len(choice.args) > place else -1)
    operand = choice.args[0]
    if not isinstance(over, int) or not isinstance(operand, Node):
        return None
    return None if dim == over % dims_of(operand) else _of_operand(operand, dim)


def _einsum(node: Node, dim: int) -> list[Dim]:
    terms, operands, result = einsum_of(node) or ([], [], "")
    named = [(n, term) for n, term in zip(operands, terms) if isinstance(n, Node) and result[dim] in term]
    return [Dim(n, term.index(result[dim])) for n, term in named]


def flat(value: Any) -> Iterator[Any]:
    """What lies in tuples and lists, however deep: sizes are given one by one or as one tuple."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    else:
        yield value


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES = (
    _each("view reshape", _view)
    | _each("view_as reshape_as expand_as", _like_second)
    | _each("zeros ones empty new_zeros new_ones new_empty", _made)
    | _each("expand", _expand)
    | _each("linear matmul mm bmm", _product)
    | _each("transpose swapaxes swapdims t", _transpose)
    | _each("permute", _permute)
    | _each("unsqueeze", _unsqueeze)
    | _each("flatten", _flatten)
    | _each("sum mean amax amin prod", _reduced)
    | _each("getitem", _item)
    | _each("einsum", _einsum)
)


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
