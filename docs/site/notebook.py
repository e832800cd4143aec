"""Runs the notebook and keeps its outputs in it, without paths of the machine: ``python docs/site/notebook.py`` (extra docs)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[2] / "examples" / "walkthrough.ipynb"
_PACKAGES = re.compile(r"/[^\s\"'<>]*?/(?=site-packages/)")


def run() -> Any:
    """The notebook after a run in a kernel of its own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return notebook


def without_paths(notebook: Any) -> str:
    """The notebook as it is kept: no warnings, times of cells or folders of the machine that ran it."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return _PACKAGES.sub("", nbformat.writes(notebook)) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(without_paths(run()), encoding="utf-8")
