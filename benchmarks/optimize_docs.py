"""The tables of docs/optimize_time.md, from the recorded results.   python -m benchmarks.optimize_docs   writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import fill, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "optimize_time.md"


def blocks(folder: Path) -> str:
    """Every real block, cold and warm."""
    found = json.loads((folder / "real_blocks_h200.json").read_text())
    by_block: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        by_block.setdefault(row["block"], {})[row["cache"]] = row
    head = ["block", "weights (GiB)", "cold (s)", "warm (s)", "beside it: device (GiB)", "host (GiB)", "kernels"]
    head += ["longest call after a cold start", "checked"]
    return table(head, [_block(name, row["cold"], row["warm"]) for name, row in by_block.items()]) + _measured(found)


def _block(name: str, cold: dict[str, Any], warm: dict[str, Any]) -> list[object]:
    if not cold["rewritten"]:
        return [name, cold.get("weights_gib", ""), *[""] * 6, "refused: " + "; ".join(cold["reasons"])]
    device, host = (max(cold[key], warm[key]) for key in ("device_gib", "host_gib"))
    longest = f"{cold['longest_s']:.2f} s ({cold['longest_at']})"
    checks = ", ".join(
        sorted({f"{check['dtype'].removeprefix('torch.')}, {check['cases']} cases" for check in cold["checks"]})
    )
    seconds = [f"{row['seconds']:.1f}" for row in (cold, warm)]
    return [
        name,
        f"{cold['weights_gib']:.2f}",
        *seconds,
        f"{device:.2f}",
        f"{host:.2f}",
        cold["kernels"],
        longest,
        checks,
    ]


def whole(folder: Path) -> str:
    """All layers of a model on one card."""
    found = json.loads((folder / "whole_h100.json").read_text())
    head = [
        "layers",
        "weights (GiB)",
        "optimize, empty cache (s)",
        "beside it: device (GiB)",
        "host (GiB)",
        "logits against the original's",
    ]
    rows = [
        [
            row["layers"],
            f"{row['weights_gib']:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['device_gib']:.2f}",
            f"{row['host_gib']:.2f}",
            f"{row['logits_difference']:.1%} of their norm",
        ]
        for row in found["rows"]
    ]
    return table(head, rows) + _measured(found)


def pauses(folder: Path) -> str:
    """The first call of each kind, and those after it."""
    found = json.loads((folder / "pauses_h200.json").read_text())
    head = ["what is new", "first step (s)", "steps after it (ms)", "kinds of calls so far"]
    rows = [[r["change"], f"{r['first_s']:.2f}", f"{r['then_ms']:.1f}", r["kinds"]] for r in found["rows"]]
    if any(row["own"] for row in found["rows"]):
        raise ValueError("some calls ran the model's own code: say which")
    return table(head, rows) + _measured(found)


def tiny(folder: Path) -> str:
    """Seconds of processor time on tiny models by experts and layers, now and by an earlier version."""
    found = json.loads((folder / "optimize_time_cpu.json").read_text())
    head = [
        "model",
        "layers",
        "experts",
        "before (s)",
        "now (s)",
        "now / before",
        "unverified (s)",
        "weights (MiB)",
        "grown by (MiB)",
    ]
    rows = [_tiny(row) for row in found["rows"] if row["question"] == "optimize"]
    measured = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    return table(head, rows) + f"\n\nMeasured with {measured}."


def _tiny(row: dict[str, Any]) -> list[object]:
    before, now = row["seconds_before"], row["seconds"]
    seconds = [f"{before:.2f}", f"{now:.2f}", f"{now / before:.2f}", f"{row['seconds_without_verify']:.2f}"]
    return [row["model"], row["layers"], row["experts"], *seconds, row["weights_mb"], row["grown_mb"]]


def _measured(found: dict[str, Any]) -> str:
    return "\n\nMeasured with " + ", ".join(f"{k} {v}" for k, v in found["environment"].items() if k != "command") + "."


SECTIONS = {"blocks": blocks, "pauses": pauses, "whole": whole, "tiny": tiny}


def main() -> None:
    """Writes the page's tables anew."""
    PAGE.write_text(fill(PAGE.read_text(), SECTIONS, RESULTS))


if __name__ == "__main__":
    main()
