"""Decides what is drawn of a graph: boxes and arrows.

Sizes and other plumbing are left out, as are inputs that nothing reads. Tuples become several arrows, and a loop that
ran many times is drawn once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hexa_fx.inspection.operators import CHECKS
from hexa_fx.inspection.view import GraphView, NodeView, Role, TensorType

_PASSED_ON = ("after", "require_experts")
"""What gives its first argument, as it is or after something was written to it."""
_PLUMBING = (*"size numel dim __len__ item tolist __bool__ __int__".split(), *_PASSED_ON, *CHECKS)
_LONGEST_LOOP = 96


@dataclass(frozen=True)
class Box:
    """A node of the picture.

    Args:
        name: name of the node.
        title, subtitle: text in the box.
        role, keys: see `hexa_fx.inspection.roles`.
        times: how many runs of a loop it stands for.
        members: names of all nodes that it stands for.
    """

    name: str
    title: str
    subtitle: str
    role: Role
    kind: str
    keys: tuple[str, ...]
    times: int = 1
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrow:
    """A value on its way between boxes, with a ``name`` if it is one of several results."""

    source: str
    target: str
    type: TensorType | None = None
    name: str = ""

    @property
    def label(self) -> str:
        """Name and type."""
        return f"{self.name} {self.type or ''}".strip()


@dataclass(frozen=True)
class Picture:
    """Boxes in execution order, and arrows without repetition."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def picture_of(graph: GraphView) -> Picture:
    """What to draw of a graph."""
    return _Drawing(graph).picture()


@dataclass
class _Drawing:
    graph: GraphView
    by_name: dict[str, NodeView] = field(default_factory=dict)
    stands_for: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    varied: set[str] = field(default_factory=set)
    """Nodes of runs that another run of the same loop stands for, though it does more."""

    def picture(self) -> Picture:
        self.by_name = {node.name: node for node in self.graph.nodes}
        shown = [node for node in self.graph.nodes if self._is_shown(node)]
        self._fold([node for node in shown if node.kind in ("call", "module")])
        self._fold_leaves(shown)
        arrows = self._arrows(shown)
        touched = {a.source for a in arrows} | {a.target for a in arrows}
        boxes = tuple(
            self._box(node)
            for node in shown
            if self._is_head(node.name) and (node.name in touched or node.kind in ("call", "module"))
        )
        return Picture(boxes, tuple(arrows))

    def _is_shown(self, node: NodeView) -> bool:
        if node.index is not None or node.op in _PLUMBING:
            return False
        holds_no_tensor = bool(node.types) and not any(node.types)
        return node.kind != "call" or not holds_no_tensor

    # -- loops ---------------------------------------------------------------------------------------------------------

    def _fold(self, nodes: Sequence[NodeView]) -> None:
        """Finds stretches of the run that repeat, and lets the first repetition stand for all of them."""
        labels = [(n.op, str(n.where or n.role)) for n in nodes]  # of one line, the first run may have another role
        at = 0
        while at < len(nodes):
            runs = _runs_with_branches(labels, at)
            if runs:
                self._fold_runs(nodes, labels, runs)
                at = runs[-1][1]
                continue
            period, times = _repetition(labels, at)
            for k in range(1, times):
                for i in range(period):
                    self.stands_for[nodes[at + k * period + i].name] = nodes[at + i].name
            if times > 1:
                self.times.update({nodes[at + i].name: times for i in range(period)})
            at += period * times

    def _fold_runs(self, nodes: Sequence[NodeView], labels: Sequence[object], runs: Sequence[tuple[int, int]]) -> None:
        """Lets the run that does most stand for all."""
        start, stop = max(runs, key=lambda run: run[1] - run[0])
        self.times.update({node.name: 1 for node in nodes[start:stop]})
        for first, end in runs:
            places = _places(labels[first:end], labels[start:stop]) if first != start else None
            for node, place in zip(nodes[first:end], places or ()):
                head = nodes[start + place].name
                self.stands_for[node.name] = head
                self.varied.add(node.name)
                self.times[head] += 1

    def _fold_leaves(self, shown: Iterable[NodeView]) -> None:
        """A parameter that only folded nodes read is folded into the one that the first repetition reads in its place."""
        for node in shown:
            head = self.stands_for.get(node.name)
            if head is None:
                continue
            for mine, first in zip(node.inputs, self.by_name[head].inputs):
                leaf = self.by_name[mine]
                if leaf.kind == "parameter" and mine != first and mine not in self.stands_for:
                    self.stands_for[mine] = first
                    self.times[first] = self.times.get(head, 1)

    def _is_head(self, name: str) -> bool:
        return name not in self.stands_for

    def _head(self, name: str) -> str:
        while name in self.stands_for:
            name = self.stands_for[name]
        return name

    # -- arrows --------------------------------------------------------------------------------------------------------

    def _arrows(self, shown: Sequence[NodeView]) -> list[Arrow]:
        visible = {node.name for node in shown}
        order = {node.name: i for i, node in enumerate(self.graph.nodes)}
        found: dict[tuple[str, str, str], Arrow] = {}
        for node in shown:
            # later runs of a loop read as the first does
            for name in node.inputs if self._is_head(node.name) or node.name in self.varied else ():
                arrow = self._arrow(name, node, visible)
                if arrow is not None and order[arrow.source] < order[arrow.target]:
                    found.setdefault((arrow.source, arrow.target, arrow.name), arrow)
        return list(found.values())

    def _arrow(self, name: str, node: NodeView, visible: set[str]) -> Arrow | None:
        """From where a value really comes: past results of tuples and reads after a write."""
        label, type_ = "", self.by_name[name].type
        while name not in visible:
            source = self.by_name[name]
            if not source.inputs or (source.op in _PLUMBING and source.op not in _PASSED_ON):
                return None
            if source.index is not None and not label:
                label = f"[{source.index}]" if source.name.startswith("getitem") else source.name
            name = source.inputs[0]
        head, target = self._head(name), self._head(node.name)
        return None if head == target else Arrow(head, target, type_, label)

    def _box(self, node: NodeView) -> Box:
        members = [node.name, *(name for name in self.stands_for if self._head(name) == node.name)]
        own = set(members)
        results = [n for n in self.graph.nodes if n.index is not None and n.inputs and n.inputs[0] in own]
        keys = dict.fromkeys(k for name in members for k in self.by_name[name].keys)
        keys.update(dict.fromkeys(k for n in results for k in n.keys))
        return Box(
            node.name,
            _title(node),
            _subtitle(node),
            node.role,
            node.kind,
            tuple(keys),
            self.times.get(node.name, 1),
            (*members, *(n.name for n in results)),
        )


def _places(part: Sequence[object], whole: Sequence[object]) -> list[int] | None:
    """Where the items of one sequence stand in another, in order; None if one does not."""
    places: list[int] = []
    for item in part:
        at = places[-1] + 1 if places else 0
        if item not in whole[at:]:
            return None
        places.append(at + whole[at:].index(item))
    return places


def _runs_with_branches(labels: Sequence[object], at: int) -> list[tuple[int, int]]:
    """Starts and ends of the runs of a loop that begins here, some of which leave out what an ``if`` leaves out; else empty."""
    starts = [place for place in range(at, len(labels)) if labels[place] == labels[at]]
    lengths = [after - before for before, after in pairwise(starts)]
    if len(set(lengths)) < 2 or min(lengths) < 3 or not max(lengths) <= min(_LONGEST_LOOP, 2 * min(lengths)):
        return []
    start, stop = max(pairwise(starts), key=lambda run: run[1] - run[0])
    whole = labels[start:stop]
    end = starts[-1]
    while end < len(labels) and _places(labels[starts[-1] : end + 1], whole) is not None:
        end += 1
    runs = [*pairwise(starts), (starts[-1], end)]
    return runs if all(_places(labels[first:last], whole) is not None for first, last in runs) else []


def _repetition(labels: Sequence[object], at: int) -> tuple[int, int]:
    """(period, times) of the longest repetition that starts here; (1, 1) if nothing repeats three times, or twice in a row of
    three and more."""
    best, saved = (1, 1), 0
    for period in range(1, min(_LONGEST_LOOP, (len(labels) - at) // 2) + 1):
        unit, times = labels[at : at + period], 1
        while labels[at + times * period : at + (times + 1) * period] == unit:
            times += 1
        if (times - 1) * period > saved and (times >= 3 or (times == 2 and period >= 4)):
            best, saved = (period, times), (times - 1) * period
    return best


def _title(node: NodeView) -> str:
    if node.kind == "parameter":
        return _shortened(node.detail, 30)
    if node.kind == "input":
        return node.name
    return _shortened(node.op, 34)


def _subtitle(node: NodeView) -> str:
    """The type of what it gives; where that is unknown, its plain arguments."""
    if node.kind == "output":
        return ""
    types = ", ".join(str(t) for t in node.types if t is not None)
    if len(types) > 30:
        return f"{len(node.types)} results"
    return types or _shortened("" if node.kind == "parameter" else node.detail, 30)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-(width // 2) :]}"
