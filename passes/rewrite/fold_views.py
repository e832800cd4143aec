"""Reads a reshaped tensor where it was before: ``x.reshape(-1).reshape(-1, 2)`` becomes ``x.reshape(-1, 2)``, or ``x``.

Code that sorts tokens flattens the routing first, and the region reads it a row a token again. Only reshapes that
rewriting put in are led past: nothing writes to what they give, so that it does not matter whether it is a view or a copy.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
import torch.fx

from hexa_fx.passes.detect.graph import adds_dimension

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
    for reader in graph.find_nodes(op="call_method", target="reshape"):
        node = source = reader.args[0]
        while node not in given and _keeps_order(node):
            node = node.args[0]
        if node not in given or "from" in reader.meta:
            continue
        value = given[node]
        if value.dim() > 1 and value.shape[-1] in widths and reader.args[1:] == (-1, value.shape[-1]):
            found.add(node)
            if value.dim() == 2 and node is source:
                reader.replace_all_uses_with(node)
                graph.erase_node(reader)
    return found


def _keeps_order(node: torch.fx.Node) -> bool:
    """Whether it is a view of all of its first operand's numbers, in their order."""
    return (node.op == "call_method" and node.target in (*_KEEP_ORDER, "unsqueeze", "squeeze")) or adds_dimension(node)


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
