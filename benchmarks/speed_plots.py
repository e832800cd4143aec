"""Plots of docs/how_fast.md: a layer's time over its tokens, and the roofline.   python -m benchmarks.speed_plots   writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import SHAPES, MoeShape
from benchmarks.results_plot import NAMES, RESULTS, ROOT

TOKENS = "tokens_h200.json"
LAYERS, DECODE = "moe_layer_h200.json", "moe_layer_h200_decode.json"
IMAGES = ROOT / "docs" / "images"
NOMINAL_BYTES, NOMINAL_FLOPS = 4.8e12, 989e12
"""Of an H200, bytes and FLOPs in bf16 a second, as its data sheet has them."""
WAYS = {"hexa": "hexa_fx", "sglang": "SGLang", "vllm": "vLLM", "grouped": "transformers' grouped_mm"}
WITH_KERNELS = {
    "hexa": "hexa_fx",
    "sglang": "SGLang",
    "sglang_kernels": "its kernels alone",
    "vllm": "vLLM",
    "vllm_kernels": "its kernels alone",
}
"""The same with peers' kernels without what assigns rows to blocks."""
_LEFT, _WIDE, _HIGH, _TOP = 60, 440, 270, 58

_STYLE = """
text{font:12px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#131820}
.title{font-size:14px;font-weight:650}.soft{fill:#586373}.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#fff}.grid{stroke:#e6eaef}.line{fill:none;stroke-width:2}.limit{stroke:#131820;stroke-dasharray:4 3}
.a{stroke:#2563eb}.b{stroke:#d97706}.c{stroke:#059669}.d{stroke:#8d98a8}
.fa{fill:#2563eb}.fb{fill:#d97706}.fc{fill:#059669}.fd{fill:#8d98a8}
@media(prefers-color-scheme:dark){text{fill:#e7ecf3}.soft{fill:#97a3b4}.paper{fill:#12161d}.grid{stroke:#232b36}.limit{stroke:#e7ecf3}}
""".strip()


class Line(NamedTuple):
    """Points of one colour (a letter of the style), joined if they belong together; ``limit`` is dashed and has no marks."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    joined: bool = True


class Chart(NamedTuple):
    """Lines over axes that are both logarithmic; ticks are where a number is written."""

    title: str
    about: str
    lines: Sequence[Line]
    x_ticks: Mapping[float, str]
    y_ticks: Mapping[float, str]


def over_tokens(folder: Path) -> list[Chart]:
    """Microseconds of a layer's forward by number of tokens, a chart for each shape."""
    rows: list[dict[str, Any]] = json.loads((folder / TOKENS).read_text())["rows"]
    charts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        lines = [Line("limit", "limit", [(row["tokens"], row["limit_us"]) for row in own])]
        for colour, (way, name) in zip("abcd", WAYS.items(), strict=True):
            points = [(row["tokens"], row[f"{way}_us"]) for row in own if f"{way}_us" in row]
            if points:
                lines.insert(0, Line(name, colour, points))
        ticks = {t: f"{t:,}" for t in (1, 8, 64, 512, 4096, 32768) if t <= own[-1]["tokens"]}
        charts.append(Chart(NAMES[shape], "a layer's forward, by tokens", lines, ticks, _TIMES))
    return charts


_TIMES = {10: "10 us", 100: "100 us", 1000: "1 ms", 10000: "10 ms", 100000: "100 ms"}


def roofline(folder: Path) -> list[Chart]:
    """TFLOP/s of a layer's forward over the FLOPs that each byte it has to move is good for."""
    lines = []
    for colour, (impl, name) in zip("ad", {"hexa": "hexa_fx", "hf-grouped": "transformers' grouped_mm"}.items()):
        points = []
        for record in (LAYERS, DECODE):
            rows = json.loads((folder / record).read_text())["rows"]
            found = [row for row in rows if row["impl"] == impl and row["routing"] == "balanced"]
            points += [(intensity(SHAPES[row["shape"]]), row["forward_tflops"]) for row in found]
        lines.append(Line(name, colour, sorted(points), joined=False))
    knee = NOMINAL_FLOPS / NOMINAL_BYTES
    peak = NOMINAL_FLOPS / 1e12
    lines.append(Line("limit of the data sheet", "limit", [(0.5, 0.5 * peak / knee), (knee, peak), (4000, peak)]))
    ticks = {x: str(x) for x in (1, 10, 100, 1000)}
    about = "forward of seven layers at training size, of two with 1, 8 and 64 tokens"
    return [Chart("TFLOP/s over FLOPs a byte", about, lines, ticks, {y: str(y) for y in (1, 10, 100, 1000)})]


def intensity(s: MoeShape) -> float:
    """FLOPs of the forward over its fewest bytes: weights of the experts that random ids reach, tokens in and out."""
    reached = s.experts * (1 - (1 - s.top_k / s.experts) ** s.tokens)
    return s.forward_flops / (2 * (reached * s.model * (s.width + s.inner) + 2 * s.tokens * s.model))


def svg(charts: Sequence[Chart], title: str, note: str) -> str:
    """Charts side by side, and a note below."""
    width, height = len(charts) * (_LEFT + _WIDE + 24), _TOP + _HIGH + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="10" fill="#fff"/>',
    ]
    for number, chart in enumerate(charts):
        parts += _chart(chart, number * (_LEFT + _WIDE + 24) + _LEFT)
    parts.append(f'<text class="soft" x="12" y="{height - 10}">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _chart(chart: Chart, left: int) -> list[str]:
    xs, ys = ([p[axis] for line in chart.lines for p in line.points] for axis in (0, 1))
    x_of, y_of = _scale(xs, left, left + _WIDE), _scale(ys, _TOP + _HIGH, _TOP)
    parts = [f'<text class="title" x="{left}" y="24">{chart.title}</text>']
    parts.append(f'<text class="soft" x="{left}" y="42">{chart.about}</text>')
    for value, text in chart.x_ticks.items():
        if min(xs) <= value <= max(xs):
            x = x_of(value)
            parts.append(f'<path class="grid" d="M{x:.1f},{_TOP}v{_HIGH}"/>')
            parts.append(f'<text class="soft middle" x="{x:.1f}" y="{_TOP + _HIGH + 16}">{text}</text>')
    for value, text in chart.y_ticks.items():
        if min(ys) <= value <= max(ys):
            y = y_of(value)
            parts.append(f'<path class="grid" d="M{left},{y:.1f}h{_WIDE}"/>')
            parts.append(f'<text class="soft end" x="{left - 6}" y="{y + 4:.1f}">{text}</text>')
    for number, line in enumerate(chart.lines):
        parts += _line(line, [(x_of(x), y_of(y)) for x, y in line.points], left + 12, _TOP + 16 + 17 * number)
    return parts


def _line(line: Line, points: Sequence[tuple[float, float]], left: int, top: int) -> list[str]:
    """The line, and its name in the chart's corner."""
    limit, path = line.colour == "limit", "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<path class="line {line.colour}" d="M{path}"/>'] if line.joined or limit else []
    mark = f'<path class="line {line.colour}" d="M{left},{top - 4}h16"/>'
    if not limit:
        parts += [f'<circle class="f{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
        mark = f'<circle class="f{line.colour}" cx="{left + 8}" cy="{top - 4}" r="3.5"/>'
    return [*parts, mark, f'<text x="{left + 22}" y="{top}">{line.name}</text>']


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = log10(min(values)), log10(max(values))
    return lambda value: start + (end - start) * (log10(value) - low) / (high - low)


def drawn(folder: Path) -> dict[Path, str]:
    """Every plot, by where it belongs."""
    note = "bf16, one NVIDIA H200; its limit by data sheet: 4.8 TB/s, 989 TFLOP/s"
    return {
        IMAGES / "roofline.svg": svg(roofline(folder), "roofline of MoE layers", note),
        IMAGES / "tokens.svg": svg(over_tokens(folder), "time of MoE layers over tokens", note),
    }


if __name__ == "__main__":
    for place, text in drawn(RESULTS).items():
        place.write_text(text, encoding="utf-8")
