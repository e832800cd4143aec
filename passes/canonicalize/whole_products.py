"""Products with all slices of a listed matrix, side by side or added up, become the one product with the matrix that they are.

Code that was trained with tensor parallelism (``pretraining_tp``) cuts the matrices of every expert, and may do so in train and in
eval mode. What the parts give lies side by side, or is added up where their inputs are slices of the same rows.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch.fx
import torch.nn.functional as F

from hexa_fx.capture import CapturedBlock, ModuleCall, record_of
from hexa_fx.operations import operation
from hexa_fx.passes.detect.tags import expert_groups


def with_whole_products(captured: CapturedBlock) -> CapturedBlock:
    """The block with these products as one. Changes the recorded graph."""
    graph = captured.graph
    if not any(operation(node) in ("split", "chunk") for node in graph.nodes if node.op.startswith("call")):
        return captured
    listed = {name for names in expert_groups(captured.named_tensors()).members.values() for name in names}
    order = list(graph.nodes)
    unused = {node for node in order if not node.users}
    if not [node for node in order if _joined(node, listed)]:
        return captured
    for node in order:
        _joined(
            node, captured.named_tensors().keys()
        )  # in shared experts of the same code, whose parts look like experts
    for node in reversed(order):
        if not node.users and node not in unused:
            graph.erase_node(node)
    left = set(graph.nodes)
    places = [0]
    for node in order:
        places.append(places[-1] + (node in left))
    calls, functions = _moved(captured.calls, places), _moved(captured.functions, places)
    return dataclasses.replace(captured, calls=calls, functions=functions)


def _moved(calls: Iterable[ModuleCall], places: Sequence[int]) -> tuple[ModuleCall, ...]:
    return tuple(dataclasses.replace(call, start=places[call.start], end=places[call.end]) for call in calls)


def _joined(node: torch.fx.Node, listed: Collection[str]) -> bool:
    """Makes a node the product with a whole matrix, if that is what it is; whether it did."""
    if not node.op.startswith("call"):
        return False
    name = operation(node)
    if name == "cat":
        parts = node.args[0]
        last = record_of(node).value.dim() - 1
        if (node.args[1:] or (node.kwargs.get("dim", 0),))[0] not in (-1, last) or not isinstance(parts, (list, tuple)):
            return False
        products = [_product(part) for part in parts]
        inputs = {rows for rows, _ in filter(None, products)}
        whole = _whole([product and product[1] for product in products], 0)
        source = inputs.pop() if len(inputs) == 1 else None
    elif name in ("add", "add_", "__add__", "__radd__", "iadd") and not any("add" in operation(u) for u in node.users):
        products = [_product(part) for part in _added(node)]
        source = _whole([product and product[0] for product in products], -1)
        whole = _whole([product and product[1] for product in products], 1)
    else:
        return False
    if source is None or whole is None or whole.op != "get_attr" or whole.target not in listed:
        return False
    node.op, node.target, node.args, node.kwargs = "call_function", F.linear, (source, whole), {}
    return True


def _product(node: Any) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """Rows and matrix of ``F.linear`` without a bias."""
    if not isinstance(node, torch.fx.Node) or operation(node) != "linear" or len(node.users) != 1 or node.kwargs:
        return None
    nodes = [arg for arg in node.args if isinstance(arg, torch.fx.Node)]
    return (nodes[0], nodes[1]) if len(nodes) == 2 else None


def _added(node: Any) -> list[Any]:
    """What a chain of sums adds up, as ``sum()`` does: its zero is left out."""
    if not isinstance(node, torch.fx.Node) or "add" not in operation(node) or len(node.args) != 2 or node.kwargs:
        return [node]
    return [part for arg in node.args if arg != 0 for part in _added(arg)]


def _whole(parts: Sequence[Any], dim: int) -> torch.fx.Node | None:
    """The tensor of which these are all the slices along ``dim``, in order."""
    if not parts or not all(isinstance(part, torch.fx.Node) and part.target is operator.getitem for part in parts):
        return None
    cuts = {part.args[0] for part in parts}
    cut = cuts.pop()
    if cuts or not isinstance(cut, torch.fx.Node) or operation(cut) not in ("split", "chunk"):
        return None
    whole, *given = cut.args
    along = cut.kwargs.get("dim", given[1] if len(given) > 1 else 0)
    if not isinstance(whole, torch.fx.Node) or not isinstance(along, int):
        return None
    dims = record_of(whole).value.dim()
    numbers = [part.args[1] for part in parts]
    complete = numbers == list(range(len(record_of(cut).value)))
    return whole if complete and along % dims == dim % dims else None
