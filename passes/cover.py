"""Static coverage: is everything that a region replaces accounted for, whether it had an effect on the example or not?

Detection explains numbers. A mask of ones, a clamp that nothing reaches, a scale of one leave no trace in numbers, and would be
lost. So the recorded operations are walked backwards from the region's output, each in the role that it plays there: the experts'
outputs on their way to the tokens, what experts compute, the rows that they are given, factors, and what selects rows. A walk ends
where the rewritten graph reads the recorded value: the tokens, the routing, the experts' weights. What else a walk meets is lost:
an input, a mask, a buffer, or an operation that changes values.

Matches are looked for until nothing is lost: on other values of what has no effect, and with experts of any form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.record import Replacements
from hexa_fx.errors import CaptureError
from hexa_fx.ir import Refusal
from hexa_fx.observers import announced
from hexa_fx.operations import kind, operation
from hexa_fx.passes.detect import Form, MoEMatch, detect_block
from hexa_fx.passes.detect.decisions import is_size
from hexa_fx.passes.detect.graph import (
    adds_dimension,
    ancestors,
    descendants,
    is_float,
    is_tensor,
    literals,
    traced,
    twins,
)
from hexa_fx.passes.detect.rules import constant
from hexa_fx.passes.detect.steps import FreeBody, FromExpert, OfExpert, Product, RowFactor, TokenRows
from hexa_fx.passes.detect.tags import Tag, expert_groups, tag
from hexa_fx.passes.detect.verdict import Refuse


def is_constant(node: Node) -> bool:
    value = record_of(node).value
    if not isinstance(value, torch.Tensor) or not value.numel():
        return True
    return bool((value == value.flatten()[0]).all())


def levels_out(node: Node) -> bool:
    """Whether it makes one number of different ones, as a weight over the sum of the chosen ones is 1 where one is chosen.

    On other inputs, and in backward, it is more than that number. The one weight of an expert's only token is none, unless it is 1.
    """
    inputs, made = (record_of(n).value for n in node.all_input_nodes if is_float(n)), record_of(node).value
    if made.numel() == 1 and not torch.allclose(made, torch.ones_like(made), rtol=_LEVEL, atol=0.0):
        return False
    return _is_level(made) and any(
        not _is_level(value) and not bool(((value == 0) | (value == 1)).all()) for value in inputs
    )


def _is_level(value: torch.Tensor) -> bool:
    flat = value.flatten()
    return torch.allclose(flat, flat[:1].expand_as(flat), rtol=_LEVEL, atol=0.0)


_LEVEL = 1e-5


def restricts(node: Node) -> bool:
    """Whether an operation compares or bounds numbers, other than to ask which ids are an expert's, or what is not zero."""
    if kind(node) in ("where", "max", "min", "minimum", "maximum") and len(node.args) + len(node.kwargs) < 2:
        return False
    if ops.compares_for_equality(node):
        return any(is_float(n) for n in node.all_input_nodes) and literals([node]) != [0.0]
    if kind(node) == "gt" and literals([node]) == [0.0]:
        return is_float(node.all_input_nodes[0]) and is_constant(node)
    return ops.compares(node) or (is_float(node) and ops.bounds(node) and kind(node) not in ("min", "max"))


def leaves_out_sentinels(node: Node, from_index: Container[Node], experts: int) -> bool:
    """Whether it tells ids that are no expert's from those that are, and only sets what belongs to the former to zero.

    The operator leaves such slots out, so nothing is lost.

    Args:
        from_index: what is computed from the routing's ids.
        experts: E.
    """
    ids, bounds = node.args[0] if node.args else None, literals([node])
    if kind(node) not in _ORDER or not isinstance(ids, Node) or len(bounds) != 1:
        return False
    if ids not in from_index or is_float(ids):
        return False
    holds = {_ORDER[kind(node)](expert, bounds[0]) for expert in range(experts)}
    return len(holds) == 1 and _zeroes_rows(node, not holds.pop())


def _zeroes_rows(condition: Node, where: bool) -> bool:
    """Whether a condition only says which values are set to zero: those at which it is ``where``."""
    return all(_is_zeroing(user, condition, where) for user in condition.users)


def _is_zeroing(user: Node, condition: Node, where: bool) -> bool:
    if ops.views(user) or adds_dimension(user) or (ops.casts(user) and not where):
        return _zeroes_rows(user, where)
    if kind(user) in ("invert", "logical_not", "bitwise_not"):
        return _zeroes_rows(user, not where)
    if kind(user) == "masked_fill":
        return where and user.args[1] is condition and literals([user]) == [0.0]
    if kind(user) == "where" and len(user.args) == 3:
        return user.args[0] is condition and _is_zero(user.args[1 if where else 2])
    return kind(user) == "mul" and not where


def sets_to_zero(node: Node) -> bool:
    """Whether an operation sets numbers to zero where a condition holds, or where it does not, and changes nothing else."""
    if operation(node) == "where":
        return len(node.args) == 3 and any(map(_is_zero, node.args[1:]))
    return ops.selects(node) and len(node.args) == 3 and _is_zero(node.args[2])


def _is_zero(value: Any) -> bool:
    if isinstance(value, Node):
        return operation(value) in ("zeros", "zeros_like", "new_zeros")
    return isinstance(value, (int, float)) and value == 0


_ORDER: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ops.ORDERS | ops.EQUALITIES
}


Role = Literal["outputs", "added", "hidden", "rows", "factor", "select", "weights"]

_is_off = ops.of("dropout row_dropout")
"""Random operations, which detection lets pass only where they do nothing in the run."""
_adds_products = ops.of("addcmul embedding_bag")
"""Weighted sums onto the first operand, or of the rows that it names."""
_counts = ops.of("histc ceil floor round trunc")
"""What counts are floating point in, or a room for so many of them."""
_LARGE = 1e6
"""Numbers from here on are out of the reach of the experiments with what experts compute."""


@dataclass(frozen=True)
class Lost:
    """A recorded value that reaches the region's output, and that the rewritten graph would know nothing about.

    ``routed``: it says which rows go where, and the routing that is read is computed from it too, as where tokens that find no room
    are taken out of the ids: then only what it does besides would be lost, which verification sees.
    """

    node: Node
    role: Role
    routed: bool = False


@dataclass
class _Walk:
    """Finds what a region would lose; values that were ``replaced`` in the recorded run have an effect there."""

    match: MoEMatch
    tags: Mapping[Node, Tag]
    replaced: frozenset[Node]
    lost: dict[Node, Lost] = field(default_factory=dict)
    seen: set[tuple[Role, Node]] = field(default_factory=set)
    emitted: set[Node] = field(default_factory=set)
    todo: list[tuple[Role, Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        match = self.match
        read = [match.source, *match.routing.nodes, *([match.base] if match.base is not None else [])]
        read += match.body.roots if isinstance(match.body, FreeBody) else []
        self.twin = twins(match.captured.graph)
        self.read = {self.twin[node] for known in read for node in traced(known, ops.keeps_numbers)}
        self.behind_read = {self.twin[node] for node in ancestors(read)}
        self.bases = _bases(match)
        steps = match.body.steps.values() if isinstance(match.body, FreeBody) else ()
        self.parameters = self.bases | {
            role.bias for role in steps if isinstance(role, Product) and role.bias is not None
        }
        inactive = [n for n in match.captured.graph.nodes if n not in self.replaced and self._may_hide(n)]
        self.from_inactive = descendants(inactive)
        self.ends = {instance.second.node: instance.second.data for instance in match.instances}
        self.from_index = descendants([n for n in match.routing.nodes if is_tensor(n) and not is_float(n)])
        self.starts = {c.node for instance in match.instances for c in instance.first}
        self.from_ends = descendants(self.ends, is_size)
        self.from_source = descendants([match.source])

    def run(self) -> tuple[Lost, ...]:
        """In recorded order."""
        self.todo.append(("outputs", self.match.output))
        for node in ancestors([self.match.output]):
            if not self.tags[node].weight and self.twin[node] not in self.behind_read:
                self._also("weights", self._parameters_in(node))
        if isinstance(body := self.match.body, FreeBody):  # steps are emitted; what they are given is asked for
            for node, part in body.steps.items():
                if isinstance(part, (TokenRows, RowFactor)):
                    self._also("rows" if isinstance(part, TokenRows) else "factor", body.runs[node])
                elif isinstance(part, FromExpert):
                    self.emitted |= {*body.runs[node]}
        else:
            self.todo += [("hidden", data) for data in self.ends.values()]
            self.todo += [("rows", c.data) for instance in self.match.instances for c in instance.first]
        while self.todo:
            role, node = self.todo.pop()
            if (role, node) in self.seen or self.twin[node] in self.read:
                continue
            self.seen.add((role, node))
            getattr(self, f"_{role}")(node)
        order = {node: place for place, node in enumerate(self.match.captured.graph.nodes)}
        return tuple(sorted(self.lost.values(), key=lambda item: order[item.node]))

    def _also(self, role: Role, nodes: Iterable[Node]) -> None:
        self.todo += [(role, node) for node in nodes]

    def _lose(self, node: Node, role: Role) -> None:
        made = node.op.startswith("call") or node.target in self.match.captured.constants
        self.lost.setdefault(node, Lost(node, role, made and role == "select" and self.twin[node] in self.behind_read))

    # -- roles ---------------------------------------------------------------------------------------------------------

    def _outputs(self, node: Node) -> None:
        """A value that experts' outputs are part of."""
        if node in self.ends or ops.makes(node) or operation(node) in ops.SIZES:
            return
        inputs = node.all_input_nodes
        inside = [n for n in inputs if n in self.from_ends]
        others = [n for n in inputs if n not in self.from_ends]
        if not inside:
            return  # added to the outputs, which numbers explain
        self._also("outputs", inside)
        if ops.selects(node) and not any(n in self.from_ends for n in node.all_input_nodes if not is_float(n)):
            self._also("select", [n for n in others if not is_float(n)])
        elif _multiplies(node):
            self._also("factor", others)
        elif _adds_products(node):
            self._also("added", [n for n in others if is_float(n) and n is node.args[0]])
            self._also("factor", [n for n in others if is_float(n) and n is not node.args[0]])
            self._also("select", [n for n in others if not is_float(n)])
        elif ops.adds(node) or ops.moves(node) or _is_off(node) or kind(node) == "mean":
            # The divisor of a mean is a constant of the routing.
            self._also("added", [n for n in others if is_float(n)])
            self._also("select", [n for n in others if not is_float(n)])
        else:
            self._lose(node, "outputs")

    def _added(self, node: Node) -> None:
        """What is added to the outputs: numbers tell if it is not zero, but not what experts' biases are multiplied by."""
        if ops.makes(node) or self._is_read_weight(node):
            return
        floating = [n for n in node.all_input_nodes if is_float(n)]
        biases = [n for n in floating if self.tags[n].experts]
        if not bool((record_of(node).value != 0).any()):
            if node.op in ("placeholder", "get_attr"):
                self._lose(node, "added")
            self._also("added", floating)
            self._also("select", [n for n in node.all_input_nodes if not is_float(n)])
        elif biases and (ops.moves(node) or ops.adds(node)):
            self._also("added", floating)
        elif biases and _multiplies(node):
            self._also("added", biases)
            self._also("factor", [n for n in floating if n not in biases])

    def _hidden(self, node: Node) -> None:
        """What experts compute between their products: explained by an experiment over a wide range of finite numbers."""
        if node in self.starts or self._is_read_weight(node):
            return
        large = any(abs(value) >= _LARGE for value in literals([node]))
        if node.op in ("placeholder", "get_attr") or ops.checks_finite(node) or kind(node) == "nan_to_num" or large:
            self._lose(node, "hidden")
            return
        self._also("hidden", [n for n in node.all_input_nodes if self.tags[n].experts])
        others = [n for n in node.all_input_nodes if not self.tags[n].experts]
        self._also("factor", [n for n in others if is_float(n)])
        self._also("select", [n for n in others if not is_float(n)])

    def _rows(self, node: Node) -> None:
        """Rows that experts are given."""
        inputs = node.all_input_nodes
        if ops.makes(node):
            return
        if ops.moves(node) or _is_off(node):
            rows = [n for n in inputs if is_float(n) or isinstance(record_of(n).value, (tuple, list))]
            rest: Role = "select"
        elif ops.selects(node) and literals([node]) == [0.0]:
            rows, rest = inputs[:1], "select"
        elif _multiplies(node) or ops.adds(node):
            rows = [n for n in inputs if self._may_be_rows(n, record_of(node).value.shape[-1])]
            rest = "factor"
        else:
            self._lose(node, "rows")
            return
        self._also("rows", rows)
        self._also(rest, [n for n in inputs if n not in rows])

    def _may_be_rows(self, node: Node, width: int) -> bool:
        if not is_float(node) or record_of(node).value.dim() < 2 or record_of(node).value.shape[-1] != width:
            return False
        return node in self.from_source

    def _factor(self, node: Node) -> None:
        """Numbers that rows are multiplied by."""
        if self._is_read_weight(node):
            return
        if not is_float(node):
            self._select(node)
        elif (ops.moves(node) or ops.adds(node) or _multiplies(node)) and not self._is_explained(node):
            if not ops.moves(node) and levels_out(node):
                self._lose(node, "factor")
            self._also("factor", node.all_input_nodes)
        elif sets_to_zero(node) and not self._is_explained(node):
            self._also("factor", [n for n in node.all_input_nodes if is_float(n)])
            self._also("select", [n for n in node.all_input_nodes if not is_float(n)])
        elif not ops.makes(node) and not self._is_explained(node):
            self._lose(node, "factor")

    def _select(self, node: Node) -> None:
        """What says which rows go where."""
        if operation(node) in ops.SIZES or ops.makes_like(node) or self._is_explained(node):
            return
        capacity = self.match.routing.capacity
        if capacity is not None and capacity.is_asked(node):
            self._also("select", node.all_input_nodes)
            return
        number = not is_tensor(node) and not isinstance(record_of(node).value, (tuple, list))
        kept = ops.moves(node) or ops.makes(node) or ops.adds(node) or _multiplies(node) or _counts(node)
        changed = is_float(node) and not kept
        if not number and (node.op in ("placeholder", "get_attr") or restricts(node) or changed):
            if not leaves_out_sentinels(node, self.from_index, self.match.num_experts):
                self._lose(node, "select")
        else:
            self._also("select", node.all_input_nodes)

    def _weights(self, node: Node) -> None:
        """The experts' parameters on their way to what reads them: the rewritten graph reads them as they are."""
        moved = ops.moves(node) or ops.makes(node) or not (is_tensor(node) and node.op.startswith("call"))
        if moved or node in self.emitted:
            self._also("weights", self._parameters_in(node))
        else:
            self._lose(node, "weights")

    def _parameters_in(self, node: Node) -> list[Node]:
        return [n for n in node.all_input_nodes if self.tags[n].weight and self.tags[n].bases & self.parameters]

    def _is_read_weight(self, node: Node) -> bool:
        tag = self.tags[node]
        return tag.weight and bool(tag.bases) and tag.bases <= self.bases

    def _is_explained(self, node: Node) -> bool:
        """Whether the routing is computed from it, and all in it has an effect on the example, so that numbers tell."""
        if self.twin[node] not in self.behind_read:
            return False
        return node in self.replaced or not (is_constant(node) or node in self.from_inactive)

    def _may_hide(self, node: Node) -> bool:
        """Whether it is a mask or a comparison of one number on the example, so that what it does cannot be seen."""
        if node.op == "output" or not is_tensor(node):
            return False
        held = node.op in ("placeholder", "get_attr") and not self.tags[node].weight
        compared = node.op.startswith("call") and not is_float(node) and restricts(node)
        return (held or compared) and is_constant(node)


def _multiplies(node: Node) -> bool:
    return ops.scales(node) or ops.contracts(node)


def _bases(match: MoEMatch) -> frozenset[str]:
    """The experts' parameters that the region reads."""
    body = match.body
    if isinstance(body, FreeBody):
        return frozenset(role.base for role in body.steps.values() if isinstance(role, (Product, OfExpert)))
    stacks = (stack.base for stack in (body.gate, body.up, body.down) if stack is not None)
    return frozenset(stacks).union(filter(None, (body.gate_bias, body.up_bias, body.down_bias, body.gain)))


# -- until nothing is lost ----------------------------------------------------------------------------------------------

Found: TypeAlias = tuple[MoEMatch | Refusal, tuple[Lost, ...]]

_MOST = 12
"""Values that are changed at most."""


def detect_all(record: Callable[[Replacements], CapturedBlock], prefer_earliest: bool = False) -> MoEMatch | Refusal:
    """`detect` on a recorded run, so that nothing is lost; a refusal that names what would be lost if that cannot be.

    ``record``: runs the block with other values for what has no effect on the example.
    """
    look = partial(_announced, prefer_earliest=prefer_earliest)
    found, first = _covered(record, look, lambda item: True)
    if isinstance(found, Refusal) and first is not None and any(item.routed for item in first[1]):
        again, _ = _covered(record, look, lambda item: not item.routed)
        found = again if isinstance(again, MoEMatch) else found
    return found


def _covered(
    record: Callable[[Replacements], CapturedBlock], look: Callable[..., Found], counts: Callable[[Lost], bool]
) -> tuple[MoEMatch | Refusal, tuple[Refusal, tuple[Lost, ...]] | None]:
    """The match that loses nothing that counts, or a refusal; and what was lost at first, if anything, with a refusal for that."""
    first: tuple[Refusal, tuple[Lost, ...]] | None = None
    replacements: Replacements | None = Replacements()
    start: CapturedBlock | None = None
    while replacements is not None:
        try:
            captured = record(replacements)
        except CaptureError:
            if start is None:
                raise
            break
        start = start or captured
        found, all_lost = look(captured, replacements)
        lost = tuple(filter(counts, all_lost))
        if not lost and (isinstance(found, MoEMatch) or first is None):
            return found, first
        if not lost:
            break
        first = first or (_refusal(captured, lost[0]), lost)
        replacements = replaced(replacements, captured, lost) if len(replacements) < _MOST else None
    assert start is not None
    assert first is not None
    found, all_lost = look(start, Replacements(), form="free")
    return (found if isinstance(found, MoEMatch) and not any(map(counts, all_lost)) else first[0]), first


def _announced(captured: CapturedBlock, replacements: Replacements, prefer_earliest: bool, form: Form = "any") -> Found:
    """The match, with what it loses."""
    active = _replaced_nodes(captured, replacements)
    with announced("detect", captured.graph) as done:
        found = detect_block(captured, prefer_earliest, form)
        tags = tag(captured, expert_groups(captured.named_tensors()))
        regions = () if isinstance(found, Refusal) else found.regions
        lost = tuple(item for region in regions for item in _Walk(region, tags, active).run())
        said = _refusal(captured, lost[0]) if lost else found
        done.note = f"refused: {said.reason}" if isinstance(said, Refusal) else said.idiom
    return found, lost


def _replaced_nodes(captured: CapturedBlock, replacements: Replacements) -> frozenset[Node]:
    names = {*replacements.arguments, *replacements.held}
    return frozenset(
        node
        for node in captured.graph.nodes
        if record_of(node).number in replacements.results
        or (node.op in ("placeholder", "get_attr") and node.target in names)
    )


_REASONS = {
    "outputs": "{} is applied to what experts give, and would be lost",
    "added": "{} is added to what experts give, and would be lost",
    "hidden": "{} is part of what experts compute, and would be lost",
    "rows": "{} is applied to what experts are given, and would be lost",
    "factor": "{} is part of a factor on what experts give or are given, and would be lost",
    "weights": "{} is applied to parameters of the experts before these are read, and would be lost",
    "select": "{} decides which tokens an expert is given, beside the ids and weights that are read, and would be lost",
}


def _refusal(captured: CapturedBlock, lost: Lost) -> Refusal:
    name = operation(lost.node)
    place = next(iter(lost.node.users), lost.node) if lost.node.op == "placeholder" else lost.node
    if name in captured.constants:
        try:
            constant(captured, lost.node)
        except Refuse as found:
            return found.at(captured.path)
        name = "a tensor that is made anew of plain numbers"
    return Refusal(captured.path, _REASONS[lost.role].format(name), record_of(place).location)


def replaced(replacements: Replacements, captured: CapturedBlock, lost: Iterable[Lost]) -> Replacements | None:
    """``replacements`` and new values for what is lost: masks with zeros, scales other than one, comparisons that some rows fail,
    other factors (those of a softmax over scores far apart are exactly one).

    None if nothing of it can be given other values.
    """
    arguments, held, results = dict(replacements.arguments), dict(replacements.held), dict(replacements.results)
    for item in lost:
        node = item.node
        value, number = record_of(node).value, record_of(node).number
        if not is_tensor(node) or not value.numel():
            continue
        if node.op == "placeholder":
            new, known = _mask_like(value), arguments
        elif node.op == "get_attr" and str(node.target) not in captured.constants:
            new, known = _scale_like(value) if value.is_floating_point() else _mask_like(value), held
        elif node.op.startswith("call") and number not in results and not record_of(node).writes:
            if value.dtype == torch.bool:
                # One that fails at some of the places where it holds; or that holds at some if it holds nowhere.
                results[number] = value & ~_chosen(value) if bool(value.any()) else _chosen(value)
            elif value.is_floating_point() and item.role in ("factor", "select"):
                results[number] = _scale_like(value)
            continue
        else:
            continue
        if new is not None:
            known[str(node.target)] = new
    found = Replacements(arguments, held, results)
    return found if len(found) > len(replacements) else None


def _chosen(value: torch.Tensor) -> torch.Tensor:
    """A quarter of the places at random, at least one; none of a single one."""
    count = max(1, value.numel() // 4) if value.numel() > 1 else 0
    order = torch.randperm(value.numel(), generator=torch.Generator().manual_seed(value.numel()), device="cpu")
    chosen = torch.zeros(value.numel(), dtype=torch.bool, device="cpu")
    chosen[order[:count]] = True
    return chosen.reshape(value.shape).to(value.device)


def _mask_like(value: torch.Tensor) -> torch.Tensor | None:
    """A mask of one number, with the other number at some places."""
    first = value.flatten()[0]
    if not bool((value == first).all()) or value.is_complex():
        return None
    other = (
        ~first if value.dtype == torch.bool else torch.zeros_like(first) if bool(first != 0) else torch.ones_like(first)
    )
    return torch.where(_chosen(value), other, value)


def _scale_like(value: torch.Tensor) -> torch.Tensor:
    """Numbers between a half and three halves of the scale, none of them one."""
    noise = torch.rand(
        value.shape, generator=torch.Generator().manual_seed(value.numel() + 1), dtype=torch.float64, device="cpu"
    )
    factor = (0.5 + noise * 0.45 + (noise > 0.5)).to(value)
    return value * factor if bool((value != 0).all()) else value + factor / 8
