"""Takes over what a run left: parts of an experiment become one file; what holds less than the recorded file is left out."""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.swin_moe.journal import write_document

_PART = re.compile(r"(swin_.+)_v\d+\.json")


def collect(source: Path, results: Path) -> None:
    """Every ``swin_*.json`` of a folder or of gpu.sh's tar file goes to ``results``."""
    if source.is_dir() and (source / "swin.tar").exists():
        source = source / "swin.tar"
    if source.is_dir():
        _collect(source, results)
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        _collect(Path(folder), results)


def _collect(source: Path, results: Path) -> None:
    documents: dict[str, dict[str, Any]] = {}
    for path in sorted(source.glob("swin_*.json")):
        document = json.loads(path.read_text())
        part = _PART.fullmatch(path.name)
        name = f"{part[1]}.json" if part else path.name
        whole = documents.setdefault(name, {"environment": document["environment"], "records": []})
        whole["environment"] = whole["environment"] or document["environment"]
        whole["records"] += document["records"]
    for name, document in documents.items():
        _take(results / name, document)


def _take(path: Path, document: dict[str, Any]) -> None:
    new, old = measured(document), measured(json.loads(path.read_text())) if path.exists() else 0
    if new < old:
        print(f"{path.name}: {new} cases measured, the recorded file has {old}: left as it is")
        return
    write_document(path, document)
    print(f"{path.name}: {new} cases measured, {len(document['records']) - new} not")


def measured(document: dict[str, Any]) -> int:
    """Records with a result."""
    return sum("error" not in r and "skipped" not in r for r in document["records"])
