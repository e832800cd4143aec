"""Where a router's call stays in the rewritten graph, what it gives is asked in every call in place of what it reads.

A router may read step counters, temperatures and noise scales that change all the time, and the number of experts that it chooses,
for which the code around it was recorded. The form of what it gives tells the two apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch.fx

from hexa_fx.capture import CapturedBlock, ModuleCall, record_of
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.read_values import values_of
from hexa_fx.passes.detect.decisions import ON_DATA, depends_on_data
from hexa_fx.passes.detect.free_body import FreeBody, TokenRows
from hexa_fx.passes.detect.graph import ancestors, draws, writes_outside
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.routing_factors import RoutingSource
from hexa_fx.passes.detect.rules import gives_plain
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.passes.rewrite.kept_calls import KeptNodes, opened
from hexa_fx.runtime import guards
from hexa_fx.runtime.attribute_guards import is_within


@dataclass(frozen=True)
class Form:
    """What has to hold of a region's routing: so many numbers of each kind for a token, of these dtypes.

    Args:
        tokens: the node whose rows are the tokens.
        nodes: where the routing is read.
        each: how many numbers a node holds for a token; 0 if that is no whole number.
    """

    tokens: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    each: tuple[int, ...]

    def emit(
        self,
        graph: torch.fx.Graph,
        new: Mapping[torch.fx.Node, torch.fx.Node],
        called: Mapping[torch.fx.Node, ModuleCall],
    ) -> None:
        """Asks for it in ``graph``; submodules ``called`` by then need not be called again where it is another form.

        They have to give as many results, and None where they gave None.
        """
        values = [record_of(node).value for node in self.nodes]
        sources = tuple((new[n], e, v.dim(), v.dtype) for n, e, v in zip(self.nodes, self.each, values, strict=True))
        tokens = new[self.tokens], record_of(self.tokens).value.dtype
        results = tuple((call.path, result) for result, call in called.items())
        order = list(self.tokens.graph.nodes)
        forms = tuple(_form_of(call.output, bool(_decisions(order, call))) for call in called.values())
        graph.call_function(guards.require_routing, (tokens, sources, results, forms))


def _form_of(output: Any, decides: bool) -> Any:
    """What `guards.is_of_form` compares: None, the lists, tuples and dicts that hold results, and of a module that decides on data
    what tensors these are."""
    if isinstance(output, dict):
        return {key: _form_of(item, decides) for key, item in output.items()}
    if isinstance(output, (tuple, list)):
        return [_form_of(item, decides) for item in output]
    value = record_of(output).value if decides and isinstance(output, torch.fx.Node) else None
    return None if output is None else guards.kind_of(value) if isinstance(value, torch.Tensor) else ""


def _decisions(order: Sequence[torch.fx.Node], call: ModuleCall) -> list[torch.fx.Node]:
    """The decisions on data that the code of a call takes, by which it may give something of another form."""
    inside = order[call.start : call.end]
    return [n for n in inside if n.op != "output" and record_of(n).decision and depends_on_data(n)]


@dataclass(frozen=True)
class KeptRouters:
    """The routers that the rewritten graph calls as they are.

    Args:
        forms: what is asked, by the node after which it can be.
        reads: what was read by code that the new graph does not call, and by routers whose results do not tell.
        in_trace: what counts besides where a compiler traces: there a router that draws or writes cannot be run by half.
        at_once: what is asked of modules that decide on data, or give objects, before their results are taken apart, by path.
    """

    forms: dict[torch.fx.Node, list[Form]]
    reads: tuple[PythonRead, ...]
    in_trace: tuple[PythonRead, ...]
    at_once: dict[str, Form]


def kept_routers(
    captured: CapturedBlock,
    kept: KeptNodes,
    order: Sequence[torch.fx.Node],
    regions: Sequence[MoEMatch],
    elsewhere: Collection[str],
) -> KeptRouters:
    """What the rewritten graph depends on beside its inputs.

    Args:
        order: in which the kept nodes are emitted.
        elsewhere: submodules that the code calls where the new graph does not.
    """
    called = {kept.calls[node].path for node in order if node in kept.calls and kept.calls[node].function is None}
    alone = called - opened(captured, kept) - _read_for(regions, kept)
    alone -= {path for path in alone if any(is_within(other, {path}) for other in elsewhere)}
    alone -= {kept.calls[node].path for node in order if node in kept.calls and gives_plain(kept.calls[node])}
    alone -= {path for path in alone if _leaves_plain(captured, path)}  # self.loss = 0 in eval mode, say
    forms: dict[torch.fx.Node, list[Form]] = {}
    told, limited, counted, at_once = set[str](), set[str](), set[str](), dict[str, Form]()
    by_storage, recorded = _by_storage(captured), list(captured.graph.nodes)
    left_alone = [call for call in kept.calls.values() if call.path in alone]
    deciding = {call.path: decision for call in left_alone for decision in _decisions(recorded, call)}
    objects = {call.path for call in left_alone if call.is_object}
    for match in regions:
        calls = [kept.calls[node] for node in ancestors(match.routing.nodes) if node in kept.calls]
        routers = {call.path for call in calls} & alone
        if not deciding and not any(_is_setting(read, routers) for read in captured.reads):
            continue
        if match.routing.capacity is not None and isinstance(match.routing.capacity.limit, int):
            limited |= routers  # the new graph holds that number, which may be the router's own
        last = _last(match, order)
        if last is None or any(_changes_more(by_storage, kept, node) for node in order[: order.index(last) + 1]):
            if deciding:
                raise Refuse(ON_DATA, next(iter(deciding.values())))
            counted |= routers
            continue
        at_once |= dict.fromkeys([*deciding, *objects], Form(_tokens(match), (), ()))
        told |= {call.path for call in calls if _has_effects(captured, call)}
        forms.setdefault(last, []).append(_form(match))
    set_inside = {str(item.place) for item in captured.stored}

    def numbers(read: PythonRead, routers: set[str], kinds: tuple[type, ...] = (int,)) -> bool:
        counts = any(type(value) in kinds for value in values_of(read)) and str(read) not in set_inside
        return counts and any(is_within(scope, routers) for scope in read.scopes)

    inside = cache(partial(is_within, paths=alone))

    def is_followed(scope: str, read: PythonRead) -> bool:
        return inside(scope) and not numbers(read, counted) and not numbers(read, limited, (int, float))

    followed = [(read, all(is_followed(scope, read) for scope in read.scopes)) for read in captured.reads]
    reads = tuple(read for read, left in followed if not left)
    in_trace = tuple(read for read, left in followed if left and numbers(read, told))
    return KeptRouters(forms, reads, in_trace, at_once)


def _leaves_plain(captured: CapturedBlock, path: str) -> bool:
    """Whether the code of the submodule at ``path`` leaves plain values on modules that other code reads."""
    return any(is_within(by, {path}) and not is_within(to, {path}) for by, to in captured.handed)


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


def _tokens(match: MoEMatch) -> torch.fx.Node:
    """A node with a row for every token. Where sequences have one token each, one of fewer dimensions may have a row for those."""
    roles = match.body.steps.values() if isinstance(match.body, FreeBody) else ()
    sources = [match.source, *(role.source for role in roles if isinstance(role, TokenRows))]
    return max(sources, key=lambda node: record_of(node).value.dim())


def _form(match: MoEMatch) -> Form:
    tokens = record_of(_tokens(match)).value
    count = tokens.numel() // tokens.shape[-1]
    routing = match.routing
    sources = (routing.index, *routing.before, *routing.after, *routing.keep)
    each = {node: n for source in sources for node, n in _numbers_of_token(source, count)}
    return Form(_tokens(match), tuple(each), tuple(each.values()))


def _numbers_of_token(source: RoutingSource, tokens: int) -> Iterator[tuple[torch.fx.Node, int]]:
    for node in source.nodes:
        value = record_of(node).value
        by_token = not source.groups and source.reading not in ("expert", "token_expert_position")
        yield node, value.numel() // tokens if by_token and value.numel() % tokens == 0 else 0


def _last(match: MoEMatch, order: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """The node after which the tokens and all of the routing are known; None if that is only with the region."""
    needed = {_tokens(match), *match.routing.nodes}
    places = [place for place, node in enumerate(order) if node in needed]
    return order[max(places)] if len(places) == len(needed) else None


def _by_storage(captured: CapturedBlock) -> dict[int | None, list[int]]:
    """Places of the nodes whose values lie in a memory, without those of parameters and buffers."""
    found: dict[int | None, list[int]] = {}
    for place, node in enumerate(captured.graph.nodes):
        if node.op != "output":
            found.setdefault(record_of(node).storage, []).append(place)
    for node in captured.graph.find_nodes(op="get_attr"):
        found.pop(record_of(node).storage, None)
    return found


def _changes_more(by_storage: Mapping[int | None, list[int]], kept: KeptNodes, node: torch.fx.Node) -> bool:
    """Whether something was drawn or written with ``node`` that answering calls of modules would not undo."""
    call = kept.calls.get(node)
    if call is None:
        return draws(node) or writes_outside(node)
    inside = list(node.graph.nodes)[call.start : call.end]
    if call.function is not None:
        return any(draws(n) or writes_outside(n) for n in inside)
    written = {record_of(n).storage for n in inside if record_of(n).writes}
    return any(not call.start <= place < call.end for storage in written for place in by_storage.get(storage, ()))


def _has_effects(captured: CapturedBlock, call: ModuleCall) -> bool:
    inside = list(captured.graph.nodes)[call.start : call.end]
    noted = [scope for item in captured.stored for scope in item.scopes]
    noted += [scope for changed in captured.changed for scope in changed.scopes]
    noted += [access.scope for access in captured.accesses]
    keeps = any(is_within(scope, {call.path}) for scope in noted)
    return keeps or any(draws(node) or writes_outside(node) for node in inside)
