"""The notebook runs as a reader runs it, in a kernel of its own (with the extra `docs`), on the operators; its outputs are kept."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "walkthrough.ipynb"


def test_outputs_are_kept_without_paths_of_a_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    said = "python docs/site/notebook.py"
    assert all(cell["execution_count"] for cell in cells), said
    assert "calls of the two blocks" in text, said
    assert not re.search(r"/(home|root|work|usr|tmp)/", text), said


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="pip install '.[docs]'")
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    from notebook import run

    outputs = [(cell.source, output) for cell in run().cells for output in cell.get("outputs", ())]
    kinds = [set(output.get("data", {})) for _, output in outputs]
    assert sum("text/html" in each for each in kinds) == 2  # the report and the graphs
    assert any("image/png" in each for each in kinds)
    (difference,) = [
        float(o["data"]["text/plain"]) for source, o in outputs if source.startswith("def train") and "data" in o
    ]
    assert difference < 1e-4
    (ran,) = [output["text"] for _, output in outputs if "operators ran in" in output.get("text", "")]
    assert ran.startswith("operators ran in [21, 21]")
