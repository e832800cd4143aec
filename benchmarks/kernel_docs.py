"""What pages say of recorded layers and models.   python -m benchmarks.kernel_docs   writes it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.adapter_docs import adapted_few, adapted_steps, adapters
from benchmarks.pages import fill, table
from benchmarks.speed_plots import TOKENS, WAYS, WITH_KERNELS
from benchmarks.use_docs import (
    IN_FP8,
    ONE_LAYER,
    TRAINED_BF16,
    WIDE,
    WIDE_BATCHES,
    checkpoint,
    few_in_fp8,
    graphed,
    on_a_cpu,
    trained,
    trained_in_short,
    use,
    use_in_short,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = "moe_layer_h200.json"
BREAKDOWN = "sm90_breakdown_h200.json"
DECODE = "moe_layer_h200_decode.json"
OTHER_CARD = "moe_layer_h100.json"
Rows = dict[str, dict[str, Any]]


class Goal(NamedTuple):
    """Highest ratio to dense that is asked for, and what SonicMoE keeps and needs on the same card (MiB; our runs of it)."""

    forward: float
    train: float
    sonic_saved: int
    sonic_peak: int


GOALS = {
    "mixtral": Goal(1.20, 1.25, 960, 1088),
    "qwen3-30b": Goal(1.30, 1.35, 450, 962),
    "olmoe": Goal(1.20, 1.25, 578, 1090),
    "dsv3": Goal(1.40, 1.55, 625, 1521),
    "granite-fine": Goal(1.20, 1.25, 611, 1379),
    "sonic-7b": Goal(1.35, 1.35, 266, 842),
    "sonic-30b": Goal(1.20, 1.25, 771, 2819),
}
SKEWED_GOAL = 0.05
GROUPED_GOAL = {"qwen3-30b": 2.4}


def headline(folder: Path) -> str:
    """What a newcomer wants to know: time against plain matmuls, time and memory against transformers."""
    rows = _by_case(folder / LAYERS)
    dense, hexa, grouped = (
        [rows[f"{shape} balanced {impl}"] for shape in GOALS] for impl in ("dense", "hexa", "hf-grouped")
    )
    over_dense = _range(ours["train_ms"] / floor["train_ms"] for ours, floor in zip(hexa, dense))
    speed = _range(theirs["train_ms"] / ours["train_ms"] for theirs, ours in zip(grouped, hexa))
    less = sorted(100 * (1 - ours["saved_mib"] / theirs["saved_mib"]) for theirs, ours in zip(grouped, hexa))
    return textwrap.fill(
        f"On one H200, a training step of an MoE layer is {speed} times as fast as with transformers' `grouped_mm`, and keeps "
        f"{less[0]:.0f} to {less[-1]:.0f} % less memory for backward. It takes {over_dense} times as long as dense "
        f"matrix products (cuBLAS) of the same FLOPs ([seven layers](docs/how_fast.md)).",
        width=130,
    )


def _range(ratios: Iterable[float]) -> str:
    low, *_, high = sorted(ratios)
    return f"{low:.1f} to {high:.1f}"


def summary(folder: Path) -> str:
    """One layer, balanced routing: milliseconds and ratios to plain matmuls of the same FLOPs."""
    rows = _by_case(folder / LAYERS)
    head = ["shape", "forward: dense / hexa_fx / transformers grouped_mm (ms)", "forward + backward (ms)", "over dense"]
    head += ["saved (MiB)", "peak (MiB)"]
    lines = []
    for shape in GOALS:
        dense, hexa, grouped = (rows[f"{shape} balanced {impl}"] for impl in ("dense", "hexa", "hf-grouped"))
        times = [" / ".join(f"{r[part]:.2f}" for r in (dense, hexa, grouped)) for part in ("forward_ms", "train_ms")]
        memory = [f"{hexa[key]:.0f} against {grouped[key]:.0f}" for key in ("saved_mib", "peak_mib")]
        lines.append([shape, *times, f"{hexa['forward_ratio']:.2f}, {hexa['train_ratio']:.2f}", *memory])
    return table(head, lines)


def other_card(folder: Path) -> str:
    """The same layers on an H100, and their ratios to plain matmuls over those on an H200."""
    there, here = _by_case(folder / OTHER_CARD), _by_case(folder / LAYERS)
    head = ["shape", "forward: dense / hexa_fx (ms)", "forward + backward (ms)", "over dense", "that over an H200's"]
    lines = []
    for shape in GOALS:
        dense, hexa = (there[f"{shape} balanced {impl}"] for impl in ("dense", "hexa"))
        times = [f"{dense[part]:.2f} / {hexa[part]:.2f}" for part in ("forward_ms", "train_ms")]
        ratios = [(hexa[part], here[f"{shape} balanced hexa"][part]) for part in ("forward_ratio", "train_ratio")]
        over, cards = (", ".join(f"{n:.2f}" for n in each) for each in zip(*((one, one / two) for one, two in ratios)))
        lines.append([shape, *times, over, cards])
    return table(head, lines)


def decode(folder: Path) -> str:
    """A few tokens: forward milliseconds."""
    rows = _by_case(folder / DECODE)
    others = {"hf-grouped": "grouped_mm", "hf-batched": "batched_mm", "hf-eager": "eager"}
    lines = []
    for shape in dict.fromkeys(case.split()[0] for case in rows):
        name, tokens = shape.split("-t")
        theirs = ", ".join(f"{rows[f'{shape} balanced {impl}']['forward_ms']:.2f}" for impl in others)
        lines.append([f"{name}, T = {tokens}", f"{rows[f'{shape} balanced hexa']['forward_ms']:.2f}", theirs])
    return table(["tokens", "hexa_fx (ms)", f"transformers {', '.join(others.values())} (ms)"], lines)


def tokens(folder: Path, name: str = TOKENS, ways: dict[str, str] = WAYS) -> str:
    """A layer's forward as a CUDA graph by number of tokens, beside peers and the limit: microseconds."""
    lines = []
    for row in json.loads((folder / name).read_text())["rows"]:
        if row["tokens"] in _SHOWN:
            times = [f"{row[f'{way}_us']:,.1f}" if f"{way}_us" in row else "" for way in ways]
            part = f"{row['limit_us'] / row['hexa_us']:.0%}"
            lines.append([row["shape"], f"{row['tokens']:,}", *times, f"{row['limit_us']:,.1f}, {part}"])
    return table(["shape", "tokens", *ways.values(), "limit, its part of hexa_fx's"], lines)


_SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384, 65536)


def layers(folder: Path) -> str:
    """A layer's times over plain matmuls'."""
    rows = _by_case(folder / LAYERS)
    head = ["shape", "forward ms, ratio", "goal", "forward + backward ms, ratio", "goal", "skewed ratio: fwd, f+b"]
    head += ["skewed against balanced, ms: fwd, f+b", "saved, peak MiB", "SonicMoE's", "grouped_mm f+b over ours"]
    return table(head, [_layer(shape, goal, rows) for shape, goal in GOALS.items()])


def _layer(shape: str, goal: Goal, rows: Rows) -> list[object]:
    ours, skewed = (rows[f"{shape} {kind} hexa"] for kind in ("balanced", "skewed"))
    cells: list[object] = [shape]
    for part, most in (("forward", goal.forward), ("train", goal.train)):
        cells += [f"{ours[f'{part}_ms']:.2f}, {_marked(ours[f'{part}_ratio'], most)}", f"{most:.2f}"]
    cells.append(f"{skewed['forward_ratio']:.2f}, {skewed['train_ratio']:.2f}")
    cells.append(", ".join(_slower(ours, skewed, part) for part in ("forward", "train")))
    cells.append(f"{ours['saved_mib']:.0f}, {ours['peak_mib']:.0f}")
    cells.append(f"{goal.sonic_saved}, {goal.sonic_peak}")
    factor = rows[f"{shape} balanced hf-grouped"]["train_ms"] / ours["train_ms"]
    least = GROUPED_GOAL.get(shape, 0.0)
    cells.append(_bold(f"{factor:.2f}", factor < least) + (f" (goal {least})" if least else ""))
    return cells


def _slower(balanced: dict[str, Any], skewed: dict[str, Any], part: str) -> str:
    more = skewed[f"{part}_ms"] / balanced[f"{part}_ms"] - 1
    return _bold(f"{100 * more:+.1f} %", more > SKEWED_GOAL)


def _marked(ratio: float, most: float) -> str:
    """A ratio is met if it is as it is printed."""
    return _bold(f"{ratio:.2f}", round(ratio, 2) > most)


def _bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


LAUNCHES = {
    "up": ("up",),
    "down": ("down",),
    "dA + gradient": ("dA",),
    "dW2": ("dW2",),
    "dX + dW1": ("dX + dW1",),
    "combine, twice": ("combine", "combine dX"),
    "reindex": ("reindex",),
}


def launches(folder: Path) -> str:
    """Each launch alone: time over dense, and the excess in percent of dense forward + backward."""
    rows: dict[str, Rows] = {}
    for row in json.loads((folder / BREAKDOWN).read_text())["rows"]:
        rows.setdefault(row["shape"], {})[row["launch"]] = row
    lines = []
    for shape in GOALS:
        found = [[rows[shape][name] for name in names] for names in LAUNCHES.values()]
        lines.append([shape, *map(_launch, found), f"{100 * sum(r['excess'] for part in found for r in part):.1f}"])
        lines[-1].append(f"{rows[shape]['(in a row)']['ms'] / rows[shape]['dense in a row']['ms']:.2f}")
    return table(["", *LAUNCHES, "sum", "in a row"], lines)


def _launch(rows: Sequence[dict[str, Any]]) -> str:
    excess = f"{100 * sum(row['excess'] for row in rows):.1f}"
    return f"{rows[0]['ms'] / rows[0]['dense_ms']:.2f}, {excess}" if rows[0]["dense_ms"] else excess


def _by_case(path: Path) -> Rows:
    rows = json.loads(path.read_text())["rows"]
    return {f"{row['shape']} {row['routing']} {row['impl']}": row for row in rows}


def packed(folder: Path) -> str:
    """Decoding with packed experts, beside bf16 and what bytes allow, on two cards."""
    head = ["layer", "format", "tokens", "card", "packed (us)", "bf16 (us)", "limit (us)"]
    lines = []
    for card in ("h200", "h100"):
        for row in json.loads((folder / f"packed_decode_{card}.json").read_text())["rows"]:
            times = [f"{row[key]:.1f}" for key in ("packed_us", "bf16_us", "limit_us")]
            lines.append([row["shape"], row["format"], row["tokens"], card.upper(), *times])
    return table(head, lines)


def packed_products(folder: Path) -> str:
    """Products of packed layers, ours with an activation after the first, beside Humming's."""
    head = ["layer", "format", "tokens", "up (us)", "Humming's", "down (us)", "Humming's"]
    lines = []
    for row in json.loads((folder / "packed_decode_h200.json").read_text())["rows"]:
        if "humming_up_us" in row:
            times = [f"{row[f'{by}{name}_us']:.1f}" for name in ("up", "down") for by in ("", "humming_")]
            lines.append([row["shape"], row["format"], row["tokens"], *times])
    return table(head, lines)


def models(folder: Path) -> str:
    """Training and decoding of whole models, by implementation."""
    keys = ("train_tokens_s", "train_peak_mib", "decode_tokens_s", "decode_peak_mib")
    head = ["model", "implementation", "training (tokens/s)", "its peak (MiB)", "decoding (tokens/s)", "its peak (MiB)"]
    rows = json.loads((folder / "whole_models_h200.json").read_text())["rows"]
    return table(
        head,
        [[row["model"], row["impl"], *(f"{row[key]:,.0f}" for key in keys)] for row in rows if "reason" not in row],
    )


def fp8_layers(folder: Path) -> str:
    """Layers that multiply in FP8 beside bf16; weights quantised once, and in every call."""
    head = ["shape", "forward: bf16, FP8 (ms)", "times as fast", "forward + backward (ms)", "times as fast"]
    head += ["times as fast with weights quantised in every call: forward, forward + backward"]
    by_shape: dict[str, dict[str, dict[str, float]]] = {}
    for row in json.loads((folder / "fp8_layers_h200.json").read_text())["rows"]:
        by_shape.setdefault(row["shape"], {})[row["impl"]] = row
    lines: list[list[object]] = []
    for shape, rows in by_shape.items():
        exact, fast, anew = rows["hexa"], rows["hexa-fp8"], rows["hexa-fp8-step"]
        cells: list[object] = [shape]
        for key in ("forward_ms", "train_ms"):
            cells += [f"{exact[key]:.2f}, {fast[key]:.2f}", f"{exact[key] / fast[key]:.2f}"]
        again = (exact[key] / anew[key] for key in ("forward_ms", "train_ms"))
        lines.append([*cells, ", ".join(f"{ratio:.2f}" for ratio in again)])
    return table(head, lines)


def fp8_products(folder: Path) -> str:
    """Single products in FP8 beside DeepGEMM's of operands of the same sizes."""
    rows = json.loads((folder / "fp8_products_h200.json").read_text())["rows"]
    ms = {(row["shape"], row["kernel"]): row["ms"] for row in rows}
    head = ["shape", "product", "ours (ms)", "DeepGEMM's (ms)", "times as fast"]
    lines = []
    for shape, kernel in ms:
        ours, peer = ms[shape, kernel], ms.get((shape, f"deepgemm {kernel}"))
        if peer is not None:
            lines.append([shape, kernel, f"{ours:.3f}", f"{peer:.3f}", f"{peer / ours:.2f}"])
    return table(head, lines)


PAGES: dict[Path, dict[str, Callable[[Path], str]]] = {
    ROOT / "README.md": {"headline": headline, "trained in short": trained_in_short, "use in short": use_in_short},
    ROOT / "docs" / "how_fast.md": {
        "use": use,
        "use in short": use_in_short,
        "use of one layer": partial(use, name=ONE_LAYER),
        "trained": trained,
        "trained in bf16": partial(trained, name=TRAINED_BF16),
        "on a cpu": on_a_cpu,
        "models": models,
        "layers": summary,
        "other card": other_card,
        "tokens": tokens,
        "tokens h100": partial(tokens, name="tokens_h100.json", ways=WITH_KERNELS),
        "decode": decode,
        "packed": packed,
        "packed_products": packed_products,
    },
    ROOT / "docs" / "kernels.md": {"layers": layers, "launches": launches},
    ROOT / "docs" / "fp8.md": {
        "layers": fp8_layers,
        "products": fp8_products,
        "wide": partial(trained, name=WIDE),
        "wide in batches": partial(trained, name=WIDE_BATCHES),
        "checkpoint": checkpoint,
        "few tokens in FP8": few_in_fp8,
        "use in FP8": partial(use, name=IN_FP8, impls=("hexa-fp8", "hexa")),
    },
    ROOT / "docs" / "training.md": {"graphed": graphed},
    ROOT / "docs" / "fine_tuning.md": {
        "adapters": adapters,
        "adapted steps": adapted_steps,
        "adapted few": adapted_few,
    },
}

if __name__ == "__main__":
    for page, sections in PAGES.items():
        page.write_text(fill(page.read_text(), sections, RESULTS))
        print(f"wrote {page}")
