"""Estimates up to which size a block's own code is faster than its rewrite on a CPU.

On small tensors, calls take the time. A rewrite that saves many calls, such as those of an unrolled loop over experts, is faster at
any size. If the block makes few calls to begin with (a batched product over all experts, two experts, experts of an unusual form),
the rewrite wins only by doing less arithmetic, which does not show on a few thousand numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.graph import operation

_CALLS = {"moe_ffn": 34, "esmm": 30, "reindex": 12, "combine": 10}
"""Calls of torch's operators that take as long as one of ours on a CPU."""

_FREE = frozenset(
    "after chunk contiguous detach dim expand expand_as flatten float getattr getitem narrow permute reshape select size split "
    "squeeze t to transpose unbind unflatten unsqueeze view view_as".split()
)
"""Operations in our graphs that give views or numbers."""

_PRODUCTS = frozenset("addmm baddbmm bmm einsum linear matmul mm".split())
"""Operations whose operands count too: weights gathered for every token are read as often as they are written."""

_FEW_ELEMENTS = 1 << 19
"""Elements that the block's own code may write in the region, and read in products, before arithmetic counts."""


def own_code_limit(captured: CapturedBlock, removed: Iterable[torch.fx.Node], added: Iterable[torch.fx.Node]) -> int:
    """Elements of the first tensor argument up to which the block's own code is faster on a CPU; 0 for none.

    Args:
        captured: the recorded run.
        removed: its nodes that the rewrite drops.
        added: the nodes of the rewritten graph that replace them.
    """
    moved = _moved(captured, set(removed))
    calls = sum(_CALLS.get(operation(node), operation(node) not in _FREE) for node in added if _is_call(node))
    arguments = (record_of(value).value for _, value in captured.arguments if isinstance(value, torch.fx.Node))
    first = next((value for value in arguments if isinstance(value, torch.Tensor)), None)
    if first is None or len(moved) > calls:
        return 0
    return first.numel() * _FEW_ELEMENTS // max(sum(moved), 1)


def _is_call(node: torch.fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def _moved(captured: CapturedBlock, nodes: set[torch.fx.Node]) -> list[int]:
    """Elements that each of ``nodes`` writes, and reads if it is a product, without views and numbers."""
    found, seen = [], set()
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        record = record_of(node)
        new = record.storage not in seen
        seen.add(record.storage)
        if node in nodes and _is_call(node) and isinstance(record.value, torch.Tensor) and (new or record.writes):
            read = node.all_input_nodes if operation(node) in _PRODUCTS else ()
            found.append(sum(_elements(n) for n in (node, *read)))
    return found


def _elements(node: torch.fx.Node) -> int:
    value = record_of(node).value
    return value.numel() if isinstance(value, torch.Tensor) else 0
