"""Finds places for the names of results on their arrows, where they cover neither a box nor each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hexa_fx.inspection.layout import Layout
from hexa_fx.inspection.picture import Arrow

_CHARACTER, _HEIGHT = 6.4, 13.0
_BADGE = 8.0  # how far the number of a loop's runs stands out of its box
_SHARES = (0.5, 0.35, 0.65, 0.2, 0.8)


@dataclass(frozen=True)
class Label:
    """The name of an arrow's value: the middle of its text, and its size."""

    arrow: Arrow
    x: float
    y: float
    width: float
    height: float = _HEIGHT

    def covers(self, x: float, y: float, width: float, height: float) -> bool:
        """Whether it overlaps a rectangle, given by its middle."""
        return abs(self.x - x) < (self.width + width) / 2 and abs(self.y - y) < (self.height + height) / 2


def place_labels(layout: Layout) -> list[Label]:
    """A label for every named value, once, as near to where it comes from as there is room; none where there is no room."""
    placed: list[Label] = []
    seen: set[tuple[str, str]] = set()
    for route in layout.routes:
        key = (route.arrow.source, route.arrow.name)
        if not route.arrow.name or key in seen:
            continue
        width = _CHARACTER * len(route.arrow.name) + 4
        candidates = (Label(route.arrow, x, y, width) for x, y in _along(route.points))
        free = next((label for label in candidates if _is_free(label, placed, layout)), None)
        if free is not None:
            seen.add(key)
            placed.append(free)
    return placed


def _along(points: tuple[tuple[float, float], ...]) -> Iterator[tuple[float, float]]:
    for a, b in pairwise(points):
        for share in _SHARES:
            yield at(a, b, share)


def at(a: tuple[float, float], b: tuple[float, float], share: float) -> tuple[float, float]:
    """A point of the curve between two points that leaves and arrives upright."""
    rest = 1 - share
    middle = (a[1] + b[1]) / 2
    across = share * share * (3 - 2 * share)
    down = rest**3 * a[1] + 3 * rest * share * middle + share**3 * b[1]
    return a[0] + (b[0] - a[0]) * across, down


def _is_free(label: Label, placed: list[Label], layout: Layout) -> bool:
    if any(label.covers(other.x, other.y, other.width, other.height) for other in placed):
        return False
    boxes = layout.places.values()
    return not any(label.covers(box.x, box.y, box.width + 2 * _BADGE, box.height + _BADGE) for box in boxes)
