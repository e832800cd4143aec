"""The README's commands are the ones CI uses, its links lead somewhere, its tables are what was recorded (code: test_docs)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.zoo.pattern_table import summary

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_exactly_two_set_up_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for marker in ("install", "tests"):
        (section,) = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", readme, re.DOTALL)
        commands = [line for line in section.splitlines() if line and not line.startswith("```")]
        assert len(commands) == 1


def test_local_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_supported_patterns_are_those_of_the_zoo() -> None:
    """`python -m tests.zoo.pattern_table --write docs/patterns.md` writes both pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- patterns -->\n(.*?)\n<!-- /patterns -->", readme, re.DOTALL)
    assert table == summary((ROOT / "docs" / "patterns.md").read_text(encoding="utf-8"))
