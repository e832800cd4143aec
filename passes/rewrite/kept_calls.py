"""Decides which recorded nodes the rewritten graph keeps, and which submodule calls stay calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch.fx

from hexa_fx import operations as ops
from hexa_fx.capture import UNKNOWN, Access, CapturedBlock, ModuleCall, StoredValue, functional, record_of
from hexa_fx.capture.probes import LARGEST_LIMIT, limits_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.graph import ancestors, draws, effects, is_tensor, literals, nodes_in, writes_outside
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.runtime.attribute_guards import is_within


@dataclass(frozen=True)
class KeptNodes:
    """What the rewritten graph keeps of the recorded one.

    Args:
        order: nodes to emit, in recorded order; a call is emitted where its first result stands.
        calls: the submodule call behind each result node.
        rereads: a write by such a call into its own argument -> how to read the argument afterwards.
        stand_ins: a write inside a call that stays a call -> a result of that call, which later reads are ordered after.
    """

    order: tuple[torch.fx.Node, ...]
    calls: Mapping[torch.fx.Node, ModuleCall]
    stand_ins: Mapping[torch.fx.Node, torch.fx.Node]
    rereads: Mapping[torch.fx.Node, Reread]


@dataclass(frozen=True)
class Reread:
    """The value of an argument after a kept call wrote into it: ``argument`` read again once ``result`` is there."""

    argument: torch.fx.Node
    result: torch.fx.Node


def keep(captured: CapturedBlock, roots: Iterable[torch.fx.Node], outputs: Sequence[torch.fx.Node]) -> KeptNodes:
    """What is needed for ``roots``, the block's results and its effects, without looking behind the regions' ``outputs``.

    A submodule call stays a call, so that its hooks run (a model may collect its router logits that way) and its own control
    flow is taken anew; so does that of an `autograd.Function`, whose backward is its own. A value inside it that is needed by
    name is computed again beside it, from the call's results as far as they lead to it; where that would draw random numbers or
    write twice, the call is opened instead.
    """
    order = [node for node in captured.graph.nodes if node.op != "output"]
    position = {node: index for index, node in enumerate(order)}
    wanted = [*roots, *nodes_in(captured.output)]
    places = [position[node] for node in outputs]
    calls = _candidates(captured, places)
    while True:
        by_result = {node: call for call in calls for node in nodes_in(call.output)}
        stand_ins, rereads = _writes_of_calls(calls, order, by_result)
        needed = _needed([*wanted, *_effects(captured, calls, position)], by_result, stand_ins, rereads, outputs)
        outside = needed - rereads.keys()
        opened = [call for call in calls if _inner_needed(call, order, outside, by_result)]
        torn = [call for call in opened if not _repeatable(_inner_needed(call, order, outside, by_result))]
        if torn:
            calls = [c for c in calls if c not in torn] + _inner_calls(torn, captured, places)
            continue
        unseen = [nodes_in(call.output)[0] for call in opened if not needed & set(nodes_in(call.output))]
        if not unseen:
            place = position | {
                node: max(position[n] for n in nodes_in(by_result[reread.result].output)) + 0.5
                for node, reread in rereads.items()
            }
            return KeptNodes(tuple(sorted(needed, key=place.__getitem__)), by_result, stand_ins, rereads)
        wanted += unseen


def refuse_late_conditions(
    conditions: Collection[torch.fx.Node], order: Sequence[torch.fx.Node], kept: KeptNodes
) -> None:
    """Where a condition fails the original runs from its beginning, so nothing may have been written or drawn by then.

    Checks for NaN, and for none or one, as torch.distributions makes them, may come after random numbers.

    Raises:
        Refuse: something is, among what is emitted in this ``order`` before a condition.
    """
    written = drawn = False
    for node in order:
        if node in conditions and (written or (drawn and _compares_with_limit(node))):
            raise Refuse(
                "the code takes a host decision (if, while, item()) after it has drawn random numbers, or has written to its input "
                "or to a buffer; a decision that comes first can be rewritten",
                node,
            )
        call = kept.calls.get(node)
        inside = [node] if call is None else list(node.graph.nodes)[call.start : call.end]
        written = written or any(map(writes_outside, inside))
        drawn = drawn or any(map(draws, inside))


def _compares_with_limit(condition: torch.fx.Node) -> bool:
    """Whether it is a condition on sizes, with a number other than 0 and 1."""
    asked = ancestors([condition], stop=lambda node: operation(node) in ops.SIZES)
    made = [node for node in asked if operation(node) not in ops.SIZES]
    return not any(map(is_tensor, made)) and any(number not in (0, 1) for number in literals(made))


def _usable(captured: CapturedBlock, places: Sequence[int]) -> list[ModuleCall]:
    """Calls with results that run no region, whose outputs are at ``places``; of two with the same nodes the outer one is later."""
    return [
        call
        for call in (*captured.functions, *captured.calls)
        if nodes_in(call.output) and call.end > call.start
        if not any(call.start <= place < call.end for place in places)
    ]


def _candidates(captured: CapturedBlock, places: Sequence[int]) -> list[ModuleCall]:
    """The outermost usable calls."""
    return _outermost(_usable(captured, places))


def _inner_calls(torn: Sequence[ModuleCall], captured: CapturedBlock, places: Sequence[int]) -> list[ModuleCall]:
    """The next level of calls, inside calls that cannot stay."""
    usable = _usable(captured, places)
    inside = ([c for c in usable[: usable.index(t)] if t.start <= c.start and c.end <= t.end] for t in torn)
    return _outermost(list(chain.from_iterable(inside)))


def _outermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls that no other one covers, in one walk over where they start."""
    spans = {(call.start, call.end): call for call in calls}  # the outer one of a wrapper and what it calls
    outer, furthest = [], 0
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if end > furthest:
            outer.append(spans[start, end])
        furthest = max(furthest, end)
    return outer


def _writes_of_calls(
    calls: Sequence[ModuleCall], order: Sequence[torch.fx.Node], by_result: Mapping[torch.fx.Node, ModuleCall]
) -> tuple[dict[torch.fx.Node, torch.fx.Node], dict[torch.fx.Node, Reread]]:
    stand_ins, rereads = {}, {}
    for call in calls:
        inside, result = set(order[call.start : call.end]), nodes_in(call.output)[0]
        for node in order[call.start : call.end]:
            if node in by_result or not record_of(node).writes:
                continue
            stand_ins[node] = result
            argument = _written_argument(node, inside)
            if argument is not None:
                rereads[node] = Reread(argument, result)
    return stand_ins, rereads


def _written_argument(write: torch.fx.Node, inside: set[torch.fx.Node]) -> torch.fx.Node | None:
    """The node outside the call that is the written tensor itself; None if the tensor is the call's own or a view."""
    record, node = record_of(write), write
    while node in inside:
        if not node.args or not isinstance(node.args[0], torch.fx.Node):
            return None
        node = node.args[0]
        same_memory = record_of(node).storage == record.storage
        if not same_memory or record_of(node).value.shape != record.value.shape:
            return None
    return node


def _needed(
    wanted: Sequence[torch.fx.Node],
    by_result: Mapping[torch.fx.Node, ModuleCall],
    stand_ins: Mapping[torch.fx.Node, torch.fx.Node],
    rereads: Mapping[torch.fx.Node, Reread],
    outputs: Sequence[torch.fx.Node],
) -> set[torch.fx.Node]:
    needed: set[torch.fx.Node] = set(outputs)
    frontier = list(wanted)
    while frontier:
        node = frontier.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in by_result:
            call = by_result[node]
            frontier.extend((*nodes_in(call.output), *nodes_in(call.args), *nodes_in(call.kwargs)))
        elif node in rereads:
            frontier.extend((rereads[node].argument, rereads[node].result))
        elif node.target is functional.after:
            read, write = node.all_input_nodes
            frontier.extend((read, stand_ins.get(write, write)))
        else:
            frontier.extend(node.all_input_nodes)
    return needed


def opened(captured: CapturedBlock, kept: KeptNodes) -> set[str]:
    """Paths of the submodules that are called and of whose insides something is computed beside the call too."""
    order = list(captured.graph.nodes)
    inside = {node: call.path for call in kept.calls.values() for node in order[call.start : call.end]}
    return {inside[node] for node in kept.order if node in inside and node not in kept.calls and node.op != "get_attr"}


def _inner_needed(
    call: ModuleCall,
    order: Sequence[torch.fx.Node],
    needed: set[torch.fx.Node],
    by_result: Mapping[torch.fx.Node, ModuleCall],
) -> list[torch.fx.Node]:
    """Nodes inside a call, not its results, that are needed by name."""
    return [node for node in order[call.start : call.end] if node in needed and by_result.get(node) is not call]


def _repeatable(nodes: Sequence[torch.fx.Node]) -> bool:
    """Whether nodes may run twice: they neither draw random numbers nor write."""
    return not any(ops.is_random(node) or record_of(node).writes for node in nodes)


def _effects(
    captured: CapturedBlock, calls: Sequence[ModuleCall], position: Mapping[torch.fx.Node, int]
) -> list[torch.fx.Node]:
    """Writes to the block's state, without those that calls which stay calls will make."""
    found = []
    for node in effects(captured.graph):
        holder = [call for call in calls if call.start <= position[node] < call.end]
        found.extend(nodes_in(holder[0].output)[:1] if holder else [node])
    return found


def replaced(captured: CapturedBlock, kept: KeptNodes) -> frozenset[str]:
    """Paths of the submodules of which the rewritten graph makes a call neither itself nor inside of another."""
    spans = sorted({(kept.calls[node].start, kept.calls[node].end) for node in kept.order if node in kept.calls})
    starts = [start for start, _ in spans]
    ends = [*(end for _, end in spans), -1]
    calls = captured.calls
    return frozenset(call.path for call in calls if call.end > ends[bisect_right(starts, call.start) - 1])


def left_by_opened(
    captured: CapturedBlock, called: Collection[str], stored: Iterable[Access | StoredValue]
) -> tuple[StoredValue, ...]:
    """What the code of submodules sets as attributes, where these are not ``called``, and of which ``stored`` has nothing.

    Not what is no tensor of this run, or follows from what an earlier one kept.
    """
    known = {id(item) for item in stored}

    def is_made_here(item: StoredValue) -> bool:
        behind = () if item.value is UNKNOWN else ancestors(nodes_in(item.value))
        return item.value is not UNKNOWN and not any(
            n.op == "get_attr" and n.target in captured.recalled for n in behind
        )

    lost = (item for item in captured.stored if not any(is_within(scope, called) for scope in item.scopes))
    return tuple(item for item in lost if id(item) not in known and is_made_here(item))


def refuse_far_limits(removed: Iterable[torch.fx.Node], match: MoEMatch) -> None:
    """Refuses ``removed`` code that cuts rows, or compares counts, at more tokens than verification sends to an expert.

    Raises:
        Refuse: some does.
    """
    tokens, top_k = record_of(match.source).value, match.routing.top_k
    tried = LARGEST_LIMIT if _can_be_forced(match) else top_k * tokens.numel() // max(1, tokens.shape[-1])
    for node in removed:
        limit = max(limits_of(node), default=0)
        if limit > tried:
            raise Refuse(
                f"the code cuts lists of tokens, or compares how many there are, at {limit}, and no run of verification sends "
                f"more than {tried} to an expert; without that limit, or with one that is reached, it can be rewritten",
                node,
            )


def _can_be_forced(match: MoEMatch) -> bool:
    """Whether verification can have all tokens choose the same experts: by what chooses them, or as ids that are given."""
    behind = ancestors(match.routing.index.nodes)
    chosen = any(map(ops.picks_best, behind)) or any(kind(n) == "max" for n in behind)
    return chosen or (match.is_given_ids and not any(n.op == "get_attr" for n in behind))
