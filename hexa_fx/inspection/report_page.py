"""The report as a self-contained page."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.page import ASSETS, render
from hexa_fx.inspection.text import amount


def report_page(blocks: Sequence[BlockReport], summary: str, plan: str, title: str) -> str:
    """The reports of all blocks as HTML, which loads nothing from the network. ``plan`` is empty on one device."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for block in blocks:
        key = (block.same_as or block.path, block.reason)
        if key in groups:
            groups[key]["same"].append(block.path)
        else:
            groups[key] = {
                "first": block,
                "same": [],
                "facts": _facts(block),
                "costs": _costs(block),
                "line": _line(block),
            }
    return render(
        "report.html.j2",
        title=title,
        css=(ASSETS / "report.css").read_text(encoding="utf-8"),
        summary=summary,
        groups=list(groups.values()),
        plan=plan,
    )


def _facts(block: BlockReport) -> list[tuple[str, str]]:
    named = [
        ("written as", block.idiom),
        ("E", block.num_experts),
        ("k", block.top_k),
        ("D", block.hidden_size),
        ("I", block.intermediate_size),
        ("expert", block.expert),
        ("weights", f"{block.weights} {block.layout}".strip()),
    ]
    return [(name, str(value)) for name, value in named if value]


def _costs(block: BlockReport) -> list[tuple[str, str, str, float]]:
    """(what, before, after, after in percent of before)."""
    if block.costs is None:
        return []
    before, after = block.costs.before, block.costs.after
    rows = [
        ("matrix products", "FLOP", before.flops, after.flops),
        ("bytes moved", "B", before.moved, after.moved),
        (f"kept for backward, {block.costs.device}", "B", before.saved, after.saved),
    ]
    return [
        (name, amount(old, unit), amount(new, unit), round(min(100.0, 100 * new / max(old, 1)), 1))
        for name, unit, old, new in rows
        if old is not None and new is not None
    ]


def _line(block: BlockReport) -> str:
    where = block.location
    return "" if where is None else where.code or linecache.getline(where.file, where.line).strip()
