"""The sentences of docs/swin_moe.md that follow from recorded numbers: what was asked, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.swin_moe import paper
from benchmarks.swin_moe.contestants import OURS, RECOMPUTED, TITLES
from benchmarks.swin_moe.results import Record, changes, fastest, load, measured, peaks, saving, table

NOISE = {"memory": 1.0, "latency": 3.0}
"""Per cent: smaller changes of an ablation say nothing."""
PADDING = ("padded", "padded-cf1")
EXPERIMENTS = ("memory", "latency", "saturated", "crossover", "heterogeneity", "ablation_memory", "ablation_latency")


def claims(folder: Path) -> str:
    """What the paper promises, and whether it holds here."""
    return table(["claim", "here"], [[claim, say(folder)] for claim, say in CLAIMS.items()])


def memory(folder: Path) -> str:
    """How far below each baseline, over k >= 2 and both scales."""
    parts, low, high = [], 100.0, -100.0
    for scale in ("base", "small"):
        peak = peaks(load(folder, "memory"), scale)
        for ours in (*OURS, *RECOMPUTED):
            said = []
            for other in (*PADDING, "grouped"):
                found = [saving(peak, ours, other, k) for k in range(2, 9)]
                values = [value for value in found if value is not None]
                if not values:
                    continue
                first = next((k for k, value in zip(range(2, 9), found) if value is not None and value >= 10), None)
                low, high = min(low, *values), max(high, *values)
                said.append(f"{other} {_span(values)}" + (f" (10 % from k = {first})" if first else ""))
            if said:
                parts.append(f"{scale.capitalize()}, {ours}: below {', '.join(said)}")
    if not parts:
        return "not run"
    verdict = "**yes**" if low >= 10 else "**no**" if high < 10 else "**in part**"
    return f"{verdict}: {'; '.join(parts)}"


def _span(values: Sequence[float]) -> str:
    low, high = (round(v) for v in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def growth(folder: Path) -> str:
    """GiB from top-1 to top-8, beside the paper's."""
    said, holds = [], []
    titles = {"data": "HEXA-MoE (data-centric)", "model": "HEXA-MoE (model-centric)"}
    for scale in ("base", "small"):
        peak = peaks(load(folder, "memory"), scale)
        for name in (*OURS, *RECOMPUTED):
            if not {(name, 1), (name, 8)} <= set(peak):
                continue
            row = paper.MEMORY[scale][titles[name.removesuffix("-recompute")]]
            mine, theirs = peak[name, 8] - peak[name, 1], row[7] - row[0]
            holds.append(mine <= theirs + 0.05)
            said.append(f"{scale.capitalize()}, {name} {mine:+.2f} GiB (paper {theirs:+.1f} GB)")
    if not said:
        return "not run"
    verdict = "**yes**" if all(holds) else "**no**" if not any(holds) else "**in part**"
    return f"{verdict}, to 0.05: {'; '.join(said)}"


def latency(folder: Path) -> str:
    """Steps of what pads or drops over the faster of ours; top-4, Base."""
    here = {r["name"]: r for r in load(folder, "latency") if (r["scale"], r["top_k"]) == ("base", 4) and "step_s" in r}
    ours = fastest(list(here.values()))
    ratios = {name: here[name]["step_s"] / ours for name in here if ours and name not in (*OURS, *RECOMPUTED)}
    asked = [ratio for name, ratio in ratios.items() if name in PADDING]
    if not asked:
        return "not run"
    said = ", ".join(f"{TITLES[name]} {ratio:.2f}x" for name, ratio in ratios.items())
    return f"**{'yes' if min(asked) >= 1.5 else 'no'}**: {said}"


def heterogeneity(folder: Path) -> str:
    """How many curves have their least step within one step of the grid of the prediction."""
    near = {True: [], False: []}  # type: dict[bool, list[str]]
    for r in load(folder, "heterogeneity"):
        if "runs" not in r or r["name"] == "capacity":
            continue
        times = {run["share"]: run["step_s"] for run in r["runs"]}
        best = min(times, key=lambda share: times[share])
        sms = " : ".join(str(n) for n in r["multiprocessors"])
        near[abs(best - r["predicted_share"]) <= 0.1001].append(f"{r['name']}-centric {sms}")
    if not near[True] and not near[False]:
        return "not run"
    count = len(near[True]) + len(near[False])
    said = f"{len(near[True])} of {count} curves"
    return f"**{'in part' if near[False] else 'yes'}**, {said}" + (
        f"; not {', '.join(near[False])}" if near[False] else ""
    )


def ablation(folder: Path) -> str:
    """Which switch moved what in the paper's direction, which did not, and which by too little to say."""
    found: dict[str, list[str]] = {"as in the paper": [], "the other way": [], "below the noise": []}
    for column, metric, key in ((0, "memory", "peak_gib"), (1, "latency", "step_s")):
        for variant, change in changes(load(folder, f"ablation_{metric}"), key).items():
            wanted = _direction(paper.ABLATION[variant][column])
            if wanted is None:
                continue
            found[_judge(change, wanted, NOISE[metric])].append(f"{variant} ({metric} {change:+.1f} %)")
    said = [f"{verdict}: {', '.join(which)}" for verdict, which in found.items() if which]
    return "; ".join(said) or "not run"


def _direction(said: str) -> int | None:
    """+1 more, -1 less, 0 equal; None if the paper says nothing."""
    for word, sign in (("less", -1), ("more", 1), ("equal", 0)):
        if word in said:
            return sign
    return None


def _judge(change: float, wanted: int, noise: float) -> str:
    if abs(change) < noise:
        return "as in the paper" if wanted == 0 else "below the noise"
    return "as in the paper" if change * wanted > 0 else "the other way"


def convergence(folder: Path) -> str:
    """Largest distance of the first five losses from the eager model's, in both precisions."""
    runs = {r["name"]: r["losses"] for r in load(folder, "convergence") if "losses" in r}

    def apart(name: str, beside: str, steps: int = 5) -> float | None:
        if not {name, beside} <= set(runs):
            return None
        return max(abs(a - b) for a, b in zip(runs[name][:steps], runs[beside][:steps]))

    said = []
    for name, beside, text in (
        ("hexa_fx, float32", "eager, float32", "hexa_fx from eager in float32"),
        ("hexa_fx", "eager", "in bf16"),
        ("grouped_mm", "eager", "torch's grouped_mm, exact too, in bf16"),
        ("padded, capacity 1.25", "eager", "capacity 1.25"),
        ("padded, capacity 1.0", "eager", "capacity 1.0"),
    ):
        value = apart(name, beside)
        said.append(f"{text} {'not run' if value is None else f'{value:.2g}'}")
    return f"largest distance of a loss over five steps: {', '.join(said)}" if runs else "not run"


Say = Callable[[Path], str]
CLAIMS: Mapping[str, Say] = {
    "memory 10-48 % below padded and dropless rows for k >= 2": memory,
    "memory grows with k no faster than the paper's own curve": growth,
    "top-4 Base step 1.5x below the best baseline that pads or drops": latency,
    "fastest share within a grid step of Eq. 1": heterogeneity,
    "every technique moves its metric as in the paper": ablation,
    "loss curve of eager to rounding noise": convergence,
}


def coverage(folder: Path) -> str:
    """What was measured, what failed and why, what time did not allow."""
    rows = []
    for name in (*EXPERIMENTS, "convergence"):
        records = load(folder, name)
        absent = [r for r in records if str(r.get("skipped", "")).startswith("not installed")]
        late = [r for r in records if "skipped" in r and r not in absent]
        failed = [r for r in records if "error" in r]
        why = "; ".join(dict.fromkeys(f"{_which(r)}: {r['error'].splitlines()[-1][:90]}" for r in failed))
        rows.append([name, sum(map(measured, records)), len(failed), len(late), _leak(records), why])
    return table(
        ["", "cases measured", "failed", "no time", "MiB a case left behind, at most", "why they failed"], rows
    )


def _which(record: Record) -> str:
    return " ".join(str(record[key]) for key in ("variant", "name", "scale", "top_k") if key in record)


def _leak(records: Iterable[Mapping[str, Any]]) -> str:
    left = [1024 * r["left_gib"] for r in records if "left_gib" in r]
    return f"{max(left):.0f}" if left else ""
