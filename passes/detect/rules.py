"""Static rules: what numbers cannot tell, because the trace holds one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.graph import ancestors, is_float, operation
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

_SELECTIONS = frozenset(
    "topk argmax argmin argsort sort one_hot nonzero where bincount histc scatter scatter_ eq unique max min __eq__ multinomial "
    "isin searchsorted cumsum".split()
)


@dataclass(frozen=True)
class ShapeBranch:
    """A host decision on sizes: the rewritten graph holds only while ``condition`` keeps its recorded ``outcome``."""

    condition: torch.fx.Node
    outcome: bool


def shape_branches(
    captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag], routing: set[torch.fx.Node]
) -> tuple[ShapeBranch, ...]:
    """Checks every host decision of the run.

    A decision that follows from the routing is replaced by the expert-specific operators. One that follows from sizes alone
    becomes a guard. Any other makes the trace valid for this input only.

    Raises:
        Refuse: a decision depends on data other than the routing, or turns a size into a plain number.
    """
    inside_calls = _inside_module_calls(captured)
    guards = []
    for node in captured.graph.nodes:
        if node.op == "output" or not record_of(node).decision or node in inside_calls:
            continue
        behind = ancestors([node])
        if behind & routing or any(operation(n) in _SELECTIONS for n in behind):
            continue
        if any(tags[n].experts and not tags[n].weight for n in behind):
            raise Refuse("the code takes a decision on expert outputs", node)
        if not any(n.op == "placeholder" for n in behind):
            continue
        if any(is_float(n) and n.op != "placeholder" and _read_by_value(n, behind) for n in behind):
            raise Refuse("the code takes a decision that depends on the data and not on the routing", node)
        guard = _guard(node)
        if guard is not None:
            guards.append(guard)
    return tuple(guards)


def _inside_module_calls(captured: CapturedBlock) -> set[torch.fx.Node]:
    """Decisions of submodules that stay calls are taken again at run time. A call with expert weights inside does not stay."""
    order = [node for node in captured.graph.nodes if node.op != "output"]
    inside: set[torch.fx.Node] = set()
    for call in captured.calls:
        nodes = order[call.start : call.end]
        if not any(node.op == "get_attr" and ".experts" in f".{node.target}" for node in nodes):
            inside.update(nodes)
    return inside


def _read_by_value(node: torch.fx.Node, behind: set[torch.fx.Node]) -> bool:
    """Whether a value (not just a size) of a float tensor reaches the decision."""
    return any(user in behind and operation(user) not in ("size", "numel", "nelement", "dim") for user in node.users)


def _guard(node: torch.fx.Node) -> ShapeBranch | None:
    value = record_of(node).value
    if operation(node) in ("size", "numel", "nelement"):
        return None  # len(x), range(n): a loop over rows is only legitimate inside the experts, which verification sees
    return ShapeBranch(node, bool(value)) if isinstance(value, bool) else None
