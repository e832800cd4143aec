"""Static rules: what numbers cannot tell, because the trace holds one run."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from hexa_fx.capture import UNKNOWN, CapturedBlock, ModuleCall, StoredValue, record_of
from hexa_fx.capture.functional import Applied
from hexa_fx.capture.records import nodes_by_call
from hexa_fx.ir import Container, ContainerItem, ObjectAttribute
from hexa_fx.isolation.lookup import LITERALS
from hexa_fx.operations import operation
from hexa_fx.passes.detect.graph import ancestors, descendants, draws, effects, is_float, nodes_in
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.runtime.attribute_guards import is_within


def opaque_nodes(captured: CapturedBlock, products: Iterable[Node]) -> set[Node]:
    """Nodes inside submodule calls without expert products: such calls can stay calls and decide again at run time.

    Those whose results are of a class of the user's cannot.
    """
    inside = nodes_by_call(captured.graph)
    return {node for call in calls_without(captured.calls, products) for node in inside[call.number]}


def decided_anew(captured: CapturedBlock, products: Iterable[Node], end: Node, roots: Iterable[Node]) -> set[Node]:
    """As `opaque_nodes`, of calls whose decisions are taken again in every call of the rewritten block.

    Not of those that give plain values: what these decide, too, the code around them goes by as it was. Nor of
    those after the products, whose results' forms nobody asks, or of which only the region up to ``end`` has any use. Operators
    give tensors alone.

    Args:
        roots: what the region is computed from.
    """
    taken, place = {*products}, {node: number for number, node in enumerate(captured.graph.nodes)}
    last = max(map(place.__getitem__, taken))
    needed = ancestors([captured.graph.output_node(), *effects(captured.graph), *roots], stop=lambda n: n is end)
    inside, found = nodes_by_call(captured.graph), set[Node]()
    region, operators = ancestors([end]) & descendants(taken), (c for c in captured.functions if c.is_of_operator)
    for call in calls_without((*captured.calls, *operators), taken):
        nodes = inside[call.number]
        if gives_plain(call) or needed.isdisjoint(nodes):
            continue
        if region.isdisjoint(nodes) if call.is_of_operator else place[nodes[0]] <= last:
            found.update(nodes)
    return found


def calls_without(calls: Iterable[ModuleCall], nodes: Iterable[Node]) -> Iterator[ModuleCall]:
    """Those that may stay calls: they give results, none of the nodes lies inside, and nothing is set for them before."""
    taken = {number for node in nodes for number in record_of(node).calls}
    return (call for call in calls if call.number not in taken and nodes_in(call.output) and not call.prepared)


def stored_outside_calls(captured: CapturedBlock, products: Iterable[Node]) -> tuple[StoredValue, ...]:
    """Results that code outside of the modules that the rewritten block calls keeps, so that the block has to keep them itself."""
    for result in tree_leaves(captured.graph.output_node().args):
        if not isinstance(result, (Node, *LITERALS)):
            raise Refuse(
                f"the block returns a {type(result).__qualname__}, and what such an object holds is not followed; tensors, and "
                "tuples, lists, dicts or dataclasses of them can be returned, with nothing set on them beside their fields"
            )
    opaque, inside = opaque_nodes(captured, products), nodes_by_call(captured.graph)
    live = {call.path for call in captured.calls if opaque.issuperset(inside[call.number])}
    for changed in captured.changed:
        if not all(is_within(scope, live) for scope in changed.scopes):
            raise Refuse(
                f"the code changes {changed.label} in place, which the rewritten block would not; results that it returns, sets "
                "as attributes of modules and of objects of Python classes (self.loss = loss), appends to lists or sets in dicts "
                "of its modules and globals are kept"
            )
    found = tuple(item for item in captured.stored if not _is_left_by_calls(item, live))
    check_added(captured.stored, live)
    for item in found:
        behind = ancestors(nodes_in(item.value))
        holder = "an object" if isinstance(item.place, ObjectAttribute) else "the module"
        if item.value is UNKNOWN:
            raise Refuse(
                f"the code keeps a result on {holder} ({item}), which the rewritten block would not update; tensors, their "
                "sizes, dtypes and devices, numbers, texts and lists, tuples and dicts of these are set",
                item.location,
            )
        if any(n.op == "get_attr" and n.target in captured.recalled for n in behind):
            raise Refuse(f"the code keeps a result on {holder} ({item}), which the rewritten block would not update")
    return found


def _is_left_by_calls(item: StoredValue, live: Collection[str]) -> bool:
    return all(is_within(scope, live) for scope in item.scopes)


def check_added(stored: Iterable[StoredValue], live: Collection[str]) -> None:
    """Checks what the rewritten block has to add to lists and dicts, which it does at its end. ``live``: modules that it calls."""
    added: set[Container] = set()
    for item in stored:
        if not isinstance(item.place, ContainerItem):
            continue
        if _is_left_by_calls(item, live):
            if item.place.container in added:
                raise Refuse(
                    f"the code adds to {item.place.container} before {next(iter(item.scopes))}, which is called as it is, uses it "
                    "too, and the rewritten block would add to it last"
                )
            continue
        if item.problem:
            raise Refuse(
                f"the code {item.problem}; it is rewritten if it only adds tensors to a list or sets them in a dict"
            )
        added.add(item.place.container)


def refuse_stored_intermediates(stored: Iterable[StoredValue], tags: Mapping[Node, Tag], end: Node) -> None:
    """Refuses code that keeps what experts compute on a module."""
    for item in stored:
        behind = ancestors(nodes_in(item.value), stop=lambda node: node is end)
        inside = ancestors([end]) - {end}
        if any(tags[node].experts and not tags[node].weight for node in behind & inside):
            raise Refuse(f"the code keeps what experts compute on the module ({item})", end)


def refuse_generator(node: Node) -> None:
    """Refuses a call that draws from a generator of the code's own, which no graph holds."""
    if any(isinstance(given, torch.Generator) for given in (*node.args, *node.kwargs.values())):
        raise Refuse(
            "the code draws random numbers from a torch.Generator of its own, which no graph holds; those of torch's default "
            "generator (torch.rand) are drawn anew in every call, and a router's module may have one",
            node,
        )


def refuse_array(node: Node) -> None:
    """Refuses a call that is given an array of numpy, which no program can contain."""
    numpy = sys.modules.get("numpy")
    if numpy and any(isinstance(leaf, numpy.ndarray) for leaf in tree_leaves([node.args, node.kwargs])):
        raise Refuse(
            "the code gives torch an array of numpy, of which a graph holds one example's numbers; it can be followed as a "
            "tensor, which a module registers as a buffer, or is given as an argument",
            node,
        )


_LONGEST_CONSTANT = 64
GIVEN_INSIDE = (
    "the code reads a tensor that it is given inside an object, or a dict by a key that is no name; an argument itself, or what "
    "lies in a tuple, can be followed"
)


def constant(captured: CapturedBlock, node: Node) -> torch.Tensor:
    """A few numbers that a ``get_attr`` reads from elsewhere than parameters and buffers, such as one that a module keeps."""
    name, user = str(node.target), next(iter(node.users), node)
    if name in captured.nested:
        raise Refuse(GIVEN_INSIDE, user)
    if name in captured.recalled or captured.constants[name].numel() > _LONGEST_CONSTANT:
        raise Refuse(
            "the code reads a tensor that is neither a parameter nor a buffer, and may have another value next time; register it "
            "as a buffer",
            user,
        )
    return captured.constants[name]


def given_inside(captured: CapturedBlock) -> Refuse | None:
    """The refusal of a block that is given tensors in lists, dicts or objects."""
    nodes = (node for node in captured.graph.find_nodes(op="get_attr") if node.target in captured.nested)
    node = next(nodes, None)
    return None if node is None else Refuse(GIVEN_INSIDE, next(iter(node.users), node))


def is_cut_off(source: Node, rows: Iterable[Node]) -> bool:
    """Whether ``rows`` are taken from ``source`` without its gradient, all of them; not from another value with its numbers."""
    return all(source in _without_gradient(node) for node in rows)


def _without_gradient(end: Node) -> set[Node]:
    """What ``end`` is computed from, but no gradient gets to from it."""
    return ancestors([end]) - ancestors([end], stop=_stops_gradient)


def is_constant(end: Node) -> bool:
    """Whether no gradient gets from ``end`` to an input or a parameter."""
    return not any(n.op in ("placeholder", "get_attr") and is_float(n) for n in ancestors([end], stop=_stops_gradient))


def _stops_gradient(node: Node) -> bool:
    if not node.op.startswith("call"):
        return False
    record = record_of(node)
    holds_no_float = not is_float(node) and not isinstance(record.value, (tuple, list))
    return operation(node) == "detach" or not record.gradient or holds_no_float


def refuse_own_backward(end: Node, tags: Mapping[Node, Tag], outputs: Iterable[Node]) -> None:
    """Refuses experts with an `autograd.Function` that changes gradients alone, or without gradients in a block that has some."""
    without = _without_gradient(end)
    cut = next((node for node in outputs if _stops_gradient(node) or node in without), None)
    if cut is not None and not is_constant(end):
        raise Refuse(
            "experts run without gradients here (torch.no_grad, detach), in a block that has some otherwise; it is rewritten if "
            "its experts run one at a time, and all of them that way",
            cut,
        )
    for node in ancestors([end]):
        if isinstance(node.target, Applied) and tags[node].experts and not tags[node].weight:
            raise Refuse(
                f"{node.target.function.__name__}, an autograd.Function with a backward of its own, is applied to what single "
                "experts compute; around the experts it can stay",
                node,
            )


def refuse_randomness(nodes: Iterable[Node]) -> None:
    """Refuses experts that draw random numbers."""
    for node in nodes:
        if draws(node):
            raise Refuse(
                f"{operation(node)} is active inside the experts, and its random numbers depend on the order experts run in; with "
                "probability 0 the block is rewritten in this mode too",
                node,
            )


def gives_plain(call: ModuleCall) -> bool:
    """Whether a call gives plain values, beside tensors and None."""
    leaves: list[Any] = tree_leaves(call.output, is_leaf=lambda item: item is None)
    return any(leaf is not None and not isinstance(leaf, Node) for leaf in leaves)
