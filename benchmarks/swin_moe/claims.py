"""The sentences of docs/swin_moe.md that follow from recorded numbers: what was asked, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.pages import table
from benchmarks.swin_moe import paper
from benchmarks.swin_moe.contestants import OURS, RECOMPUTED, TITLES
from benchmarks.swin_moe.results import Record, changes, fastest, load, measured, peaks, saving

NOISE = {"memory": 3.0, "latency": 3.0}
"""Per cent: smaller changes of an ablation say nothing. Memory: what is held when a case starts, over its peak."""
PADDING = ("padded", "padded-cf1")
SETTINGS = {"data": "data-centric", "model": "model-centric"}
EXPERIMENTS = ("memory", "latency", "saturated", "crossover", "heterogeneity", "ablation_memory", "ablation_latency")


class Said(NamedTuple):
    """Whether a goal is reached, and what was measured."""

    reached: str
    measured: str = ""


def claims(folder: Path) -> str:
    """What the paper promises or was asked for, and whether it holds here."""
    return table(["goal", "reached", "measured"], [[claim, *say(folder)] for claim, say in CLAIMS.items()])


def _verdict(holds: Sequence[bool]) -> str:
    return "**yes**" if all(holds) else "in part" if any(holds) else "**no**"


def memory(folder: Path) -> Said:
    """Over both scales and settings: the k from which 10 % are saved, and what is saved at each end."""
    records = load(folder, "memory")
    said, every = [], []
    for other in (*PADDING, "grouped"):
        found = [
            [saving(peaks(records, scale), ours, other, k) for k in range(2, 9)]
            for scale in ("base", "small")
            for ours in (*OURS, *RECOMPUTED)
        ]
        values = [value for curve in found for value in curve if value is not None]
        if not values:
            continue
        every += values
        first = [
            next((k for k, v in enumerate(curve, 2) if v is not None and v >= 10), 9) for curve in found if any(curve)
        ]
        counts = [k for k in range(2, 9) if any(curve[k - 2] is not None for curve in found)]
        ends = [span([curve[k - 2] for curve in found if curve[k - 2] is not None]) for k in (counts[0], counts[-1])]  # type: ignore[misc]
        said.append(
            f"below {TITLES[other]} by {ends[0]} at k = {counts[0]}, {ends[1]} at k = {counts[-1]}, {_from(first)}"
        )
    if not said:
        return Said("not run")
    return Said(_verdict([value >= 10 for value in every]), "; ".join(said))


def _from(first: Sequence[int]) -> str:
    low, high = min(first), max(first)
    if high > 8:
        return "not everywhere by 10 %"
    return f"10 % from k = {low}" + ("" if low == high else f" or {high}")


def span(values: Sequence[float]) -> str:
    """Per cent, from the least to the largest."""
    low, high = (f"{round(v) + 0:d}" for v in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def growth(folder: Path) -> Said:
    """GiB from top-1 to top-8, beside the paper's."""
    said, holds = [], []
    for scale in ("base", "small"):
        peak = peaks(load(folder, "memory"), scale)
        for name in (*OURS, *RECOMPUTED):
            if not {(name, 1), (name, 8)} <= set(peak):
                continue
            setting = SETTINGS[name.removesuffix("-recompute")]
            row = paper.MEMORY[scale][f"HEXA-MoE ({setting})"]
            mine, theirs = peak[name, 8] - peak[name, 1], row[7] - row[0]
            holds.append(mine <= theirs + 0.05)
            more = ", recompute_h" if name in RECOMPUTED else ""
            said.append(f"{scale.capitalize()} {setting}{more} {mine:+.2f} GiB (paper {theirs:+.1f} GB)")
    if not said:
        return Said("not run")
    return Said(_verdict(holds), "; ".join(said))


def latency(folder: Path) -> Said:
    """Steps of what pads or drops over the faster of ours; top-4, Base."""
    here = {r["name"]: r for r in load(folder, "latency") if (r["scale"], r["top_k"]) == ("base", 4) and "step_s" in r}
    ours = fastest(list(here.values()))
    ratios = {name: here[name]["step_s"] / ours for name in here if ours and name not in (*OURS, *RECOMPUTED)}
    asked = [ratio for name, ratio in ratios.items() if name in PADDING]
    if not asked:
        return Said("not run")
    said = ", ".join(f"{TITLES[name]} {ratio:.2f} times ours" for name, ratio in ratios.items())
    return Said("**yes**" if min(asked) >= 1.5 else "**no**", said)


def heterogeneity(folder: Path) -> Said:
    """How many curves have their least step within one step of the grid of the prediction."""
    near, far = 0, []
    for r in load(folder, "heterogeneity"):
        if "runs" not in r or r["name"] == "capacity":
            continue
        times = {run["share"]: run["step_s"] for run in r["runs"]}
        best = min(times, key=lambda share: times[share])
        if abs(best - r["predicted_share"]) <= 0.1001:
            near += 1
            continue
        chosen = min(times, key=lambda share: abs(share - r["predicted_share"]))
        sms = " : ".join(str(n) for n in r["multiprocessors"])
        lost = 100 * (times[chosen] / times[best] - 1)
        far.append(
            f"{SETTINGS[r['name']]} at {sms}, where the predicted share costs {lost:.1f} % more than the fastest"
        )
    if not near and not far:
        return Said("not run")
    said = f"{near} of {near + len(far)} curves" + (f"; not {', '.join(far)}" if far else "")
    return Said("**yes**" if not far else "in part" if near else "**no**", said)


def ablation(folder: Path) -> Said:
    """How many switches moved their metric in the paper's direction, which did not, and which by too little to say."""
    found: dict[str, list[str]] = {"as in the paper": [], "the other way": [], "too little to say": []}
    for column, metric, key in ((0, "memory", "peak_gib"), (1, "latency", "step_s")):
        for variant, change in changes(load(folder, f"ablation_{metric}"), key).items():
            wanted = _direction(paper.ABLATION[variant][column])
            if wanted is None or variant == "padded capacity":
                continue
            found[_judge(change, wanted, NOISE[metric])].append(f"{variant} ({metric} {change:+.1f} %)")
    count = sum(map(len, found.values()))
    if not count:
        return Said("not run")
    right = len(found["as in the paper"])
    said = [f"{verdict}: {', '.join(which)}" for verdict, which in list(found.items())[1:] if which]
    reached = "**yes**" if right == count else "in part" if right else "**no**"
    return Said(reached, "; ".join([f"{right} of {count} as in the paper", *said]))


def _direction(said: str) -> int | None:
    """+1 more, -1 less, 0 equal; None if the paper says nothing."""
    for word, sign in (("less", -1), ("more", 1), ("equal", 0)):
        if word in said:
            return sign
    return None


def _judge(change: float, wanted: int, noise: float) -> str:
    if abs(change) < noise:
        return "as in the paper" if wanted == 0 else "too little to say"
    return "as in the paper" if change * wanted > 0 else "the other way"


def convergence(folder: Path) -> Said:
    """Largest distance of the first five losses from the eager model's: ours, and of what says how far rounding goes."""
    runs = {r["name"]: r["losses"] for r in load(folder, "convergence") if "losses" in r}

    def apart(name: str, beside: str = "eager", steps: int = 5) -> float | None:
        if not {name, beside} <= set(runs):
            return None
        return max(abs(a - b) for a, b in zip(runs[name][:steps], runs[beside][:steps]))

    exact, ours, noise = apart("hexa_fx, float32", "eager, float32"), apart("hexa_fx"), apart("grouped_mm")
    if exact is None or ours is None or noise is None:
        return Said("not run")
    said = f"largest distance over five steps: {exact:.2g} in float32, {ours:.2g} in bf16; in bf16 torch's grouped_mm {noise:.2g}"
    for name in ("padded, capacity 1.25", "padded, capacity 1.0"):
        value = apart(name)
        said += "" if value is None else f", {name} {value:.2g}"
    return Said(_verdict([exact < 1e-4, ours < 2 * noise]), said)


Say = Callable[[Path], Said]
CLAIMS: Mapping[str, Say] = {
    "memory 10 to 48 % below the padded and the dropless baselines for k >= 2": memory,
    "memory grows from k = 1 to 8 by no more than in the paper (to 0.05)": growth,
    "Base, top-4: every baseline that pads takes 1.5 times our step": latency,
    "unequal devices: fastest share within a grid step (0.1) of Eq. 1 and 2": heterogeneity,
    "every technique that is switched off moves its metric as in the paper": ablation,
    "loss curve of the original model, to rounding": convergence,
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
        rows.append([name, sum(map(measured, records)), len(absent), len(late), len(failed), why])
    head = ["", "cases measured", "library not installed", "not started in time", "failed", "why they failed"]
    return table(head, rows)


def held(folder: Path) -> str:
    """Which k the memory table has, and how far its peaks may be too low."""
    records = [r for r in load(folder, "memory") if "peak_gib" in r]
    if not records:
        return "not run"
    said = []
    for scale in dict.fromkeys(r["scale"] for r in records):
        here = [r for r in records if r["scale"] == scale]
        counts = sorted({r["top_k"] for r in here if r["name"] in OURS})
        missing = [k for k in range(1, 9) if k not in counts]
        before = max(r.get("before_gib", 0.0) for r in here)
        said.append(
            f"{scale.capitalize()}: measured for k = {_list(counts)}"
            + (f", not for k = {_list(missing)}" if missing else "")
            + f"; up to {before:.2f} GiB of the case before were held when a case started"
        )
    return ". ".join(said) + "."


def _list(values: Sequence[int]) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} and {last}" if head else last


def _which(record: Record) -> str:
    return " ".join(str(record[key]) for key in ("variant", "name", "scale", "top_k") if key in record)
