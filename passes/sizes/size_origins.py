"""Traces sizes that the host asks of computed tensors to the sizes that they are copies of, such as those of an input.

A condition on the size of a result would otherwise wait until that is there, and one on what experts compute could not be asked
at all, though nearly always it is a condition on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.counts import is_size
from hexa_fx.passes.detect.graph import ancestors, is_tensor
from hexa_fx.passes.sizes.size_rules import Dim, Origin, copied_from, dims_of

Node = torch.fx.Node


def trace_sizes(graph: torch.fx.Graph) -> None:
    """Makes the sizes that decisions hinge on those of the tensors that they are copies of. Recorded values stay as they are."""
    asked = {n for node in graph.nodes if node.op != "output" and record_of(node).decision for n in _sizes_behind(node)}
    if not asked:
        return
    behind = ancestors(asked)
    origins = _Origins([node for node in graph.nodes if node in behind])
    for size in [node for node in graph.nodes if node in asked]:
        _trace(size, origins)


def _sizes_behind(decision: Node) -> set[Node]:
    """Sizes of tensors that the block has computed."""
    sizes = {node for node in ancestors([decision], stop=is_size) if operation(node) in ("size", "numel", "nelement")}
    return {size for size in sizes if isinstance(size.args[0], Node) and size.args[0].op.startswith("call")}


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
    for user in list(size.users):
        user.args, user.kwargs = (_exchanged(value, size, found) for value in (user.args, user.kwargs))
    if isinstance(found, Node):
        record_of(found).decision |= record_of(size).decision


def _exchanged(value: Any, old: Node, new: Node | int) -> Any:
    return torch.fx.map_arg(value, lambda node: new if node is old else node)


def _dim_of(size: Node) -> Dim:
    tensor, dim = size.args
    assert isinstance(tensor, Node)
    assert isinstance(dim, int)
    return Dim(tensor, dim % dims_of(tensor))


class _Origins:
    """What the sizes of recorded tensors are copies of, as far as that is certain for inputs of any sizes.

    Args:
        nodes: of the graph, in order.
    """

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
