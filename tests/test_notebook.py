"""The notebook runs as a reader runs it, in a kernel of its own (with the extra `docs`), and keeps no outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "walkthrough.ipynb"


def test_no_outputs_are_kept() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_it_runs() -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install '.[docs]'")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [
        {key for output in cell.outputs for key in output.get("data", {})}
        for cell in notebook.cells
        if "outputs" in cell
    ]
    assert sum("text/html" in kinds for kinds in shown) == 2  # the report and the graphs
    assert any("image/png" in kinds for kinds in shown)
    (difference,) = [
        float(output["data"]["text/plain"])
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if cell.source.startswith("def train") and "data" in output
    ]
    assert difference < 1e-4
