"""The README's commands are those of CI, its claims name what shows them, links lead somewhere (code: test_docs)."""

import re
from pathlib import Path

import pytest

from tests.zoo.pattern_table import summary

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OTHER_RATIOS = re.compile(
    r"\b\d[\d.]*x\b(?! ?\d)|\btimes (faster|slower|quicker)|\d ?%( to \d+ ?%)? (faster|slower|quicker)|\b\d+-fold|\bspeed-?ups?\b"
)
"""Ways of writing a ratio other than `2.4 times as fast`."""


def test_one_command_to_install_and_two_to_test() -> None:
    readme = README.read_text(encoding="utf-8")
    for marker, count in (("install", 1), ("tests", 2)):
        (section,) = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", readme, re.DOTALL)
        commands = [line for line in section.splitlines() if line and not line.startswith("```")]
        assert len(commands) == count


def test_it_is_read_in_a_minute() -> None:
    assert len(README.read_text(encoding="utf-8")) <= 9000


def test_every_claim_names_what_shows_it() -> None:
    """`<!-- claim: FILE, FILE::test -->` behind the claim. The files exist, and so do the tests in them."""
    readme = README.read_text(encoding="utf-8")
    claims = [source.strip() for found in re.findall(r"<!-- claim: (.*?) -->", readme) for source in found.split(",")]
    assert len(claims) > 8
    for claim in claims:
        path, _, test = claim.partition("::")
        assert (ROOT / path).is_file(), claim
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), claim


def test_no_figure_stands_without_a_claim() -> None:
    """A ratio, a time or an amount is in a paragraph that a claim follows."""
    text = re.sub(r"```.*?```", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraphs = [part for part in text.split("\n\n") if not part.startswith("|")]
    figures = re.compile(r"\d[\d.]* (times|%|ms|s\b|MiB|GiB|tokens)")
    assert any(figures.search(part) for part in paragraphs)
    assert not [part for part in paragraphs if figures.search(part) and "<!-- claim: " not in part]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_ratios_are_written_in_one_way(page: Path) -> None:
    """`2.4 times as fast`, `1.3 times as long`, `2 times as much`."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not [found.group() for found in OTHER_RATIOS.finditer(text)]


@pytest.mark.parametrize(
    "written", ["2.4x the speed", "3 times faster", "6 % slower", "a 10-fold gain", "a speedup of 2"]
)
def test_other_ratios_are_found(written: str) -> None:
    assert OTHER_RATIOS.search(written)


def test_local_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))  # x[i](y) is code
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_supported_patterns_are_those_of_the_zoo() -> None:
    """`python -m tests.zoo.pattern_table --write docs/patterns.md` writes both pages."""
    overview = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- patterns -->\n(.*?)\n<!-- /patterns -->", overview, re.DOTALL)
    assert table == summary((ROOT / "docs" / "patterns.md").read_text(encoding="utf-8"))
