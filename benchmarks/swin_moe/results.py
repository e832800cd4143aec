"""Recorded results, read for pages and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.swin_moe.contestants import OURS

Record = dict[str, Any]
Peaks = dict[tuple[str, int], float]
"""GiB by contestant and k."""


def load(folder: Path, experiment: str) -> list[Record]:
    """Records of an experiment, of all its files (``swin_memory.json``, ``swin_memory_small.json``, ...)."""
    pattern = re.compile(rf"swin_{experiment}(_(base|small|data|model|v\d))?\.json")
    found = sorted(path for path in folder.glob("swin_*.json") if pattern.fullmatch(path.name))
    return [record for path in found for record in json.loads(path.read_text())["records"]]


def measured(record: Mapping[str, Any]) -> bool:
    """Whether the case gave a result."""
    return "error" not in record and "skipped" not in record


def peaks(records: Iterable[Record], scale: str) -> Peaks:
    """Memory of one scale."""
    return {(r["name"], r["top_k"]): r["peak_gib"] for r in records if "peak_gib" in r and r["scale"] == scale}


def saving(peak: Peaks, ours: str, other: str, k: int, above: str | None = None) -> float | None:
    """Per cent that one contestant lies below another; ``above``: of what lies above this contestant. None if not known."""
    if not {(ours, k), (other, k)} <= set(peak) or (above and (above, k) not in peak):
        return None
    floor = peak[above, k] if above else 0.0
    return 100 * (1 - (peak[ours, k] - floor) / (peak[other, k] - floor))


def fastest(records: Iterable[Record]) -> float:
    """Seconds of the faster of our two settings, 0 if there is none."""
    return min((r["step_s"] for r in records if r["name"] in OURS and "step_s" in r), default=0.0)


def changes(records: Iterable[Record], key: str) -> dict[str, float]:
    """Per cent by which each variant of an ablation differs from the whole of its setting (padding: from data-centric)."""
    by = {r.get("variant", "padded capacity"): r[key] for r in records if key in r}
    found = {}
    for variant, value in by.items():
        whole = "data" if variant == "padded capacity" else variant.split(",")[0]
        if whole in by and whole != variant:
            found[variant] = 100 * (value / by[whole] - 1)
    return found
