"""The tables of docs/swin_moe.md, from the recorded results.   python -m benchmarks.swin_moe docs   writes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from benchmarks.swin_moe import paper
from benchmarks.swin_moe.brief import brief, floor
from benchmarks.swin_moe.claims import SETTINGS, claims, coverage, held
from benchmarks.swin_moe.contestants import OURS, RECOMPUTED, TITLES
from benchmarks.swin_moe.experiments import PAPER_BATCH
from benchmarks.swin_moe.results import Record, changes, fastest, load, peaks, saving

PAGE = Path(__file__).parents[2] / "docs" / "swin_moe.md"


def _cells(records: list[Record], key: str, value: Callable[[Record], str], wanted: Sequence[Any]) -> list[str]:
    by = {record[key]: record for record in records}
    return [_cell(by.get(item), value) for item in wanted]


def _cell(record: Record | None, value: Callable[[Record], str]) -> str:
    if record is None:
        return "not run"
    if "error" in record:
        return "failed"
    if "skipped" in record:
        return "not run"
    return value(record)


def memory(folder: Path) -> str:
    """Peak of tensors, GiB a device, by k; the paper's rows below."""
    records, counts, parts = load(folder, "memory"), range(1, 9), []
    for scale in ("base", "small"):
        here = [r for r in records if r["scale"] == scale]
        rows: list[Sequence[object]] = []
        for name in _in_order(records):
            mine = [r for r in here if r["name"] == name]
            rows.append([TITLES[name], *_cells(mine, "top_k", lambda r: f"{r['peak_gib']:.2f}", counts)])
        rows += [[f"paper: {title}", *values] for title, values in paper.MEMORY[scale].items()]
        parts.append(table([scale.capitalize(), *(f"top-{k}" for k in counts)], rows))
    return "\n\n".join(parts)


def savings(folder: Path) -> str:
    """How far ours lie below the others: of the whole, and of what lies above the model without its experts' computation."""
    records, counts, parts = load(folder, "memory"), range(1, 9), []
    for scale in ("base", "small"):
        peak, rows = peaks(records, scale), []
        for ours in (*OURS, *RECOMPUTED):
            for other in ("padded", "padded-cf1", "grouped"):
                cells = [_saved(peak, ours, other, k) for k in counts]
                if any(cells):
                    rows.append([f"{ours} below {other}", *cells])
        if rows:
            parts.append(table([scale.capitalize(), *(f"top-{k}" for k in counts)], rows))
    return "\n\n".join(parts) or "not run"


def _saved(peak: dict[tuple[str, int], float], ours: str, other: str, k: int) -> str:
    whole = saving(peak, ours, other, k)
    if whole is None:
        return ""
    own = saving(peak, ours, other, k, above="none")
    return f"{round(whole)} %" + (f" ({round(own)} %)" if own is not None else "")


def _in_order(records: Iterable[Record]) -> list[str]:
    """Contestants that were tried and installed, as `TITLES` has them."""
    there = {r["name"] for r in records if _is_installed(r)}
    return [name for name in TITLES if name in there]


def _is_installed(record: Record) -> bool:
    return not str(record.get("skipped", "")).startswith("not installed")


def latency(folder: Path) -> str:
    """Milliseconds a step, and the largest batch in 24 GiB; the paper's seconds below."""
    records, parts = load(folder, "latency"), []
    for scale in ("base", "small"):
        here = [r for r in records if r["scale"] == scale]
        batches = PAPER_BATCH[scale]
        counts, rows = sorted(batches), []
        best = {k: fastest([r for r in here if r["top_k"] == k]) for k in counts}
        for name in _in_order(records):
            mine = {r["top_k"]: r for r in here if r["name"] == name}
            rows.append([TITLES[name], *(_cell(mine.get(k), functools.partial(_step, best=best[k])) for k in counts)])
        rows += [[f"paper: {t}", *(f"{v:.2f} s" for v in values)] for t, values in paper.LATENCY[scale].items()]
        parts.append(table([scale.capitalize(), *(f"top-{k}, batch {batches[k]}" for k in counts)], rows))
    return "\n\n".join(parts)


def _step(record: Record, best: float) -> str:
    text = f"{1e3 * record['step_s']:.1f}"
    if record["name"] not in OURS:
        text += f" ({record['step_s'] / best:.2f})" if best else ""
    return f"{text}, {record['largest_batch']}" if "largest_batch" in record else text


def saturated(folder: Path) -> str:
    records = load(folder, "saturated")
    if not records:
        return "not run"
    best = fastest(records)
    rows = [
        [
            TITLES[r["name"]],
            _cell(r, lambda r: f"{1e3 * r['step_s']:.1f}"),
            _cell(r, lambda r: f"{r['step_s'] / best:.2f}" if best else ""),
            _cell(r, lambda r: f"{r['peak_gib']:.1f}"),
        ]
        for r in records
        if _is_installed(r)
    ]
    return table(["top-4, batch 256 a device", "ms a step", "over the faster of ours", "GiB"], rows)


def one_gpu(folder: Path) -> str:
    """With the libraries themselves, on one GPU: a step that fills it, and the peak of memory by k."""
    records = load(folder, "one_gpu")
    if not records:
        return "not run"
    by = {(r["experiment"], r["name"], r["top_k"]): r for r in records}
    best, counts = fastest([r for r in records if r["experiment"] == "saturated"]), range(1, 9)
    rows = []
    for name in TITLES:
        full = by.get(("saturated", name, 4))
        if full is None:
            continue
        cells = [_cell(by.get(("memory", name, k)), lambda r: f"{r['peak_gib']:.2f}") for k in counts]
        step = f"{1e3 * full['step_s']:.1f} ({full['step_s'] / best:.2f})"
        rows.append([TITLES[name], step, f"{full['peak_gib']:.1f}", *(cell.replace("not run", "") for cell in cells)])
    head = ["", "ms a full step", "its GiB", *(f"GiB, top-{k}" for k in counts)]
    return table(head, rows)


def crossover(folder: Path) -> str:
    runs = {r["name"]: r for r in load(folder, "crossover") if "runs" in r}
    if set(runs) != set(OURS):
        return "not run"
    data, model = ({run["batch"]: run["step_s"] for run in runs[name]["runs"]} for name in OURS)
    rows = [[batch, f"{1e3 * data[batch]:.1f}", f"{1e3 * model[batch]:.1f}"] for batch in data]
    meet = meeting(data, model)
    first = "data" if all(data[batch] < model[batch] for batch in data) else "model"
    said = f"{SETTINGS[first]} is faster throughout" if meet is None else f"they meet at about {meet:.0f} images"
    predicted = runs["data"]["predicted_batch"]
    text = table(["batch a device", "data-centric, ms", "model-centric, ms"], rows)
    return f"{text}\n\nMeasured: {said}. Both move the same bytes at {predicted:.0f} images a device ([partition](partition.md))."


def meeting(data: dict[int, float], model: dict[int, float]) -> float | None:
    """The batch at which the two curves cross for the last time, between measured points; None if they do not."""
    found = None
    for low, high in pairwise(sorted(data)):
        before, after = data[low] - model[low], data[high] - model[high]
        if before * after < 0:
            found = low + (high - low) * before / (before - after)
    return found


def heterogeneity(folder: Path) -> str:
    records = load(folder, "heterogeneity")
    rows = []
    for r in records:
        if r["name"] == "capacity" or "runs" not in r:
            continue
        times = {run["share"]: run["step_s"] for run in r["runs"]}
        best = min(times, key=lambda share: times[share])
        even = f"{100 * (1 - times[best] / times[0.5]):.1f} %" if 0.5 in times else ""
        sms = " : ".join(str(n) for n in r["multiprocessors"])
        near = "yes" if abs(best - r["predicted_share"]) <= 0.1001 else "no"
        rows.append(
            [sms, r["name"], f"{r['predicted_share']:.2f}", f"{r['proxy_share']:.2f}", best, near, even]
            + [paper.HETEROGENEITY[r["case"], r["name"]]]
        )
    head = ["multiprocessors", "setting", "Eq. 1/2, layer's operator", "Eq. 1/2, paper's proxy", "fastest share"]
    return table([*head, "within a step of 0.1", "below the even split", "paper"], rows)


def ablation(folder: Path) -> str:
    """Memory of the memory run, memory and step of the latency run, each beside the whole of its setting.

    The memory run times its steps too, but beside other work on the same GPUs (gpu.sh), so they are not shown.
    """
    memory, latency = ({r["variant"]: r for r in load(folder, f"ablation_{m}")} for m in ("memory", "latency"))
    if "peak_gib" not in memory.get("padded capacity", {}):  # the same case is in the memory table
        same = [r for r in load(folder, "memory") if (r["name"], r["scale"], r["top_k"]) == ("padded", "base", 4)]
        memory |= {"padded capacity": same[0]} if same else {}
    rows = []
    for variant, said in paper.ABLATION.items():
        cells = []
        for by, key, unit in ((memory, "peak_gib", 1.0), (latency, "peak_gib", 1.0), (latency, "step_s", 1e3)):
            change = changes(by.values(), key).get(variant)
            cells.append(_cell(by.get(variant), functools.partial(_changed, key=key, unit=unit, change=change)))
        rows.append([variant, *cells, *said])
    head = ["switched off", "GiB, 2 GPUs, batch 40", "GiB, 4 GPUs, batch 80", "ms a step, 4 GPUs, batch 80"]
    return table([*head, "paper: memory", "paper: latency"], rows)


def _changed(record: Record, key: str, unit: float, change: float | None) -> str:
    return f"{unit * record[key]:.2f}" + ("" if change is None else f" ({change:+.1f} %)")


def convergence(folder: Path) -> str:
    runs = {r["name"]: r for r in load(folder, "convergence") if "losses" in r}
    if "eager" not in runs:
        return "not run"
    rows = []
    for name, run in runs.items():
        beside = runs.get("eager, float32" if name == "hexa_fx, float32" else "eager")
        assert beside is not None
        apart = [abs(a - b) for a, b in zip(run["losses"], beside["losses"])]
        cells = [f"{max(apart[:n]):.4f}" for n in (1, 5, 20)] if run is not beside else ["", "", ""]
        last = run["losses"][-50:]
        rows.append([name, *cells, f"{sum(last) / len(last):.3f}", f"{100 * run['accuracy']:.1f} %"])
    head = ["", "step 1", "steps 1-5", "steps 1-20", "mean of the last 50 losses", "held-out accuracy"]
    return table(head, rows)


SECTIONS: dict[str, Callable[[Path], str]] = {
    "brief": brief,
    "coverage": coverage,
    "claims": claims,
    "held": held,
    "memory": memory,
    "savings": savings,
    "latency": latency,
    "floor": floor,
    "saturated": saturated,
    "one_gpu": one_gpu,
    "crossover": crossover,
    "heterogeneity": heterogeneity,
    "ablation": ablation,
    "convergence": convergence,
}


def fill(text: str, folder: Path) -> str:
    """The page with every table between its markers made anew."""
    return pages.fill(text, SECTIONS, folder)


def main(folder: Path) -> None:
    PAGE.write_text(fill(PAGE.read_text(), folder))
    print(f"wrote {PAGE}")
