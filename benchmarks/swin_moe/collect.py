"""Takes over what a run left, case by case: a case that was measured again replaces its old record, all others stay.

A document's environment (command, versions, device) is that of the latest run; a record that another run made carries its own.
"""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.swin_moe.journal import write_document
from benchmarks.swin_moe.results import Record, measured

_RESULT = re.compile(r"swin_\w+\.json")
_PART = re.compile(r"(swin_.+)_v\d+\.json")
_CASE = ("name", "variant", "scale", "case")


def collect(source: Path, results: Path) -> None:
    """Every ``swin_*.json`` of a folder or of gpu.sh's tar file goes to ``results``."""
    if source.is_dir() and (source / "swin.tar").exists():
        source = source / "swin.tar"
    if source.is_dir():
        _collect(source, results)
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                if file is not None and _RESULT.fullmatch(member.name):  # a plain name: nothing leaves the folder
                    (Path(folder) / member.name).write_bytes(file.read())
        _collect(Path(folder), results)


def _collect(source: Path, results: Path) -> None:
    """Parts of an experiment (``swin_convergence_v3.json``) go to one file."""
    for path in sorted(source.glob("swin_*.json")):
        part = _PART.fullmatch(path.name)
        target = results / (f"{part[1]}.json" if part else path.name)
        new = json.loads(path.read_text())
        old = json.loads(target.read_text()) if target.exists() else {"environment": {}, "records": []}
        both = merged(old, new)
        write_document(target, both)
        print(f"{target.name}: {_count(new)} cases measured by this run, {_count(both)} by all")


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both documents' cases, in the old one's order. A case without a result never replaces one that has it."""
    environment = new["environment"] or old["environment"]
    cases: dict[tuple[Any, ...], Record] = {}
    for document in (old, new):
        for record in document["records"]:
            before = cases.get(_case(record))
            if before is None or measured(record) or not measured(before):
                cases[_case(record)] = _with_environment(record, document["environment"], environment)
            elif "error" in record:
                print(f"  {_case(record)} failed, its recorded result stays: {record['error']}")
    return {"environment": environment, "records": list(cases.values())}


def _case(record: Record) -> tuple[Any, ...]:
    """What tells a case from the others of its experiment; convergence trains one k, which its failures do not name."""
    return (*(record.get(key) for key in _CASE), record.get("top_k") if "scale" in record else None)


def _with_environment(record: Record, made: Mapping[str, Any], whole: Mapping[str, Any]) -> Record:
    own = record.get("environment", made)
    bare = {key: value for key, value in record.items() if key != "environment"}
    return bare if not own or own == whole else {**bare, "environment": dict(own)}


def _count(document: Mapping[str, Iterable[Record]]) -> int:
    return sum(map(measured, document["records"]))
