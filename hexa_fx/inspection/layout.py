"""Places boxes and arrows: layers from top to bottom, few crossings, straight arrows where possible.

The method of Sugiyama and others: longest-path layers, arrows over several layers led through points of their own, order
within a layer by the mean place of neighbours, then places that pull neighbours together without overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hexa_fx.inspection.picture import Arrow, Picture

BOX_HEIGHT = 40.0
_LAYER_GAP = 34.0
_BOX_GAP = 22.0
_POINT_GAP = 16.0
_MARGIN = 16.0
_SWEEPS = 12


@dataclass(frozen=True)
class Rectangle:
    """A box: its centre and size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """An arrow: the points it goes through, from the bottom of one box to the top of another."""

    arrow: Arrow
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Layout:
    """A picture with places."""

    width: float
    height: float
    places: Mapping[str, Rectangle]
    routes: tuple[Route, ...]


def lay_out(picture: Picture, width_of: Callable[[str], float]) -> Layout:
    """Places for a picture's boxes, whose widths are given by name."""
    layer = _layers(picture)
    rows, chains = _rows(picture, layer)
    _order(rows, chains)
    widths = {name: width_of(name) if name in layer else 2.0 for row in rows for name in row}
    x = _columns(rows, chains, widths)
    return _placed(picture, rows, chains, widths, x)


def _layers(picture: Picture) -> dict[str, int]:
    """Puts each box as early as its inputs allow; one without inputs goes right above its first reader."""
    before, after = defaultdict(list), defaultdict(list)
    for arrow in picture.arrows:
        before[arrow.target].append(arrow.source)
        after[arrow.source].append(arrow.target)
    layer: dict[str, int] = {}
    for box in picture.boxes:  # execution order is topological
        layer[box.name] = max((layer[name] + 1 for name in before[box.name]), default=0)
    for box in reversed(picture.boxes):
        if not before[box.name] and after[box.name]:
            layer[box.name] = min(layer[name] for name in after[box.name]) - 1
    first = min(layer.values(), default=0)
    return {name: number - first for name, number in layer.items()}


Chains = Mapping[Arrow, Sequence[str]]
"""For every arrow: its source, the points in between, its target."""


def _rows(picture: Picture, layer: Mapping[str, int]) -> tuple[list[list[str]], dict[Arrow, list[str]]]:
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for box in picture.boxes:
        rows[layer[box.name]].append(box.name)
    chains: dict[Arrow, list[str]] = {}
    shared: dict[tuple[str, str, int], str] = {}
    for arrow in picture.arrows:
        chain = [arrow.source]
        for number in range(layer[arrow.source] + 1, layer[arrow.target]):
            key = (arrow.source, arrow.name, number)  # readers of one value share the way there
            if key not in shared:
                shared[key] = f"{arrow.source}\0{arrow.name}\0{number}"
                rows[number].append(shared[key])
            chain.append(shared[key])
        chains[arrow] = [*chain, arrow.target]
    return rows, chains


def _neighbours(chains: Chains) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    up: dict[str, list[str]] = defaultdict(list)
    down: dict[str, list[str]] = defaultdict(list)
    for chain in chains.values():
        for above, below in pairwise(chain):
            if below not in down[above]:
                down[above].append(below)
                up[below].append(above)
    return up, down


def _order(rows: list[list[str]], chains: Chains) -> None:
    up, down = _neighbours(chains)
    best, fewest = [list(row) for row in rows], float("inf")
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        others = up if downwards else down
        for number in range(len(rows)) if downwards else reversed(range(len(rows))):
            beside = rows[number - 1] if downwards else rows[min(number + 1, len(rows) - 1)]
            place = {name: i / max(1, len(beside) - 1) for i, name in enumerate(beside)}
            own = {name: i / max(1, len(rows[number]) - 1) for i, name in enumerate(rows[number])}
            rows[number].sort(key=lambda name: _mean([place[n] for n in others[name] if n in place], own[name]))
        crossings = _crossings(rows, down)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(rows: Sequence[Sequence[str]], down: Mapping[str, Sequence[str]]) -> int:
    total = 0
    for above, below in pairwise(rows):
        place = {name: i for i, name in enumerate(below)}
        ends = [
            place[n] for name in above for n in sorted(down.get(name, ()), key=lambda n: place.get(n, 0)) if n in place
        ]
        total += sum(1 for i, a in enumerate(ends) for b in ends[i + 1 :] if a > b) if len(ends) < 400 else 0
    return total


def _columns(rows: Sequence[Sequence[str]], chains: Chains, widths: Mapping[str, float]) -> dict[str, float]:
    up, down = _neighbours(chains)
    x: dict[str, float] = {}
    for row in rows:
        _spread(row, dict.fromkeys(row, 0.0), widths, x)
    for sweep in range(2 * _SWEEPS):
        ordered = rows if sweep % 2 == 0 else list(reversed(rows))
        for row in ordered:
            wanted = {}
            for name in row:
                near = [x[n] for n in (*up.get(name, ()), *down.get(name, ()))]
                wanted[name] = _mean(near, x[name])
            _spread(row, wanted, widths, x)
    left = min((x[name] - widths[name] / 2 for row in rows for name in row), default=0.0)
    return {name: value - left + _MARGIN for name, value in x.items()}


def _spread(row: Sequence[str], wanted: Mapping[str, float], widths: Mapping[str, float], x: dict[str, float]) -> None:
    """The places nearest to the wanted ones, in least squares, that keep order and distance (pool adjacent violators)."""
    groups: list[tuple[float, float, list[str]]] = []  # mean of wanted minus offset, weight, members
    offset, offsets = 0.0, {}
    for before, name in zip(("", *row), row):
        if before:
            gap = _BOX_GAP if "\0" not in before and "\0" not in name else _POINT_GAP
            offset += widths[before] / 2 + gap + widths[name] / 2
        offsets[name] = offset
        weight = 1.0 if "\0" not in name else 2.0
        groups.append((wanted[name] - offset, weight, [name]))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, wa, left), (b, wb, right) = groups[-2], groups.pop()
            groups[-1] = ((a * wa + b * wb) / (wa + wb), wa + wb, left + right)
    for mean, _, members in groups:
        for name in members:
            x[name] = mean + offsets[name]


def _placed(
    picture: Picture, rows: Sequence[Sequence[str]], chains: Chains, widths: Mapping[str, float], x: Mapping[str, float]
) -> Layout:
    step = BOX_HEIGHT + _LAYER_GAP
    y = {name: _MARGIN + BOX_HEIGHT / 2 + step * number for number, row in enumerate(rows) for name in row}
    places = {box.name: Rectangle(x[box.name], y[box.name], widths[box.name], BOX_HEIGHT) for box in picture.boxes}
    routes = []
    for arrow, chain in chains.items():
        points = [(x[name], y[name]) for name in chain]
        points[0] = (points[0][0], points[0][1] + BOX_HEIGHT / 2)
        points[-1] = (points[-1][0], points[-1][1] - BOX_HEIGHT / 2)
        routes.append(Route(arrow, tuple(points)))
    right = max((x[name] + widths[name] / 2 for row in rows for name in row), default=0.0)
    return Layout(right + _MARGIN, 2 * _MARGIN + BOX_HEIGHT + step * (len(rows) - 1), places, tuple(routes))
