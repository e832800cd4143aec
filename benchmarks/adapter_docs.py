"""What the page on fine-tuning says of recorded layers and models with adapters; `benchmarks.kernel_docs` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import table

_WAYS = {
    "full": "all weights trained, hexa_fx",
    "frozen": "weights frozen, gradients of the input and the routing weights, hexa_fx",
    "adapters": "adapters on frozen weights, PEFT and hexa_fx",
    "peft": "adapters on frozen weights, PEFT and transformers' `grouped_mm`",
}

_FEW = ("frozen", "adapters", "peft")


def adapters(folder: Path) -> str:
    """Forward and backward of a layer with adapters, beside the same without."""
    rows = [row for row in _adapted(folder) if row["question"] == "layer"]
    return table(["", "ms"], [[_WAYS[row["way"]], f"{row['ms']:.2f}"] for row in rows])


def adapted_steps(folder: Path) -> str:
    """A step of a model, by its layers, the implementation and where its adapters are."""
    head = ["layers", "experts by", "adapters on", "ms", "peak (MiB)"]
    rows = [row for row in _adapted(folder) if row["question"] == "model"]

    def measured(row: dict[str, Any]) -> tuple[str, str]:
        return (row["left_out"], "") if row["ms"] is None else (f"{row['ms']:.1f}", f"{row['peak_mib']:,.0f}")

    return table(head, [[row["layers"], row["impl"], row["adapters"], *measured(row)] for row in rows])


def adapted_few(folder: Path) -> str:
    """Results of few tokens, beside those of the weights alone."""
    head = ["tokens", "weights alone, hexa_fx (us)", "adapters, PEFT and hexa_fx (us)", "PEFT and `grouped_mm` (us)"]
    rows = [row for row in _adapted(folder) if row["question"] == "few"]
    return table(head, [[row["tokens"], *(f"{row[f'{way}_us']:,.1f}" for way in _FEW)] for row in rows])


def _adapted(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "adapters_h200.json").read_text())["rows"]
    return rows
