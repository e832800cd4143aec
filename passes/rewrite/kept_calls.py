"""Decides which recorded nodes the rewritten graph keeps, which submodule calls stay calls, and what is asked of their results.

Where a router's call stays, what it gives is asked in every call in place of what it reads. It may read step counters, temperatures
and noise scales that change all the time, and the number of experts that it chooses, for which the code around it was recorded. The
form of what it gives tells the two apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import dropwhile
from types import NoneType
from typing import Any

import torch.fx
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import UNKNOWN, CapturedBlock, ModuleCall, StoredValue, functional, record_of
from hexa_fx.capture.probes import LARGEST_LIMIT, limits_of
from hexa_fx.capture.records import nodes_by_call, reached
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.read_values import values_of
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect.decisions import Condition, is_size
from hexa_fx.passes.detect.graph import ancestors, draws, effects, is_tensor, literals, nodes_in, writes_outside
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.rules import calls_without, check_added, gives_plain
from hexa_fx.passes.detect.steps import FreeBody, TokenRows
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.runtime import guards
from hexa_fx.runtime.attribute_guards import is_within


@dataclass(frozen=True)
class KeptNodes:
    """What the rewritten graph keeps of the recorded one.

    Args:
        order: nodes to emit, in recorded order; a call is emitted where its first result stands.
        calls: the submodule call behind each result node.
        stand_ins: a write inside a call that stays a call -> a result of that call, which later reads are ordered after.
    """

    order: tuple[Node, ...]
    calls: Mapping[Node, ModuleCall]
    stand_ins: Mapping[Node, Node]


def keep(captured: CapturedBlock, roots: Iterable[Node], outputs: Sequence[Node]) -> KeptNodes:
    """What is needed for ``roots``, the block's results and its effects, without looking behind the regions' ``outputs``.

    A submodule call stays a call, so that its hooks run (a model may collect its router logits that way) and its own control
    flow is taken anew; so does that of an `autograd.Function`, whose backward is its own. A value inside it that is needed by
    name is computed again beside it, from the call's results as far as they lead to it; where that would draw random numbers or
    write twice, the call is opened instead.
    """
    order = [node for node in captured.graph.nodes if node.op != "output"]
    position = {node: index for index, node in enumerate(order)}
    wanted = [*roots, *nodes_in(captured.output)]
    inside = nodes_by_call(captured.graph)
    usable = [call for call in calls_without((*captured.functions, *captured.calls), outputs) if inside[call.number]]
    calls = _outermost(usable)
    while True:
        # A state that a call only passes on is what it was given, and no result of it.
        given = {call.number: nodes_in([call.args, call.kwargs]) for call in calls}
        by_result = {n: call for call in calls for n in nodes_in(call.output) if n not in given[call.number]}
        stand_ins = _writes_of_calls(calls, inside, by_result)
        needed = _needed([*wanted, *_effects(captured, calls)], by_result, stand_ins, outputs)
        # Nodes inside a call, not its results, that are needed by name.
        within = {
            call.number: [n for n in inside[call.number] if n in needed and by_result.get(n) is not call]
            for call in calls
        }
        opened = [call for call in calls if within[call.number]]
        torn = {call.number for call in opened if not _repeatable(within[call.number])}
        if torn:
            inner = _outermost([call for call in usable if not torn.isdisjoint(call.around)])
            calls = [call for call in calls if call.number not in torn] + inner
            continue
        unseen = [nodes_in(call.output)[0] for call in opened if not needed & set(nodes_in(call.output))]
        if not unseen:
            return KeptNodes(tuple(sorted(needed, key=position.__getitem__)), by_result, stand_ins)
        wanted += unseen


def conditions_of_opened(match: MoEMatch, kept: KeptNodes) -> tuple[Condition, ...]:
    """Of decisions that were left to submodule calls, of which the rewritten graph makes none.

    Asserts on sizes after random numbers, where it is too late to run the original, are no reason to refuse, and are left out.
    """
    by_call = nodes_by_call(match.captured.graph)
    after_draws = dropwhile(lambda node: not draws(node), match.captured.graph.nodes)
    late = {node for node in after_draws if record_of(node).only_raises and _compares_with_limit(node)}
    known = {each.node for one in match.regions for each in one.conditions}
    called = {node for call in kept.calls.values() for node in by_call[call.number]}
    found: list[Condition] = []
    for judge in (one.decisions for one in match.regions if one.decisions is not None):
        if any(record_of(node).decision for node in judge.opaque - called):
            asked = replace(judge, opaque=judge.opaque & called).conditions()
            found += [each for each in asked if each.node not in known | late]
    return tuple(found)


def refuse_late_conditions(conditions: Collection[Node], order: Sequence[Node], kept: KeptNodes) -> None:
    """Where a condition fails the original runs from its beginning, so nothing may have been written or drawn by then.

    Checks for NaN, and for none or one, as torch.distributions makes them, may come after random numbers, and so may those after
    which the original raises an error.
    """
    written = drawn = False
    by_call = nodes_by_call(order[0].graph) if order else {}
    for node in order:
        late = drawn and _compares_with_limit(node) and not record_of(node).only_raises
        if node in conditions and (written or late):
            raise Refuse(
                "the code takes a host decision (if, while, item()) after it has drawn random numbers, or has written to its "
                "input, to a parameter or to a buffer; a decision that comes first can be rewritten",
                node,
            )
        call = kept.calls.get(node)
        inside = [node] if call is None else by_call[call.number]
        written = written or any(map(writes_outside, inside))
        drawn = drawn or any(map(draws, inside))


def _compares_with_limit(condition: Node) -> bool:
    """Whether it is a condition on sizes, with a number other than 0 and 1."""
    asked = ancestors([condition], stop=lambda node: operation(node) in ops.SIZES)
    made = [node for node in asked if operation(node) not in ops.SIZES]
    return not any(map(is_tensor, made)) and any(number not in (0, 1) for number in literals(made))


def _outermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls that lie in no other one of them."""
    numbers = {call.number for call in calls}
    return [call for call in calls if numbers.isdisjoint(call.around)]


def _writes_of_calls(
    calls: Sequence[ModuleCall], by_call: Mapping[int, list[Node]], by_result: Mapping[Node, ModuleCall]
) -> dict[Node, Node]:
    return {
        node: nodes_in(call.output)[0]
        for call in calls
        for node in by_call[call.number]
        if node not in by_result and (record_of(node).writes or node.target is functional.after)
    }


def _needed(
    wanted: Sequence[Node],
    by_result: Mapping[Node, ModuleCall],
    stand_ins: Mapping[Node, Node],
    outputs: Sequence[Node],
) -> set[Node]:
    ends = frozenset(outputs)

    def onward(node: Node) -> Iterable[Node]:
        if node in ends:
            return ()
        if node in by_result:
            call = by_result[node]
            return *nodes_in(call.output), *nodes_in(call.args), *nodes_in(call.kwargs)
        if node.target is functional.after:
            read, write = node.all_input_nodes
            return read, stand_ins.get(write, write)
        return node.all_input_nodes

    return reached([*ends, *wanted], onward)


def opened(captured: CapturedBlock, kept: KeptNodes) -> set[str]:
    """Paths of the submodules that are called and of whose insides something is computed beside the call too."""
    by_call = nodes_by_call(captured.graph)
    inside = {node: call.path for call in kept.calls.values() for node in by_call[call.number]}
    return {inside[node] for node in kept.order if node in inside and node not in kept.calls and node.op != "get_attr"}


def _repeatable(nodes: Sequence[Node]) -> bool:
    """Whether nodes may run twice: they neither draw random numbers nor write, nor read anew what was written."""
    return not any(ops.is_random(node) or record_of(node).writes or node.target is functional.after for node in nodes)


def _effects(captured: CapturedBlock, calls: Sequence[ModuleCall]) -> list[Node]:
    """Writes to the block's state, without those that calls which stay calls will make."""
    found = []
    for node in effects(captured.graph):
        holder = [call for call in calls if call.number in record_of(node).calls]
        found.extend(nodes_in(holder[0].output)[:1] if holder else [node])
    return found


def replaced(captured: CapturedBlock, kept: KeptNodes) -> frozenset[str]:
    """Paths of the submodules of which the rewritten graph makes a call neither itself nor inside of another."""
    numbers = {kept.calls[node].number for node in kept.order if node in kept.calls}
    return frozenset(call.path for call in captured.calls if numbers.isdisjoint((call.number, *call.around)))


def left_by_opened(
    captured: CapturedBlock, called: Collection[str], stored: Iterable[StoredValue]
) -> tuple[StoredValue, ...]:
    """What the code of submodules leaves, where these are not ``called``, and of which ``stored`` has nothing.

    Not what is no tensor of this run, or follows from what an earlier one kept.
    """
    check_added(captured.stored, called)
    known = {id(item) for item in stored}

    def is_made_here(item: StoredValue) -> bool:
        behind = () if item.value is UNKNOWN else ancestors(nodes_in(item.value))
        return item.value is not UNKNOWN and not any(
            n.op == "get_attr" and n.target in captured.recalled for n in behind
        )

    lost = (item for item in captured.stored if not any(is_within(scope, called) for scope in item.scopes))
    return tuple(item for item in lost if id(item) not in known and is_made_here(item))


def refuse_far_limits(removed: Iterable[Node], match: MoEMatch) -> None:
    """Refuses ``removed`` code that cuts rows, or compares counts, at more tokens than verification sends to an expert."""
    tokens, top_k = record_of(match.source).value, match.routing.top_k
    # Whether verification can have all tokens choose the same experts: by what chooses them, or as ids that are given.
    behind = ancestors(match.routing.index.nodes)
    chosen = any(ops.picks_best(node) or kind(node) == "max" for node in behind)
    forced = chosen or (match.is_given_ids and not any(n.op == "get_attr" for n in behind))
    tried = LARGEST_LIMIT if forced else top_k * tokens.numel() // max(1, tokens.shape[-1])
    for node in removed:
        limit = max(limits_of(node), default=0)
        if limit > tried:
            raise Refuse(
                f"the code cuts lists of tokens, or compares how many there are, at {limit}, and no run of verification sends "
                f"more than {tried} to an expert; without that limit, or with one that is reached, it can be rewritten",
                node,
            )


def require_form(
    match: MoEMatch, graph: torch.fx.Graph, new: Mapping[Node, Node], called: Mapping[Node, ModuleCall]
) -> None:
    """Asks in ``graph`` for what has to hold of a region's routing: so many numbers of each kind for a token, of these dtypes.

    Submodules ``called`` by then need not be called again where it is another form. They have to give as many results, and None
    where they gave None.
    """
    of_tokens, routing = _tokens(match), match.routing
    tokens, each = record_of(of_tokens).value, {}
    count = tokens.shape[:-1].numel()
    for source in (routing.index, *routing.before, *routing.after, *routing.keep):
        by_token = not source.groups and source.reading not in ("expert", "token_expert_position")
        for node in source.nodes:
            value = record_of(node).value
            numbers = value.numel() // count if by_token and value.numel() % count == 0 else 0
            each[node] = new[node], numbers, value.dim(), value.dtype
    results = tuple((call.path, result) for result, call in called.items())
    forms = tuple(_form_of(call.output) for call in called.values())
    given = (new[of_tokens], tokens.dtype), tuple(each.values()), results, forms
    graph.call_function(guards.require_routing, given)


def _form_of(output: Any) -> Any:
    """What `guards.is_of_form` compares: None, and the lists, tuples and dicts that hold results."""
    if isinstance(output, dict):
        return {key: _form_of(item) for key, item in output.items()}
    if isinstance(output, (tuple, list)):
        return [_form_of(item) for item in output]
    return None if output is None else ""


@dataclass(frozen=True)
class KeptRouters:
    """The routers that the rewritten graph calls as they are.

    Args:
        forms: of which regions `require_form` can ask, by the node after which it can.
        reads: what was read by code that the new graph does not call, and by routers whose results do not tell.
        in_trace: what counts besides where a compiler traces: there a router that draws or writes cannot be run by half.
        unasked: routers of whose results nothing can be asked, as something has been drawn or written by then: what their code asks
            for and reads counts instead.
    """

    forms: dict[Node, list[MoEMatch]]
    reads: tuple[PythonRead, ...]
    in_trace: tuple[PythonRead, ...]
    unasked: frozenset[str]


def kept_routers(
    captured: CapturedBlock,
    kept: KeptNodes,
    order: Sequence[Node],
    regions: Sequence[MoEMatch],
    elsewhere: Collection[str],
) -> KeptRouters:
    """What the rewritten graph depends on beside its inputs.

    Args:
        order: in which the kept nodes are emitted.
        elsewhere: submodules that the code calls where the new graph does not.
    """
    calls = [kept.calls[node] for node in order if node in kept.calls and kept.calls[node].function is None]
    alone = {call.path for call in calls} - opened(captured, kept) - _read_for(regions, kept)
    alone -= _experts_of(captured, regions, calls)
    alone -= {path for path in alone if any(is_within(other, {path}) for other in elsewhere)}
    alone -= {kept.calls[node].path for node in order if node in kept.calls and gives_plain(kept.calls[node])}
    # those whose code leaves plain values on modules that other code reads: self.loss = 0 in eval mode, say
    alone -= {p for p in alone for by, to in captured.handed if is_within(by, {p}) and not is_within(to, {p})}
    forms: dict[Node, list[MoEMatch]] = {}
    told, limited, counted = set[str](), set[str](), set[str]()
    by_call = nodes_by_call(captured.graph)
    for match in regions:
        calls = [kept.calls[node] for node in ancestors(match.routing.nodes) if node in kept.calls]
        routers = {call.path for call in calls} & alone
        if not any(_is_setting(read, routers) for read in captured.reads):
            continue
        if match.routing.capacity is not None and isinstance(match.routing.capacity.limit, int):
            limited |= routers  # the new graph holds that number, which may be the router's own
        last = _last(match, order)
        if last is None or any(_changes_more(captured, by_call, kept, node) for node in order[: order.index(last) + 1]):
            counted |= routers
            continue
        told |= {call.path for call in calls if _has_effects(captured, by_call, call)}
        forms.setdefault(last, []).append(match)
    set_inside = {str(item.place) for item in captured.stored}

    def numbers(read: PythonRead, routers: set[str], kinds: tuple[type, ...] = (int,)) -> bool:
        counts = any(type(value) in kinds for value in values_of(read)) and str(read) not in set_inside
        return counts and any(is_within(scope, routers) for scope in read.scopes)

    inside = cache(partial(is_within, paths=alone))

    def is_followed(scope: str, read: PythonRead) -> bool:
        return inside(scope) and not numbers(read, counted, _DISCRETE) and not numbers(read, limited, (int, float))

    followed = [(read, all(is_followed(scope, read) for scope in read.scopes)) for read in captured.reads]
    reads = tuple(read for read, left in followed if not left)
    in_trace = tuple(read for read, left in followed if left and numbers(read, told))
    return KeptRouters(forms, reads, in_trace, frozenset(counted))


_DISCRETE = (int, bool, str, NoneType)
"""Settings by which a router may give something of another form. A float is a temperature, say, which changes all the time."""


def _is_setting(read: PythonRead, routers: set[str]) -> bool:
    plain = any(type(value) in (bool, int, float, str) for value in values_of(read))
    return plain and any(is_within(scope, routers) for scope in read.scopes)


def _read_for(regions: Sequence[MoEMatch], kept: KeptNodes) -> set[str]:
    """Routers of whose results one is read by the regions, but not by the code: that it fits the others is theirs to know."""
    found = set[str]()
    for match in regions:
        read = ancestors([match.output], stop=kept.calls.__contains__)
        found |= {kept.calls[node].path for node in match.routing.nodes if node in kept.calls and node not in read}
    return found


def _experts_of(captured: CapturedBlock, regions: Sequence[MoEMatch], called: Collection[ModuleCall]) -> set[str]:
    """Submodules that stay calls and of which the regions compute something themselves, as where code asks for a result's size."""
    by_call, found = nodes_by_call(captured.graph), set[str]()
    for match in regions:
        given = {match.source, *ancestors(match.routing.nodes, stop=is_size)}
        inside = ancestors([match.output], stop={match.source}.__contains__) - given
        found |= {call.path for call in called if not inside.isdisjoint(by_call[call.number])}
    return found


def _tokens(match: MoEMatch) -> Node:
    """A node with a row for every token. Where sequences have one token each, one of fewer dimensions may have a row for those."""
    roles = match.body.steps.values() if isinstance(match.body, FreeBody) else ()
    sources = [match.source, *(role.source for role in roles if isinstance(role, TokenRows))]
    return max(sources, key=lambda node: record_of(node).value.dim())


def _last(match: MoEMatch, order: Sequence[Node]) -> Node | None:
    """The node after which the tokens and all of the routing are known; None if that is only with the region."""
    needed = {_tokens(match), *match.routing.nodes}
    places = [place for place, node in enumerate(order) if node in needed]
    return order[max(places)] if len(places) == len(needed) else None


def _changes_more(captured: CapturedBlock, by_call: Mapping[int, list[Node]], kept: KeptNodes, node: Node) -> bool:
    """Whether something was drawn or written with ``node`` that answering calls of modules would not undo."""
    call = kept.calls.get(node)
    inside = [node] if call is None else by_call[call.number]
    if call is None or call.function is not None:
        return any(draws(n) or writes_outside(n) for n in inside)
    nodes = [n for n in captured.graph.nodes if n.op != "output"]
    beside = {record_of(n).storage for n in nodes if call.number not in record_of(n).calls}
    beside -= {record_of(n).storage for n in nodes if n.op == "get_attr"}
    return any(record_of(n).writes and record_of(n).storage in beside for n in inside)


def _has_effects(captured: CapturedBlock, by_call: Mapping[int, list[Node]], call: ModuleCall) -> bool:
    noted = [scope for item in captured.stored for scope in item.scopes]
    noted += [scope for changed in captured.changed for scope in changed.scopes]
    keeps = any(is_within(scope, {call.path}) for scope in noted)
    return keeps or any(draws(node) or writes_outside(node) for node in by_call[call.number])
