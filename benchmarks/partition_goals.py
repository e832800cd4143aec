"""What was asked of partitioned layers, and what came out, from the records of docs/partition_speed.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pages import table

Record = dict[str, Any]
Row = tuple[str, str, str]
Runs = dict[int, dict[str, Any]]
"""What was recorded, by number of GPUs."""


def goals(runs: Runs) -> str:
    """What was asked of these measurements, and what came out."""
    made = [*_auto(runs), *_hidden(runs), *_cache(runs), *_shares(runs), *_errors(runs)]
    return table(["goal", "reached", "measured"], made)


def _row(goal: str, fine: int, count: int, said: str) -> list[Row]:
    reached = "**yes**" if fine == count else "in part" if fine else "**no**"
    return [(goal, reached, said)] if count else []


def _auto(runs: Runs) -> list[Row]:
    over = [r["over_best"] for run in runs.values() for r in of(run, "step time") if "over_best" in r]
    said = f"at most {max(over, default=1):.3f} times as long, {len(over)} points"
    return _row("`auto` within 5 % of the better mode", sum(o <= 1.05 for o in over), len(over), said)


def _hidden(runs: Runs) -> list[Row]:
    """Gathers that last less than a layer's attention and experts."""
    found = {}
    for ranks, run in runs.items():
        for r in of(run, "overlap"):
            shares = [rank["AllGather"]["hidden_of_shorter"] for rank in r.get("ranks", ()) if "AllGather" in rank]
            if shares and None not in shares:
                found[f"{r['shape']} with {r['tokens']} tokens on {ranks} GPUs{graph_of(r)}"] = min(shares)
    short = [f"{case} ({percent(share)})" for case, share in found.items() if share < 0.8]
    fine = [share for share in found.values() if share >= 0.8]
    said = f"{len(fine)} of {len(found)} cases" + (f", {_span(fine)}" if fine else "")
    said += f"; not {', '.join(short)}" if short else ""
    goal = "80 % of the gather time hidden where attention and experts last longer than a gather"
    return _row(goal, len(fine), len(found), said)


def _span(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} to {high} %" if low != high else f"{low} %"


def _cache(runs: Runs) -> list[Row]:
    rows = [(ranks, r) for ranks, run in runs.items() for r in of(run, "memory")]
    if not rows:
        return []
    sizes = {ranks: {r["gathered_mib"] for n, r in rows if n == ranks} for ranks, _ in rows}
    layers = [r["layers"] for _, r in rows]
    said = "; ".join(
        f"{', '.join(f'{size:.0f}' for size in sorted(found))} MiB on {n} GPUs" for n, found in sizes.items()
    )
    goal = f"memory of gathered weights constant from {min(layers)} to {max(layers)} layers"
    return _row(goal, sum(len(found) == 1 for found in sizes.values()), len(sizes), said)


def _shares(runs: Runs) -> list[Row]:
    """Unequal devices: weighted shards against the ideal, and against the uniform split."""
    weighted = [
        r for run in runs.values() for r in of(run, "unequal devices") if r.get("split") == "weighted" and "kind" in r
    ]
    experts = [r for r in weighted if "over_ideal" in r]
    if not experts:
        return []
    far = [
        f"{r['shape']}, {r['kind']}-centric, {len(r['sms'])} devices ({r['over_ideal']:.2f})"
        for r in experts
        if r["over_ideal"] > 1.1
    ]
    fine = [r["over_ideal"] for r in experts if r["over_ideal"] <= 1.1]
    said = f"{len(fine)} of {len(experts)} cases" + (f", {min(fine):.2f} to {max(fine):.2f}" if fine else "")
    said += f"; not {', '.join(far)}" if far else ""
    rows = _row("weighted shards within 10 % of the ideal time (1.10)", len(fine), len(experts), said)
    for name, records in (("experts", experts), ("step", [r for r in weighted if "step_ms" in r])):
        gains = [
            f"{_span([r['gain_over_uniform'] for r in records if len(r['sms']) == n])} on {n} devices"
            for n in sorted({len(r["sms"]) for r in records})
        ]
        better = sum(r["gain_over_uniform"] > 0 for r in records)
        what = "time of the experts" if name == "experts" else "time of a step"
        rows += _row(f"weighted shards faster than uniform ones, {what}", better, len(records), ", ".join(gains))
    return rows


def _errors(runs: Runs) -> list[Row]:
    """In bf16, against float32, over the error of one device alone."""
    found = [r for run in runs.values() for r in of(run, "correctness")]
    said = "; ".join(
        f"{name}s at most {max(r[name] for r in found):.3f}, one device {max(r[f'{name}_one_device'] for r in found):.3f}"
        for name in ("output", "gradient")
        if found
    )
    fine = sum(r[name] <= 3 * r[f"{name}_one_device"] for r in found for name in ("output", "gradient"))
    return _row("bf16: relative error of the order of one device's (3 times it at most)", fine, 2 * len(found), said)


def of(run: dict[str, Any], question: str) -> list[Record]:
    return [record for record in run["records"] if record["question"] == question]


def graph_of(record: Record) -> str:
    return ", as a CUDA graph" if record.get("captured") else ""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
