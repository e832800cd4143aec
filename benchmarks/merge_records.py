"""Puts the records of several runs of one benchmark into one file.   python benchmarks/merge_records.py OUT IN..."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_KEY = ("question", "shape", "tokens", "mode", "kind", "split", "reduce", "layers", "captured", "sms", "section")


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The last run's header with all commands; of records that say the same thing the last."""
    records: dict[str, dict[str, Any]] = {}
    for run in runs:
        for record in run["records"]:
            records[json.dumps([record.get(key) for key in _KEY])] = record
    head = {key: value for run in runs for key, value in run.items() if key not in ("records", "note")}
    head["command"] = " && ".join(dict.fromkeys(run["command"] for run in runs))
    return head | {"records": list(records.values())}


def main() -> None:
    out, *given = sys.argv[1:]
    runs = [json.loads(Path(path).read_text()) for path in given if Path(path).exists()]
    if not runs:
        sys.exit(f"nothing was recorded, {out} stays as it is")
    Path(out).write_text(json.dumps(merged(runs), indent=1) + "\n")


if __name__ == "__main__":
    main()
