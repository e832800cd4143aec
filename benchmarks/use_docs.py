"""What pages say of loaded models in the set-ups that people use, and of a small model that is trained."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.pages import table

USE = "use_h200.json"
ONE_LAYER = "use_h100.json"
IN_FP8 = "use_fp8_h200.json"
TRAINED = "train_small_moe_float32_h200.json"
TRAINED_BF16 = "train_small_moe_h200.json"
WIDE = "train_wide_moe_h200.json"
WIDE_BATCHES = "train_wide_moe_batches_h200.json"
GRAPHED = "graphed_h200.json"
CHECKPOINT = "fp8_checkpoint_h200.json"
FEW_IN_FP8 = "fp8_few_tokens_h200.json"
DECODES = ("8 tokens", "packed, 8 tokens")


def use(folder: Path, name: str = USE, impls: tuple[str, str] = ("hexa", "grouped_mm")) -> str:
    """By cell and model: milliseconds of the first of ``impls``, how many times those of the other, bold where the first is slower.

    Where neither can run, what it would need.
    """
    rows = {(row["cell"], row["model"], row.get("impl", "hexa")): row for row in _read(folder / name)}
    cells, models = (list(dict.fromkeys(key[part] for key in rows)) for part in (0, 1))
    of_both = [[tuple(rows.get((cell, model, impl)) for impl in impls) for model in models] for cell in cells]
    return table(["set-up", *models], [[cell, *map(_faster, both)] for cell, both in zip(cells, of_both)])


def _faster(both: tuple[Any, ...]) -> str:
    ours, theirs = both
    if ours is None or theirs is None:
        return ours["reason"] if ours and "reason" in ours else "not run"
    times = theirs["ms"] / ours["ms"]
    said = f"{ours['ms']:.1f} ms, {times:.2f}×"
    return f"**{said}**" if times < 1 else said


def use_in_short(folder: Path) -> str:
    """What the table of `use` comes to."""
    rows = _read(folder / USE)
    times = _times(rows)
    trained = {key: each for key, each in times.items() if key[1] not in (*DECODES, "prefill")}
    few = {key: each for key, each in times.items() if key[1] in DECODES}
    slower = [f"{model}{' packed' * ('packed' in cell)}" for (model, cell), each in few.items() if each < 1]
    if any(each < 1 for key, each in times.items() if key not in few):
        raise ValueError("a set-up of many tokens is slower: say which")
    ours = [row for row in rows if row.get("impl") == "hexa"]
    ran, own = (sum(row[how] for row in ours) for how in ("rewritten", "own"))
    if own:
        raise ValueError("some timed calls ran the model's own code: say which")
    first = sorted(row["first_s"] for row in ours if row["cell"] != "compiled")
    (low, least), (high, most) = (_said(pick(trained.items(), key=lambda item: item[1])) for pick in (min, max))
    said = (
        f"None of the {ran:,} timed calls fell back to the model's own code.",
        f"A training step is {low:.2f} ({least}) to {high:.1f} times as fast ({most}), "
        f"{statistics.median(trained.values()):.2f} times in the median.",
        f"In calls of 8 tokens, where most of the time goes into launching, it is {min(few.values()):.2f} to "
        f"{max(few.values()):.2f} times; slower: {', '.join(slower) or 'none'}.",
        f"First calls took {first[0]:.1f} to {first[-1]:.1f} s, {statistics.median(first):.1f} s in the median: they analyse the "
        "block, and kernels that are not built yet are compiled meanwhile.",
    )
    return textwrap.fill(" ".join(said), width=130)


def _said(item: tuple[tuple[str, str], float]) -> tuple[float, str]:
    (model, cell), times = item
    return times, f"{model}, {cell}"


def _times(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """How many times as long ``grouped_mm`` takes, by model and cell."""
    ours, theirs = (
        {(r["model"], r["cell"]): r["ms"] for r in rows if r.get("impl") == impl} for impl in ("hexa", "grouped_mm")
    )
    return {key: theirs[key] / ms for key, ms in ours.items() if key in theirs}


def trained(folder: Path, name: str = TRAINED) -> str:
    """By weights and implementation: milliseconds of a step, tokens a second, memory, and the mean loss of the last ten steps."""
    rows = _read(folder / name)
    seeds = len({r.get("seed", 0) for r in rows}) > 1
    head = [
        *(["seed"] if seeds else []),
        "weights",
        "implementation",
        "step (ms)",
        "tokens/s",
        "peak (GiB)",
        "first step (s)",
        "steps",
        "loss at the end",
    ]
    lines = []
    for r in rows:
        said = [
            r["ms"],
            f"{r['tokens_s']:,}",
            r["peak_gib"],
            r["first_step_s"],
            len(r["losses"]),
            f"{r['last_loss']:.3f}",
        ]
        lines.append([*([r["seed"]] if seeds else []), r["weights"], r["impl"], *said])
    return table(head, lines)


def trained_in_short(folder: Path) -> str:
    """The same for the first lines of the README, and the models of `use` in bf16."""
    rows = {row["impl"]: row for row in reversed(_read(folder / TRAINED))}
    ours, theirs = rows["hexa"], rows["grouped_mm"]
    less = round(100 * (1 - ours["peak_gib"] / theirs["peak_gib"]))
    bf16 = [each for (_, cell), each in _times(_read(folder / USE)).items() if cell == "bf16"]
    said = (
        f"**With bf16 weights, a training step is {min(bf16):.2f} to {max(bf16):.2f} times as fast as with transformers' "
        f"`grouped_mm`** (one H200; four layers of five published models and one of two more, with attention and loss). **With "
        f"float32 weights under bf16 autocast, an OLMoE of eight layers trains {theirs['ms'] / ours['ms']:.1f} times as fast and "
        f"its peak memory is {less} % smaller**, since `grouped_mm` multiplies experts in float32 there."
    )
    return textwrap.fill(said, width=130)


def checkpoint(folder: Path) -> str:
    """48 layers loaded in FP8 blocks: seconds and memory of `optimize_`, distance of logits, tokens a second."""
    rows: dict[str, dict[str, Any]] = {}
    for row in _read(folder / CHECKPOINT):
        rows.setdefault(row["way"], {}).update(row)
    head = ["", "optimize (s)", "held more (GiB)", "logits apart", "prefill (tokens/s)", "decoding (tokens/s)"]
    return table(
        head,
        [
            [
                way,
                row.get("optimize_s", ""),
                row.get("more_gib", ""),
                f"{row['apart']:.2%}" if "apart" in row else "",
                f"{row['prefill_tokens_s']:,.0f}",
                f"{row['decode_tokens_s']:.0f}",
            ]
            for way, row in rows.items()
            if "prefill_tokens_s" in row
        ],
    )


def few_in_fp8(folder: Path) -> str:
    """Few tokens without gradients: microseconds of a GPU, by how experts are stored and what they multiply in."""
    rows = _read(folder / FEW_IN_FP8)
    ways = list(dict.fromkeys((row["stored"], row["compute"]) for row in rows))
    times = {(row["stored"], row["compute"], row["tokens"]): row["device_us"] for row in rows}
    head = ["tokens", *(f"{stored}, {compute}" for stored, compute in ways)]
    tokens = dict.fromkeys(row["tokens"] for row in rows)
    return table(head, [[str(count), *(times[*way, count] for way in ways)] for count in tokens])


def graphed(folder: Path) -> str:
    """Steps launched and replayed, by model and by where the optimizer is: milliseconds of the host and of the whole."""
    rows = {(row["model"], row["optimizer"], row["way"]): row for row in _read(folder / GRAPHED)}
    lines = []
    for (model, place, way), row in rows.items():
        if way == "launched" or place == "fails":
            continue
        before = rows[model, place, "launched"]
        times = [f"{before[part]:.1f} → {row[part]:.1f}" for part in ("host_ms", "step_ms")]
        lines.append([model, place, *times])
    return table(["model", "optimizer", "host (ms)", "step (ms)"], lines)


def on_a_cpu(folder: Path) -> str:
    """OLMoE's experts on one thread: milliseconds of hexa_fx, how many times those ``grouped_mm`` takes."""
    rows = _read(folder / "optimize_cpu_grouped_mm.json")
    head = ["experts, k, D, I, tokens", "dtype", "forward", "step"]
    return table(
        head,
        [
            [
                ", ".join(str(row[size]) for size in ("experts", "top_k", "dim", "hidden", "tokens")),
                row["dtype"].removeprefix("torch."),
                *(
                    f"{row[f'{part}_rewritten_ms']:.1f} ms, {row[f'{part}_speedup']:.2f}×"
                    for part in ("forward", "step")
                ),
            ]
            for row in rows
        ],
    )


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows
