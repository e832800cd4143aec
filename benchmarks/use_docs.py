"""What pages say of loaded models in the set-ups that people use, and of a small model that is trained."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.pages import table

USE = "use_h100.json"
TRAINED = "train_small_moe_h100.json"
DECODES = ("8 tokens", "packed, 8 tokens")


def use(folder: Path) -> str:
    """By cell and model: milliseconds of hexa_fx, how many times those ``grouped_mm`` takes, bold where hexa_fx is slower."""
    rows = {(row["cell"], row["model"], row["impl"]): row for row in _read(folder / USE)}
    cells, models = (list(dict.fromkeys(key[part] for key in rows)) for part in (0, 1))
    return table(["set-up", *models], [[cell, *(_faster(rows, cell, model) for model in models)] for cell in cells])


def _faster(rows: dict[tuple[str, str, str], Any], cell: str, model: str) -> str:
    ours, theirs = (rows.get((cell, model, impl)) for impl in ("hexa", "grouped_mm"))
    if ours is None or theirs is None:
        return "not run"
    times = theirs["ms"] / ours["ms"]
    said = f"{ours['ms']:.1f} ms, {times:.2f}×"
    return f"**{said}**" if times < 1 else said


def use_in_short(folder: Path) -> str:
    """What the table of `use` comes to."""
    rows = _read(folder / USE)
    ours, theirs = ({(r["model"], r["cell"]): r for r in rows if r["impl"] == impl} for impl in ("hexa", "grouped_mm"))
    times = {key: theirs[key]["ms"] / row["ms"] for key, row in ours.items()}
    trained = [each for (_, cell), each in times.items() if cell not in (*DECODES, "prefill")]
    slower = [f"{model} with {cell} ({each:.2f}×)" for (model, cell), each in times.items() if each < 1]
    ran, own = sum(row["rewritten"] for row in ours.values()), sum(row["own"] for row in ours.values())
    first = sorted(row["first_s"] for row in ours.values())
    said = (
        f"Operators ran in {ran:,} of {ran + own:,} timed calls of blocks.",
        f"A training step is {min(trained):.2f} to {max(trained):.1f} times as fast (median {statistics.median(trained):.2f}).",
        f"Slower: {', '.join(slower)}.",
        f"First calls took {first[0]:.1f} to {first[-1]:.1f} s, {statistics.median(first):.1f} s in the median.",
    )
    return textwrap.fill(" ".join(said), width=130)


def trained(folder: Path) -> str:
    """Milliseconds of a step, memory, and the mean loss of the last ten steps."""
    rows = _read(folder / TRAINED)
    head = ["implementation", "step (ms)", "peak (GiB)", "first step (s)", "steps", "loss at the end"]
    return table(
        head,
        [
            [r["impl"], r["ms"], r["peak_gib"], r["first_step_s"], len(r["losses"]), f"{r['last_loss']:.3f}"]
            for r in rows
        ],
    )


def trained_in_short(folder: Path) -> str:
    """The same for the first lines of the README."""
    rows = {row["impl"]: row for row in _read(folder / TRAINED)}
    ours, theirs = rows["hexa"], rows["grouped_mm"]
    less = round(100 * (1 - ours["peak_gib"] / theirs["peak_gib"]))
    said = (
        f"**A small OLMoE trains {theirs['ms'] / ours['ms']:.1f} times as fast, in {less} % less memory, than with transformers' "
        "`grouped_mm`** (one H100, whole steps of 16,384 tokens, float32 weights under bf16 autocast, AdamW)."
    )
    return textwrap.fill(said, width=130)


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows
