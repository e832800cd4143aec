"""Plots of the recorded results.   python -m benchmarks.results_plot   writes docs/images/results.svg and whole_models.svg.

Layers are drawn as a share of what transformers' ``grouped_mm`` takes, whole models as a share of the model's largest value, so
that all sizes fit one scale.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "images" / "results.svg"
WHOLE_MODELS = ROOT / "docs" / "images" / "whole_models.svg"

NAMES = {"mixtral": "Mixtral 8x7B", "qwen3-30b": "Qwen3-30B", "olmoe": "OLMoE", "dsv3": "DeepSeek-V3"}
NAMES |= {"granite-fine": "Granite, fine", "sonic-7b": "7B, fine", "sonic-30b": "30B, fine"}
MODELS = {"mixtral-8x7b": "Mixtral", "qwen3-30b": "Qwen3", "olmoe": "OLMoE", "gpt-oss-20b": "gpt-oss"}
MODELS |= {"deepseek-v2-lite": "DeepSeek"}
_IMPLEMENTATIONS = {"hexa": "hexa_fx", "sonicmoe": "SonicMoE"}
_LEFT, _WIDTH, _TEXT, _ROW, _TOP = 150, 120, 130, 27, 78

_STYLE = """
text{font:12px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#131820}
.title{font-size:14px;font-weight:650}.soft{fill:#586373}.end{text-anchor:end}.middle{text-anchor:middle}
.track{fill:#e6eaef}.bar{fill:#2563eb}.other{fill:#8d98a8}
.floor{stroke:#131820;stroke-width:2}.paper{fill:#fff}.axis{stroke:#8d98a8;stroke-dasharray:3 3}
@media(prefers-color-scheme:dark){text{fill:#e7ecf3}.soft{fill:#97a3b4}.track{fill:#232b36}.bar{fill:#5b96ff}.floor{stroke:#e7ecf3}
.other{fill:#697688}.paper{fill:#12161d}.axis{stroke:#697688}}
""".strip()


Row = dict[str, Any]


class Bar(NamedTuple):
    """A row of a panel: the share that is drawn, what is written beside it, the share of plain matrix products if known, and whose
    it is.
    """

    name: str
    share: float
    text: str
    floor: float | None = None
    ours: bool = True


class Panel(NamedTuple):
    """Bars under a title."""

    title: str
    about: str
    bars: Sequence[Bar]


def panels(folder: Path) -> list[Panel]:
    """A training step's time and memory, layer by layer; decoding, by model and number of tokens."""
    layers, decode = _rows(folder / "moe_layer_h200.json"), _rows(folder / "moe_layer_h200_decode.json")
    time, memory, tokens = [], [], []
    for shape, name in NAMES.items():
        dense, ours, theirs = (layers[shape, impl] for impl in ("dense", "hexa", "hf-grouped"))
        step = ours["train_ms"] / theirs["train_ms"]
        time.append(
            Bar(
                name,
                step,
                f"{ours['train_ms']:.1f} of {theirs['train_ms']:.1f} ms",
                dense["train_ms"] / theirs["train_ms"],
            )
        )
        memory.append(
            Bar(
                name,
                ours["saved_mib"] / theirs["saved_mib"],
                f"{ours['saved_mib']:.0f} of {theirs['saved_mib']:.0f} MiB",
            )
        )
    for shape in dict.fromkeys(shape for shape, _ in decode):
        ours, theirs, eager = (decode[shape, impl]["forward_ms"] for impl in ("hexa", "hf-grouped", "hf-eager"))
        model, count = shape.split("-t")
        label = f"{NAMES[model].split('-')[0].split()[0]}, T = {count}"
        tokens.append(Bar(label, ours / theirs, f"{ours:.2f} of {theirs:.2f} ms, eager {eager:.1f}"))
    return [
        Panel("Training step", "forward + backward; line: plain matmuls", time),
        Panel("Memory kept for backward", "saved activations", memory),
        Panel("Decoding", "forward of T tokens", tokens),
    ]


def whole_models(folder: Path) -> list[Panel]:
    """Tokens a second and peaks of training and decoding, by model and implementation."""
    found = json.loads((folder / "whole_models_h200.json").read_text())["rows"]
    rows = [row for row in found if "reason" not in row and "compile" not in row["impl"]]
    titles = [("Training", "train"), ("Decoding", "decode")]
    return [
        Panel(f"{title}: {what}", about, [_bar(row, rows, f"{key}_{unit}", written) for row in rows])
        for title, key in titles
        for what, about, unit, written in (
            ("tokens a second", "longer is better", "tokens_s", "{:,.0f}"),
            ("peak memory", "above the weights, shorter is better", "peak_mib", "{:,.0f} MiB"),
        )
    ]


def _bar(row: Row, rows: Sequence[Row], key: str, written: str) -> Bar:
    most = max(other[key] for other in rows if other["model"] == row["model"])
    name = f"{MODELS[row['model']]}, {_IMPLEMENTATIONS.get(row['impl'], row['impl'])}"
    return Bar(name, row[key] / most, written.format(row[key]), ours=row["impl"] == "hexa")


def svg(found: Sequence[Panel], title: str, note: str, across: int) -> str:
    """The panels, so many in a row, and a note below."""
    high = _TOP + max(len(panel.bars) for panel in found) * _ROW
    width, height = across * (_LEFT + _WIDTH + _TEXT) + 64, -(-len(found) // across) * high + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
    ]
    parts.append(f"<title>{title}</title><style>{_STYLE}</style>")
    parts.append(f'<rect class="paper" width="{width}" height="{height}" rx="10" fill="#fff"/>')
    for number, panel in enumerate(found):
        parts += _panel(panel, 12 + number % across * (_LEFT + _WIDTH + _TEXT), number // across * high)
    parts.append(f'<text class="soft" x="12" y="{height - 12}">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    start = left + _LEFT
    parts = [f'<text class="title" x="{left}" y="{top + 30}">{panel.title}</text>']
    parts.append(f'<text class="soft" x="{left}" y="{top + 49}">{panel.about}</text>')
    for number, bar in enumerate(panel.bars):
        y, kind = top + _TOP + number * _ROW, "bar" if bar.ours else "other"
        parts.append(f'<text class="end" x="{start - 8}" y="{y + 4}">{bar.name}</text>')
        parts.append(f'<rect class="track" x="{start}" y="{y - 8}" width="{_WIDTH}" height="16" rx="3"/>')
        parts.append(
            f'<rect class="{kind}" x="{start}" y="{y - 8}" width="{_WIDTH * min(1.0, bar.share):.1f}" height="16" rx="3"/>'
        )
        if bar.floor is not None:
            x = start + _WIDTH * bar.floor
            parts.append(f'<path class="floor" d="M{x:.1f},{y - 10}v20"/>')
        parts.append(f'<text class="soft" x="{start + _WIDTH + 8}" y="{y + 4}">{bar.text}</text>')
    return parts


def _rows(path: Path) -> dict[tuple[str, str], Row]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["shape"], row["impl"]): row for row in rows if row["routing"] == "balanced"}


def drawn(folder: Path) -> dict[Path, str]:
    """Every plot, by where it belongs."""
    layers = "one MoE layer in bf16 on one NVIDIA H200; a full track is transformers' grouped_mm: shorter is better"
    models = "six layers of published widths in bf16 on one NVIDIA H200; a full track is the largest value of the model"
    return {
        TARGET: svg(panels(folder), "hexa_fx as a share of transformers' grouped_mm", layers, 2),
        WHOLE_MODELS: svg(whole_models(folder), "whole models with hexa_fx and other implementations", models, 2),
    }


if __name__ == "__main__":
    for place, text in drawn(RESULTS).items():
        place.write_text(text, encoding="utf-8")
