"""Tables of README.md, docs/how_fast.md and docs/kernels.md, and the plot, are what was recorded; a missed goal is set in bold."""

import json
from pathlib import Path

import pytest

from benchmarks import kernel_docs as docs
from benchmarks import results_plot, speed_plots
from benchmarks.pages import fill


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path) -> None:
    text, sections = page.read_text(encoding="utf-8"), docs.PAGES[page]
    assert text == fill(text, sections, docs.RESULTS), "run python -m benchmarks.kernel_docs"
    assert all(f"<!-- {name} -->" in text for name in sections)


def test_what_misses_its_goal_is_bold(tmp_path: Path) -> None:
    record = json.loads((docs.RESULTS / docs.LAYERS).read_text())
    for row in record["rows"]:
        if row["impl"] == "hexa" and row["shape"] == "olmoe":
            row["train_ratio"], row["forward_ratio"] = 1.26, 1.204
            row["forward_ms"] = 2.0 if row["routing"] == "balanced" else 2.11
    (tmp_path / docs.LAYERS).write_text(json.dumps(record))
    line = next(line for line in docs.layers(tmp_path).splitlines() if line.startswith("| olmoe"))
    assert "**1.26**" in line
    assert "1.20" in line
    assert "**1.20**" not in line
    assert "**+5.5 %**" in line


def test_the_plots_are_those_of_the_records() -> None:
    for place, text in (results_plot.drawn(docs.RESULTS) | speed_plots.drawn(docs.RESULTS)).items():
        assert place.read_text(encoding="utf-8") == text
