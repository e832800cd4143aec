"""Bars of a benchmark's JSON, shape by shape.   python benchmarks/plot.py FILE.json OUT.svg [--value train_ratio]

OUT.png or OUT.svg. With matplotlib it draws either; without, an SVG of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

COLOURS = ("#9e9e9e", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")
Bars = Mapping[str, Mapping[str, float]]


def bars(path: Path, value: str) -> dict[str, dict[str, float]]:
    """Shape -> implementation -> value. A routing other than balanced is part of the shape's name."""
    found: dict[str, dict[str, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        kind = row.get("routing", "balanced")
        name = row["shape"] if kind == "balanced" else f"{row['shape']} {kind}"
        if value in row:
            found.setdefault(name, {})[row["impl"]] = float(row[value])
    if not found:
        raise SystemExit(f"no row of {path} has {value!r}")
    return found


def implementations(data: Bars) -> list[str]:
    """In the order in which they appear."""
    return list(dict.fromkeys(impl for row in data.values() for impl in row))


def svg(data: Bars, title: str) -> str:
    """A grouped bar chart as text."""
    impls, width, height, left, top = implementations(data), 18, 220, 50, 40
    group = width * len(impls) + 24
    largest = max(v for row in data.values() for v in row.values())
    total = left + group * len(data) + 130
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height + top + 60}" font-family="sans-serif">'
    ]
    parts.append(f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>')
    for g, (shape, row) in enumerate(data.items()):
        x0 = left + g * group
        parts.append(f'<text x="{x0}" y="{top + height + 16}" font-size="10">{escape(shape)}</text>')
        for i, impl in enumerate(impls):
            if impl not in row:
                continue
            tall, x = height * row[impl] / largest, x0 + i * width
            y, colour = top + height - tall, COLOURS[i % len(COLOURS)]
            parts.append(f'<rect x="{x}" y="{y:.1f}" width="{width - 3}" height="{tall:.1f}" fill="{colour}"/>')
            parts.append(f'<text x="{x - 2}" y="{y - 3:.1f}" font-size="8">{row[impl]:.2f}</text>')
    for i, impl in enumerate(impls):
        x, y = total - 120, top + 16 * i
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}" font-size="10">{escape(impl)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def draw(data: Bars, title: str, out: Path) -> None:
    """The same with matplotlib. Raises ImportError without it."""
    import matplotlib.pyplot as plt

    impls = implementations(data)
    figure, axes = plt.subplots(figsize=(1.6 * len(data) + 2, 4))
    for i, impl in enumerate(impls):
        places = [g + i / (len(impls) + 1) for g, row in enumerate(data.values()) if impl in row]
        axes.bar(places, [row[impl] for row in data.values() if impl in row], 1 / (len(impls) + 1), label=impl)
    axes.set_xticks([g + 0.3 for g in range(len(data))], list(data), fontsize=8)
    axes.set_title(title)
    axes.legend()
    figure.savefig(out, bbox_inches="tight", dpi=150)


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--value", default="train_ratio", help="train_ratio, forward_ratio, train_ms, forward_ms, peak_mib, ..."
    )
    options = parser.parse_args()
    data, title = bars(options.results, options.value), f"{options.value}, {options.results.stem}"
    if options.out.suffix == ".svg":
        options.out.write_text(svg(data, title))
        return
    try:
        draw(data, title, options.out)
    except ImportError:
        raise SystemExit(f"{options.out.suffix} needs matplotlib; name a .svg file instead") from None


if __name__ == "__main__":
    main()
