"""Which recorded nodes the rewritten graph keeps, and which submodule calls stay calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from hexa_fx.capture import CapturedBlock, ModuleCall
from hexa_fx.passes.detect.graph import effects


@dataclass(frozen=True)
class Kept:
    """Args:
    order: nodes to emit, in recorded order; a call is emitted where its first result stands.
    calls: result node -> the submodule call that gives it.
    """

    order: tuple[torch.fx.Node, ...]
    calls: Mapping[torch.fx.Node, ModuleCall]


def keep(captured: CapturedBlock, roots: Iterable[torch.fx.Node], region_output: torch.fx.Node) -> Kept:
    """What is needed for ``roots``, the block's results and its effects, without looking behind the region's output.

    A submodule call stays a call (so that its hooks run, and its own control flow) unless a node inside it is needed by name.
    """
    results: list[torch.fx.Node] = []
    torch.fx.map_arg(captured.output, results.append)
    order = [node for node in captured.graph.nodes if node.op != "output"]
    position = {node: index for index, node in enumerate(order)}
    wanted = [*roots, *results]
    calls = _candidates(captured, position[region_output])
    while True:
        by_result = {node: call for call in calls for node in _nodes(call.output)}
        needed = _needed([*wanted, *_effects(captured, calls, position)], by_result, region_output)
        torn = [call for call in calls if _is_torn(call, order, needed, by_result)]
        if not torn:
            break
        calls = [call for call in calls if call not in torn] + _inner_calls(torn, captured, position[region_output])
    return Kept(tuple(sorted(needed, key=position.__getitem__)), by_result)


def _nodes(value: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(value, found.append)
    return found


def _covers(outer: ModuleCall, inner: ModuleCall) -> bool:
    return outer is not inner and outer.start <= inner.start and inner.end <= outer.end


def _usable(call: ModuleCall, region_output: int) -> bool:
    outputs = _nodes(call.output)
    return bool(outputs) and call.end > call.start and not call.start <= region_output < call.end


def _candidates(captured: CapturedBlock, region_output: int) -> list[ModuleCall]:
    """The outermost calls that do not run the region."""
    usable = [call for call in captured.calls if _usable(call, region_output)]
    return [call for call in usable if not any(_covers(other, call) for other in usable)]


def _inner_calls(torn: Sequence[ModuleCall], captured: CapturedBlock, region_output: int) -> list[ModuleCall]:
    """The next level of calls inside calls that cannot stay."""
    inner = [c for c in captured.calls if _usable(c, region_output) and any(_covers(t, c) for t in torn)]
    return [c for c in inner if not any(_covers(other, c) for other in inner)]


def _needed(
    wanted: Sequence[torch.fx.Node], by_result: Mapping[torch.fx.Node, ModuleCall], region_output: torch.fx.Node
) -> set[torch.fx.Node]:
    needed: set[torch.fx.Node] = {region_output}
    frontier = list(wanted)
    while frontier:
        node = frontier.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in by_result:
            call = by_result[node]
            frontier.extend((*_nodes(call.output), *_nodes(call.args), *_nodes(call.kwargs)))
        else:
            frontier.extend(node.all_input_nodes)
    return needed


def _is_torn(
    call: ModuleCall,
    order: Sequence[torch.fx.Node],
    needed: set[torch.fx.Node],
    by_result: Mapping[torch.fx.Node, ModuleCall],
) -> bool:
    inside = order[call.start : call.end]
    results = set(_nodes(call.output))
    return any(node in needed and node not in results and by_result.get(node) is not call for node in inside)


def _effects(
    captured: CapturedBlock, calls: Sequence[ModuleCall], position: Mapping[torch.fx.Node, int]
) -> list[torch.fx.Node]:
    """Writes to the block's state. One inside a call that stays a call is made by that call."""
    found = []
    for node in effects(captured.graph):
        holder = [call for call in calls if call.start <= position[node] < call.end]
        found.extend(_nodes(holder[0].output)[:1] if holder else [node])
    return found
