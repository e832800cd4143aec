"""What survives the ranks of a run: its records, and the case that was under way when they died."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIVE_UP = 2
"""Fatal failures of a contestant after which its other cases are left out."""

Record = dict[str, Any]


class Journal:
    """One run's JSON files, ``swin_<experiment><tag>.json``, and ``.running<tag>``, which names the case under way."""

    def __init__(self, out: Path, tag: str, experiments: tuple[str, ...] = ()) -> None:
        self.out, self.tag = out, tag
        self.running = out / f".running{tag}"
        self.experiments = experiments

    def clear(self) -> None:
        """Before the first ranks of a run."""
        self.out.mkdir(parents=True, exist_ok=True)
        for path in (self.running, *self._files().values()):
            path.unlink(missing_ok=True)

    def _files(self) -> dict[str, Path]:
        return {name: self.out / f"swin_{name}{self.tag}.json" for name in self.experiments}

    def records(self) -> dict[str, list[Record]]:
        """What earlier ranks of this run recorded, by experiment."""
        there = {name: path for name, path in self._files().items() if path.exists()}
        return {name: list(json.loads(path.read_text())["records"]) for name, path in there.items()}

    def failures(self, about: Mapping[str, Any]) -> int:
        """How many cases of the same contestant ended a set of ranks."""
        every = [record for records in self.records().values() for record in records]
        return sum("fatal" in record and record.get("name") == about.get("name") for record in every)

    def begin(self, experiment: str, about: Mapping[str, Any]) -> None:
        """A case starts."""
        _replace(self.running, {"experiment": experiment, "about": dict(about), "since": time.time()})

    def end(self) -> None:
        """The case under way is recorded."""
        self.running.unlink(missing_ok=True)

    def seconds(self) -> float:
        """For how long the case under way has been running; 0 if there is none."""
        found = self._case()
        return time.time() - found["since"] if found else 0.0

    def _case(self) -> Record | None:
        try:
            found: Record = json.loads(self.running.read_text())
        except (OSError, ValueError):
            return None
        return found

    def record_failure(self, reason: str) -> bool:
        """Records the case under way as failed. False if there was none, so that starting again would change nothing."""
        found = self._case()
        if found is None:
            return False
        path = self.out / f"swin_{found['experiment']}{self.tag}.json"
        document = json.loads(path.read_text()) if path.exists() else {"environment": {}, "records": []}
        document["records"].append({**found["about"], "error": reason[:300], "fatal": True})
        write_document(path, document)
        self.end()
        return True


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all: a reader or a kill may come at any time."""
    _replace(path, document)


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(draft, path)
