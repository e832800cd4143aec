"""Experts that are rows of tables, looked up by chosen ids: vectors, whose products with tokens are no products of matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.overlooked import LOOKED_UP
from hexa_fx.passes.detect.graph import is_chosen, operation
from hexa_fx.passes.detect.tags import ExpertGroups
from hexa_fx.passes.detect.verdict import Refuse


def only_looked_up(captured: CapturedBlock, groups: ExpertGroups) -> Refuse | None:
    """What to say of a block that looks the same chosen ids up in several tables, and holds no other parameters of as many experts.

    None if it does not: one table alone may be a codebook, and one beside experts a scale of theirs.
    """
    tables: list[tuple[torch.fx.Node, torch.Tensor, str]] = []
    for node, name, ids in _look_ups(captured):
        if is_chosen(ids):
            tables.append((node, record_of(ids).value.flatten(), name))
    for node, rows, _ in tables:
        alike = dict.fromkeys(name for _, others, name in tables if torch.equal(others, rows))
        counts = {len(captured.tensor_of(name)) for name in alike}
        if len(alike) > 1 and len(counts) == 1 and not _has_others(captured, groups, counts.pop()):
            kind = "nn.Embedding" if operation(node) == "embedding" else "parameters"
            names = (name.removesuffix(".weight") if kind == "nn.Embedding" else name for name in alike)
            return Refuse(LOOKED_UP.format(kind, ", ".join(names)), node)
    return None


def _look_ups(captured: CapturedBlock) -> Iterator[tuple[torch.fx.Node, str, torch.fx.Node]]:
    """Calls that take rows of a matrix, its name, and the ids."""
    for node in captured.graph.nodes:
        given = [item for item in node.args if isinstance(item, torch.fx.Node)]
        if operation(node) not in ("embedding", "getitem", "index_select") or len(given) != 2:
            continue
        ids, table = given if operation(node) == "embedding" else reversed(given)
        is_index = isinstance(record_of(ids).value, torch.Tensor) and record_of(ids).value.dtype == torch.int64
        if table.op == "get_attr" and record_of(table).value.dim() == 2 and is_index:
            yield node, str(table.target), ids


def _has_others(captured: CapturedBlock, groups: ExpertGroups, count: int) -> bool:
    """Whether there are parameters of ``count`` experts beside the tables, stacked or in a list."""
    stacked = (p for p in captured.block.parameters() if p.dim() > 2)
    return any(len(p) == count for p in stacked) or any(len(names) == count for names in groups.members.values())
