"""Reads a reshaped tensor where it was before: ``x.reshape(-1).reshape(-1, 2)`` becomes ``x.reshape(-1, 2)``, or ``x``.

Code that sorts tokens flattens the routing first, and the region reads it a row a token again. Only reshapes that
rewriting put in are led past: nothing writes to what they give, so that it does not matter whether it is a view or a copy.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
import torch.fx

_KEEP_ORDER = ("reshape", "view", "flatten", "contiguous")


def fold_views(graph: torch.fx.Graph) -> None:
    """Changes the graph in place. What nothing reads any more is left for the caller to drop."""
    for node in graph.find_nodes(op="call_method", target="reshape"):
        if "from" in node.meta:  # the user's own, whose result may be written to
            continue
        source = node.args[0]
        while _is_passed_by(source, node):
            source = source.args[0]
        node.update_arg(0, source)


def fold_rows(
    graph: torch.fx.Graph, given: Mapping[torch.fx.Node, torch.Tensor], widths: Container[int]
) -> set[torch.fx.Node]:
    """Inputs that rewriting reads as rows of just as many numbers as they have in their last dimension.

    The block is right with these inputs only while that stays so. Where they have two dimensions, they are read as they are.

    Args:
        given: inputs of the graph, and what the block was recorded with.
        widths: how many numbers a row has, of the rows that count.
    """
    found = set()
    for node, value in given.items():
        for user in list(node.users):
            rows = user.op == "call_method" and user.target == "reshape" and "from" not in user.meta
            if not rows or value.dim() < 2 or value.shape[-1] not in widths or user.args[1:] != (-1, value.shape[-1]):
                continue
            found.add(node)
            if value.dim() == 2:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    return found


def _is_passed_by(inner: torch.fx.Node, reader: torch.fx.Node) -> bool:
    """Whether a view holds its source's numbers in their order, and still does when its reader runs."""
    if inner.op != "call_method" or inner.target not in _KEEP_ORDER or not isinstance(inner.args[0], torch.fx.Node):
        return False
    node = inner.next
    while node is not reader:
        if _may_write(node):
            return False
        node = node.next
    return True


def _may_write(node: torch.fx.Node) -> bool:
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op == "call_module" or in_place or name in ("set_item", "after") or "out" in node.kwargs
