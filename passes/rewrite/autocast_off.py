"""Where the code has switched autocast off, a rewritten block under autocast computes without it, too: a router in float32, say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.graph import ancestors, descendants, is_float
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.runtime.attribute_guards import called_in, is_within
from hexa_fx.runtime.autocast import WITHOUT_AUTOCAST

_alike = ops.of("add sub mul div")
_INSIDE = (
    "the code switches autocast off for what its experts compute; around its router, or around the block, it can stay"
)
_AROUND = (
    "the code switches autocast off around some calls of a submodule, or around one that switches it, too; around the block, or "
    "inside of the submodule, it can stay"
)


def mark_without_autocast(
    graph: torch.fx.Graph,
    new: Mapping[torch.fx.Node, torch.fx.Node],
    captured: CapturedBlock,
    regions: Sequence[MoEMatch],
) -> None:
    """Marks the nodes of ``graph`` that compute with autocast off, for `hexa_fx.runtime.program`.

    Args:
        new: the nodes of ``graph``, by those of the recorded graph.
        regions: those of the block.

    Raises:
        Refuse: experts compute with autocast off, or one cannot tell how a submodule is called.
    """
    called = called_in(graph)
    off = {node: record_of(node).autocast_off for node in captured.graph.nodes if record_of(node).autocast_off}
    if not off or all(is_within(scope, called) for scope in captured.in_autocast):
        return
    inside = _inside(captured, new, [match.output for match in regions], called)
    inside.update(
        node for match in regions for each in match.steps for step in (each, *each.alike) for node in step.nodes
    )
    for node, device in off.items():
        if node in inside:
            raise Refuse(_INSIDE, node)
        copy = new.get(node, node)
        copied = copy.meta.get("from") == node.name and copy.op in ("call_function", "call_method")
        if copied and is_float(node) and not _is_as_it_is(node):
            copy.meta[WITHOUT_AUTOCAST] = device
    for call in graph.find_nodes(op="call_module"):
        _mark_call(call, captured, off)


def _mark_call(call: torch.fx.Node, captured: CapturedBlock, off: Mapping[torch.fx.Node, str]) -> None:
    path = {str(call.target)}
    nodes = [node for node in captured.graph.nodes if is_within(record_of(node).scope, path) and is_float(node)]
    devices = {off.get(node, "") for node in nodes} or {""}
    if len(devices) > 1 or (devices != {""} and any(is_within(scope, path) for scope in captured.in_autocast)):
        raise Refuse(_AROUND, next(node for node in nodes if node in off))
    call.meta[WITHOUT_AUTOCAST] = devices.pop()


def _inside(
    captured: CapturedBlock,
    new: Mapping[torch.fx.Node, torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    called: Collection[str],
) -> set[torch.fx.Node]:
    """What is computed with parameters that the new graph reads no more, which are experts', up to ``outputs``."""
    read = (node for node in captured.graph.nodes if node.op == "get_attr" and node not in new and is_float(node))
    weights = [node for node in read if not is_within(record_of(node).scope, called)]
    return descendants(weights) & (ancestors(outputs) | {*outputs})


def _is_as_it_is(node: torch.fx.Node) -> bool:
    """Whether autocast leaves it: moves, choices, new tensors, and arithmetic element by element."""
    return any(asked(node) for asked in (ops.moves, ops.makes, ops.picks_best, ops.selects, ops.is_random, _alike))
