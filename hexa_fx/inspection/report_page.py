"""The report as a self-contained page."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.facts import Facts
from hexa_fx.inspection.files import asset, render, styles
from hexa_fx.inspection.text import cost_rows, exchanges, gathered, measured_on, runs_with


def report_page(blocks: Sequence[BlockReport], summary: str, plan: str, title: str) -> str:
    """The reports of all blocks as a page, which loads nothing from the network. ``plan`` is empty on one device."""
    return render(
        "report.html.j2",
        title=title,
        css=styles("report.css"),
        js=asset("theme.js"),
        logo=asset("logo.svg"),
        summary=summary,
        groups=_groups(blocks),
        plan=plan,
    )


def report_fragment(blocks: Sequence[BlockReport], summary: str, plan: str) -> str:
    """The same for a notebook: without header, and with styles that touch nothing outside."""
    body = render("report_body.html.j2", summary=summary, groups=_groups(blocks), plan=plan)
    return f'<div class="hexa report"><style>{styles("report.css")}</style>{body}</div>'


def _groups(blocks: Sequence[BlockReport]) -> list[dict[str, Any]]:
    return [
        {
            "first": block,
            "same": [other.name for other in alike],
            "facts": _facts(block),
            "costs": cost_rows(block.costs),
            "line": _line(block),
            "notes": _notes(block),
            "exchanges": exchanges(block),
            "measured_on": measured_on(block) if block.costs else "",
        }
        for block, alike in gathered(blocks)
    ]


def _facts(block: BlockReport) -> tuple[tuple[str, str], ...]:
    return Facts(**{field.name: getattr(block, field.name) for field in fields(Facts)}).pairs()


def _notes(block: BlockReport) -> list[str]:
    """What a rewritten block runs with, when its own code runs, and what was not measured."""
    notes = [f"{block.does_now}: {block.now}"] if block.now else []
    notes += [str(block.calls)] if str(block.calls) else []
    notes += runs_with(block)
    notes += [f"what is kept for backward {block.costs.not_saved}"] if block.costs and block.costs.not_saved else []
    return notes


def _line(block: BlockReport) -> str:
    where = block.location
    return "" if where is None else where.code or linecache.getline(where.file, where.line).strip()
