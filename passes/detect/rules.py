"""Static rules: what numbers cannot tell, because the trace holds one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from hexa_fx.capture import UNKNOWN, CapturedBlock, StoredValue, record_of
from hexa_fx.passes.detect.graph import RANDOM, ancestors, descendants, effects, is_float, is_tensor, operation
from hexa_fx.passes.detect.tags import Tag
from hexa_fx.passes.detect.verdict import Refuse

_COUNTING = frozenset(["nonzero", "where", "unique", "unique_consecutive", "masked_select", "argwhere"])
_SIZES = frozenset(("size", "numel", "nelement", "dim"))
_CHECKS = frozenset(("isfinite", "isnan", "isinf"))
_SELECTIONS = frozenset(
    "topk argmax argmin argsort sort one_hot nonzero where bincount histc scatter scatter_ eq unique max min "
    "__eq__ multinomial isin searchsorted cumsum".split()
)


_CHOICES = frozenset("topk argmax argmin argsort sort nonzero where one_hot multinomial bincount unique".split())


@dataclass(frozen=True)
class ShapeBranch:
    """A host decision on sizes, or on whether numbers are finite: the rewritten graph holds only while ``condition`` keeps its
    recorded ``outcome``.
    """

    condition: torch.fx.Node
    outcome: bool


def opaque_nodes(captured: CapturedBlock, products: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Nodes inside submodule calls without expert products: such calls can stay calls and decide again at run time."""
    order = [node for node in captured.graph.nodes if node.op != "output"]
    position = {node: index for index, node in enumerate(order)}
    taken = [position[node] for node in products]
    inside: set[torch.fx.Node] = set()
    for call in captured.calls:
        if not any(call.start <= index < call.end for index in taken):
            inside.update(order[call.start : call.end])
    return inside


def stored_outside_calls(captured: CapturedBlock, products: Iterable[torch.fx.Node]) -> tuple[StoredValue, ...]:
    """Results that the code keeps on modules which the rewritten block does not call, so that it has to set them itself.

    Raises:
        Refuse: one of them is no tensor of this run, or follows from what an earlier run kept.
    """
    opaque = opaque_nodes(captured, products)
    order = [node for node in captured.graph.nodes if node.op != "output"]
    live = [call.path for call in captured.calls if opaque.issuperset(order[call.start : call.end])]
    found = []
    for item in captured.stored:
        if any(item.path == kept or item.path.startswith(f"{kept}.") for kept in live):
            continue
        behind = ancestors(_nodes(item.value))
        if item.value is UNKNOWN or any(n.op == "get_attr" and n.target in captured.recalled for n in behind):
            raise Refuse(f"the code keeps a result on the module ({item}), which the rewritten block would not update")
        found.append(item)
    return tuple(found)


def refuse_stored_intermediates(
    stored: Iterable[StoredValue], tags: Mapping[torch.fx.Node, Tag], end: torch.fx.Node
) -> None:
    """Raises:
    Refuse: a result that the code keeps on a module is computed inside the experts, before ``end``.
    """
    for item in stored:
        behind = ancestors(_nodes(item.value), stop=lambda node: node is end)
        inside = ancestors([end]) - {end}
        if any(tags[node].experts and not tags[node].weight for node in behind & inside):
            raise Refuse(f"the code keeps what experts compute on the module ({item})", end)


def _nodes(value: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(value, found.append)
    return found


_LONGEST_CONSTANT = 64


def is_outside(captured: CapturedBlock, name: str) -> bool:
    """Whether a ``get_attr`` target is a tensor that a rewritten block cannot read again, nor hold as a constant."""
    return name in captured.constants and (
        name in captured.recalled or captured.constants[name].numel() > _LONGEST_CONSTANT
    )


def refuse_outside_tensors(
    captured: CapturedBlock, roots: Iterable[torch.fx.Node], end: torch.fx.Node, opaque: set[torch.fx.Node]
) -> None:
    """Raises:
    Refuse: ``roots`` or the code after ``end`` read a tensor that is neither parameter, buffer nor a few constant numbers.
    """
    read = ancestors([*roots, captured.graph.output_node()], stop=lambda node: node is end)
    for node in read - opaque:
        if node.op == "get_attr" and is_outside(captured, str(node.target)):
            raise Refuse(
                "the code reads a tensor that is neither a parameter nor a buffer, and may have another value next time; "
                "register it as a buffer",
                next(iter(node.users), node),
            )


def is_cut_off(source: torch.fx.Node, rows: Iterable[torch.fx.Node]) -> bool:
    """Whether ``rows`` are taken from ``source`` without its gradient, all of them."""
    return all(source not in ancestors([node], stop=_stops_gradient) for node in rows)


def is_constant(end: torch.fx.Node) -> bool:
    """Whether no gradient gets from ``end`` to an input or a parameter."""
    return not any(n.op in ("placeholder", "get_attr") and is_float(n) for n in ancestors([end], stop=_stops_gradient))


def _stops_gradient(node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    record = record_of(node)
    holds_no_float = not is_float(node) and not isinstance(record.value, (tuple, list))
    return operation(node) == "detach" or not record.gradient or holds_no_float


def refuse_randomness(nodes: Iterable[torch.fx.Node]) -> None:
    """Raises:
    Refuse: one of ``nodes`` draws random numbers.
    """
    for node in nodes:
        if operation(node) not in RANDOM:
            continue
        probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
        training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        if training and probability != 0:
            raise Refuse(
                f"{operation(node)} is active inside the experts, and its random numbers depend on the order experts run in; with "
                "probability 0 the block is rewritten in this mode too",
                node,
            )


def leaves_decision(ends: Sequence[torch.fx.Node], opaque: set[torch.fx.Node]) -> bool:
    """Whether code after ``ends``, or beside them, still holds a host loop or branch on data, which one run fixes."""
    graph = ends[0].graph
    left = ancestors([graph.output_node(), *effects(graph)], stop=lambda node: node in ends)
    return any(record_of(n).decision and n not in opaque and _depends_on_data(n) for n in left)


def _depends_on_data(decision: torch.fx.Node) -> bool:
    """A size is data only where it counts what was found; unbinding a tensor asks for a size."""
    if operation(decision) in (*_SIZES, "unbind"):
        return any(operation(n) in _COUNTING for n in ancestors([decision]))
    return True


def shape_branches(
    captured: CapturedBlock,
    tags: Mapping[torch.fx.Node, Tag],
    routing: set[torch.fx.Node],
    opaque: set[torch.fx.Node],
    output: torch.fx.Node,
) -> tuple[ShapeBranch, ...]:
    """Checks every host decision of the run. ``tags`` are those of all experts; ``output`` is where the region ends.

    A decision that follows from the routing is replaced by the expert-specific operators. One that follows from sizes alone
    becomes a guard. Any other makes the trace valid for this input only.

    Raises:
        Refuse: a decision depends on data other than the routing, or turns a size into a plain number.
    """
    guards: list[ShapeBranch] = []
    after = descendants([output]) | {output}
    for node in captured.graph.nodes:
        if node.op == "output" or not record_of(node).decision or node in opaque:
            continue
        behind = ancestors([node])
        of_experts = {n for n in _asked(node, output) if is_float(n) and tags[n].experts and not tags[n].weight}
        if _is_check_of_numbers(node) and isinstance(record_of(node).value, bool):
            if of_experts <= after:
                guards.append(ShapeBranch(node, bool(record_of(node).value)))
            continue
        if of_experts:
            raise Refuse(
                "the code takes a host decision (if, while, assert, item()) on what the experts computed", node
            )
        if behind & routing or any(operation(n) in _SELECTIONS for n in behind):
            continue
        if not any(n.op == "placeholder" for n in behind):
            continue
        if any(is_float(n) and n.op != "placeholder" and _read_by_value(n, behind) for n in behind):
            raise Refuse(
                "the code takes a host decision (if, while, item()) on the data, not on the routing; torch.where in its place, or "
                "the decision outside of the block, can be rewritten",
                node,
            )
        guard = _guard(node)
        if guard is not None:
            guards.append(guard)
    return tuple(guards)


def _asked(decision: torch.fx.Node, output: torch.fx.Node) -> set[torch.fx.Node]:
    """What the decision reads the values of, back to ``output``.

    Not what only its sizes, or choices such as a later router's ids, follow from.
    """
    if operation(decision) == "unbind":  # asks for a size
        return set()
    return ancestors([decision], stop=lambda node: node is output or _is_size_or_choice(node))


def _is_size_or_choice(node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    made = node.args[0] if operation(node) == "getitem" else node
    chosen = isinstance(made, torch.fx.Node) and made.op.startswith("call") and operation(made) in _CHOICES
    return operation(node) in _SIZES or (chosen and is_tensor(node) and not is_float(node))


def _is_check_of_numbers(node: torch.fx.Node) -> bool:
    """Whether the decision asks of float tensors only if their numbers are finite, as assertions do."""
    asked = ancestors([node], stop=lambda n: operation(n) in _CHECKS)
    checks = {n for n in asked if operation(n) in _CHECKS}
    return bool(checks) and not any(is_float(n) for n in asked - checks)


def _read_by_value(node: torch.fx.Node, behind: set[torch.fx.Node]) -> bool:
    """Whether a value (not just a size) of a float tensor reaches the decision."""
    return any(user in behind and operation(user) not in _SIZES for user in node.users)


def _guard(node: torch.fx.Node) -> ShapeBranch | None:
    value = record_of(node).value
    if operation(node) in _SIZES:
        return None  # len(x), range(n): a loop over rows is only legitimate inside the experts, which verification sees
    return ShapeBranch(node, bool(value)) if isinstance(value, bool) else None
