"""The README's code runs, and its commands are the ones CI uses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[tuple[str, str]]:
    """(page and number, code) of every Python block that is not marked ``no-test``."""
    return [
        (f"{page.name}-{number}", code)
        for page in PAGES
        for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in blocks()])
def test_code_block_runs(code: str) -> None:
    pytest.importorskip("transformers")
    exec(compile(code, "<documentation>", "exec"), {"__name__": "documentation"})


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


def test_result_tables_are_the_recorded_ones() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.layers() in readme
    assert tables.decode() in readme
