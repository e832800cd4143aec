"""Estimates up to which size a block's own code is faster than its rewrite on a CPU.

On small tensors, calls take the time. A rewrite that saves many calls, such as those of an unrolled loop over experts, is faster at
any size. If the block makes few calls to begin with (a batched product over all experts, two experts, experts of an unusual form),
the rewrite wins only by doing less arithmetic, which does not show on a few thousand numbers. A loop that leaves out experts
without tokens makes few calls on few tokens, and fills no gradients of the others. Backward of our operators is Python, that of
torch's is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import Small
from hexa_fx.operations import operation
from hexa_fx.passes.detect.match import MoEMatch

_CALLS = {"moe_ffn": 34, "esmm": 30, "reindex": 12, "combine": 10}
"""Calls of torch's operators that take as long as one of ours on a CPU."""

_PACKED = 5
"""As many more for every weight that is a list in the user's code: each call looks at all of its parameters."""

_FEW_ELEMENTS = 1 << 19
"""Elements that the block's own code may write in the region, and read in products, before arithmetic counts."""

_BACKWARD = 1.1
"""Times as many calls that ours takes as long as with gradients."""

_FILLED = 5000
"""Elements of a weight's gradient that take as long to fill as a call."""


def own_code_limit(match: MoEMatch, removed: Iterable[Node], added: Iterable[Node], packed: int) -> Small:
    """Elements of the first tensor argument up to which the block's own code is faster on a CPU; 0 for none.

    Args:
        match: what was found in the recorded run.
        removed: nodes of the run that the rewrite drops.
        added: the nodes of the rewritten graph that replace them.
        packed: how many weights it reads through packed storage.
    """
    captured, dropped = match.captured, set(removed)
    moved = _moved(captured, dropped)
    calls = sum(_CALLS.get(operation(node), not _is_free(node)) for node in added if _is_call(node))
    calls += _PACKED * packed
    arguments = (record_of(value).value for _, value in captured.arguments if isinstance(value, Node))
    first = next((value for value in arguments if isinstance(value, torch.Tensor)), None)
    if first is None:
        return Small()
    elements, tokens = first.numel(), max(1, record_of(match.source).value.shape[:-1].numel())

    def limit(calls: float, filled: float) -> int:
        if len(moved) <= calls:
            return elements * _FEW_ELEMENTS // max(sum(moved), 1)
        return int(elements * _tokens_of_few_experts(match, dropped, len(moved), calls, filled) / tokens)

    return Small(limit(calls, 0.0), limit(_BACKWARD * calls, _numbers_of(dropped) / match.num_experts / _FILLED))


def _tokens_of_few_experts(match: MoEMatch, removed: set[Node], moved: int, calls: float, filled: float) -> float:
    """Tokens that choose so few experts that a loop over these alone is faster; 0 if the code runs all of them.

    Args:
        moved: calls that the rewrite saves.
        calls: those that it makes.
        filled: calls that take as long as to fill the gradients of one expert, which the loop leaves out too.
    """
    ran, experts = len(match.instances) or match.num_experts, match.num_experts
    decisions = sum(record_of(node).decision for node in removed)
    if decisions < ran or ran < 2 or match.others:
        return 0.0
    reached = min((calls + experts * filled) / (moved / ran + filled), experts - 0.5)
    return experts / match.routing.top_k * math.log(experts / (experts - reached))


def _numbers_of(nodes: set[Node]) -> int:
    """Elements of the parameters among ``nodes``, each once."""
    values = {record_of(node).storage: record_of(node).value for node in nodes if node.op == "get_attr"}
    return sum(value.numel() for value in values.values() if isinstance(value, torch.Tensor))


def _is_free(node: Node) -> bool:
    """Whether an operation in our graphs gives a view or a number."""
    return ops.views(node) or ops.takes_part(node) or ops.casts(node) or operation(node) in ops.SIZES


def _is_call(node: Node) -> bool:
    return node.op in ("call_function", "call_method")


def _moved(captured: CapturedBlock, nodes: set[Node]) -> list[int]:
    """Elements that each of ``nodes`` writes, and reads if it is a product, without views and numbers."""
    found, seen = [], set()
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        record = record_of(node)
        new = record.storage not in seen
        seen.add(record.storage)
        if node in nodes and _is_call(node) and isinstance(record.value, torch.Tensor) and (new or record.writes):
            # weights gathered for every token are read as often as they are written
            read = node.all_input_nodes if ops.contracts(node) else ()
            found.append(sum(_elements(n) for n in (node, *read)))
    return found


def _elements(node: Node) -> int:
    value = record_of(node).value
    return value.numel() if isinstance(value, torch.Tensor) else 0
