"""Measured tiles: a table a card ships with the package, another is what autotuning found on this machine.

An entry belongs to a bucket of shapes, never to a token count. A shape without an entry takes its nearest neighbour's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import log2
from pathlib import Path

TileFields = Mapping[str, int | bool]
"""A tile by the field names of its family's own tile class."""

REACH = 1.5
"""How far a neighbour may be: the sum over rows, inner and columns of the difference in powers of two."""


@dataclass(frozen=True)
class Problem:
    """What tuning tells apart.

    Args:
        family: `KernelSpec.family`.
        op: `KernelSpec.op`.
        dtype: name of the element type.
        gather: whether a row operand is gathered.
        rows: log2 of the rows an expert gets on average (`heuristics.row_bucket`).
        inner: depth of the contraction; for a weight's gradient its rows.
        columns: columns of the result.
    """

    family: str
    op: str
    dtype: str
    gather: bool
    rows: int
    inner: int
    columns: int

    def distance(self, other: Problem) -> float:
        """Infinite for another kind of problem."""
        if any(getattr(self, name) != getattr(other, name) for name in ("family", "op", "dtype", "gather")):
            return float("inf")
        sizes = ((self.inner, other.inner), (self.columns, other.columns))
        return abs(self.rows - other.rows) + sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in sizes)


class TunedTable:
    """Problem -> tile, with its milliseconds, of one card. Immutable: `with_entry` returns another.

    Args:
        card: the card's name as its driver gives it, or a part of it that only such cards have.
    """

    def __init__(self, card: str, entries: Mapping[Problem, tuple[TileFields, float]] | None = None) -> None:
        self.card, self.entries = card, dict(entries or {})

    def find(self, problem: Problem, reach: float = REACH) -> TileFields | None:
        """The tile of `problem`, or of its nearest neighbour no further than `reach`."""
        nearest = min(self.entries, key=problem.distance, default=None)
        if nearest is None or problem.distance(nearest) > reach:
            return None
        return self.entries[nearest][0]

    def with_entry(self, problem: Problem, tile: TileFields, ms: float) -> TunedTable:
        """A table that also has this entry."""
        return TunedTable(self.card, {**self.entries, problem: (dict(tile), ms)})

    def to_json(self) -> str:
        """One entry a line, sorted, so that a table reads and differs well."""
        rows = sorted(
            json.dumps({**asdict(problem), "tile": dict(tile), "ms": round(ms, 5)}, sort_keys=True)
            for problem, (tile, ms) in self.entries.items()
        )
        return f'{{"card": {json.dumps(self.card)}, "tiles": [\n ' + ",\n ".join(rows) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> TunedTable:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on anything else."""
        found, entries = json.loads(text), dict[Problem, tuple[TileFields, float]]()
        for row in found["tiles"]:
            tile, ms = row.pop("tile"), row.pop("ms")
            entries[Problem(**row)] = (tile, ms)
        return cls(found["card"], entries)


@cache
def shipped(device_name: str) -> TunedTable:
    """The table that ships for a card, by the name its driver gives it; empty if there is none."""
    tables = (TunedTable.from_json(path.read_text()) for path in sorted(Path(__file__).parent.glob("tuned_*.json")))
    return next((table for table in tables if table.card in device_name), TunedTable(device_name))
