"""The page that leads to the pages of several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.files import asset, render, styles
from hexa_fx.inspection.text import cost_rows


@dataclass(frozen=True)
class Exhibit:
    """One model.

    Args:
        name: its type.
        blocks: the reports of its blocks.
        graphs, report: files beside the page; ``graphs`` is empty if no block was rewritten.
    """

    name: str
    blocks: Sequence[BlockReport]
    graphs: str
    report: str


def gallery_page(exhibits: Sequence[Exhibit]) -> str:
    """A card a model."""
    return render(
        "gallery.html.j2",
        title="gallery",
        css=styles("report.css", "gallery.css"),
        js=asset("theme.js"),
        logo=asset("logo.svg"),
        cards=[_card(exhibit) for exhibit in exhibits],
    )


def _card(exhibit: Exhibit) -> dict[str, Any]:
    rewritten = [block for block in exhibit.blocks if block.status == "rewritten"]
    first = rewritten[0] if rewritten else None
    return {
        "name": exhibit.name,
        "graphs": exhibit.graphs,
        "report": exhibit.report,
        "count": f"{len(rewritten)} of {len(exhibit.blocks)} rewritten",
        "refused": len(rewritten) < len(exhibit.blocks),
        "written": first.idiom if first else "",
        "expert": first.expert if first else "",
        "costs": cost_rows(first.costs) if first else [],
    }
