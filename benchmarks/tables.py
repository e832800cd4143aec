"""The README's result tables from benchmarks/results.   python benchmarks/tables.py   prints them; a test compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def layers() -> str:
    """One H200, bf16 SwiGLU, balanced routing: milliseconds and ratios to plain matmuls of the same FLOPs."""
    rows = _by_shape("moe_layer_h200_balanced.json")
    lines = [
        "| shape | forward: dense / hexa_fx / transformers grouped_mm (ms) | forward + backward (ms) | over dense | saved (MiB) | "
        "peak (MiB) |",
        "|---|---|---|---|---|---|",
    ]
    for shape, row in rows.items():
        dense, hexa, grouped = row["dense"], row["hexa"], row["hf-grouped"]
        forward = " / ".join(f"{r['forward_ms']:.2f}" for r in (dense, hexa, grouped))
        train = " / ".join(f"{r['train_ms']:.2f}" for r in (dense, hexa, grouped))
        saved, peak = (f"{hexa[key]:.0f} against {grouped[key]:.0f}" for key in ("saved_mib", "peak_mib"))
        lines.append(
            f"| {shape} | {forward} | {train} | {hexa['forward_ratio']:.2f}, {hexa['train_ratio']:.2f} | {saved} | {peak} |"
        )
    return "\n".join(lines)


def decode() -> str:
    """The same card, a few tokens: forward milliseconds."""
    rows = _by_shape("moe_layer_h200_decode.json")
    others = {"hf-grouped": "grouped_mm", "hf-batched": "batched_mm", "hf-eager": "eager"}
    lines = ["| tokens | hexa_fx (ms) | transformers " + ", ".join(others.values()) + " (ms) |", "|---|---|---|"]
    for shape, row in rows.items():
        name = shape.replace("-t", ", T = ")
        theirs = ", ".join(f"{row[impl]['forward_ms']:.2f}" for impl in others)
        lines.append(f"| {name} | {row['hexa']['forward_ms']:.2f} | {theirs} |")
    return "\n".join(lines)


def _by_shape(name: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads((RESULTS / name).read_text())["rows"]:
        rows.setdefault(row["shape"], {})[row["impl"]] = row
    return rows


if __name__ == "__main__":
    print(layers(), decode(), sep="\n\n")
