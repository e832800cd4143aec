"""What docs/swin_moe.md says in short, and sentences of it that further cases of a table would change."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.swin_moe.claims import PADDING, span
from benchmarks.swin_moe.contestants import OURS
from benchmarks.swin_moe.results import Record, load, peaks, saving

SCALES = ("base", "small")
APART = 1.1
"""A step that is this much above the median of its like was disturbed by what ran beside it."""


def brief(folder: Path) -> str:
    """Memory and time of a step, for someone who wants to know what is to be gained."""
    said = [memory(folder), time(folder)]
    return "\n".join(f"* {text}" for text in said if text) or "not run"


def memory(folder: Path) -> str:
    """Savings from k = 4 on, those below, and the batches that fit the paper's cards."""
    records = load(folder, "memory")
    most = _savings(records, ("padded",), range(4, 9))
    others = _savings(records, ("padded-cf1", "grouped"), range(4, 9))
    few = _savings(records, (*PADDING, "grouped"), (1, 2))
    if not (most and others and few):
        return ""
    text = (
        f"**Memory.** From top-4 routing on, a training step peaks {span(most)} lower than with experts padded to capacity "
        f"1.25, and {span(others)} lower than with torch's grouped matmul or padding to capacity 1.0. At top-1 and top-2 there "
        f"is little difference ({span(few)})."
    )
    fits = {name: _larger(load(folder, "latency"), name) for name in PADDING}
    if all(fits.values()):
        text += (
            f" In 24 GiB, top-4 fits a batch that is {span(fits['padded'])} larger than with padding to 1.25, and "
            f"{span(fits['padded-cf1'])} larger than with padding to 1.0."
        )
    return text


def _savings(records: Iterable[Record], others: Sequence[str], counts: Iterable[int]) -> list[float]:
    records, counts = list(records), list(counts)
    found = [
        saving(peaks(records, scale), ours, other, k)
        for scale in SCALES
        for ours in OURS
        for other in others
        for k in counts
    ]
    return [value for value in found if value is not None]


def _larger(records: Iterable[Record], other: str) -> list[float]:
    """Per cent that data-centric's largest batch at top-4 lies above another's."""
    batch = {(r["scale"], r["name"]): r["largest_batch"] for r in records if r["top_k"] == 4 and "largest_batch" in r}
    pairs = [(batch.get((scale, "data")), batch.get((scale, other))) for scale in SCALES]
    return [100 * (ours / theirs - 1) for ours, theirs in pairs if ours and theirs]


def time(folder: Path) -> str:
    """Steps of the baselines over data-centric ones."""
    records = load(folder, "latency")
    first, fourth = _ratios(records, PADDING, (1,)), _ratios(records, PADDING, (4,))
    grouped, model = _ratios(records, ("grouped",)), _ratios(records, ("model",))
    if not (first and fourth and grouped and model):
        return ""
    return (
        f"**Time.** Next to a data-centric step of hexa_fx, one with padding takes {_factors(first)} times as long at top-1 and "
        f"{_factors(fourth)} times at top-4, one with grouped matmul {_factors(grouped)} times, and a model-centric one "
        f"{_factors(model)} times. The paper's factors, up to 4.3, are not reached on this hardware."
    )


def _ratios(records: Iterable[Record], others: Sequence[str], counts: Sequence[int] = (1, 2, 3, 4)) -> list[float]:
    steps = {(r["scale"], r["top_k"], r["name"]): r["step_s"] for r in records if "step_s" in r}
    return [
        seconds / steps[scale, k, "data"]
        for (scale, k, name), seconds in steps.items()
        if name in others and k in counts and (scale, k, "data") in steps
    ]


def _factors(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def floor(folder: Path) -> str:
    """What a step takes without the experts' computation, beside hexa_fx and padding; from the memory runs."""
    records = [r for r in load(folder, "memory") if "step_s" in r]
    steps = [1e3 * r["step_s"] for r in records if r["name"] == "none"]
    whole = {r["name"]: 1e3 * r["step_s"] for r in records if (r["scale"], r["top_k"]) == ("base", 4)}
    if not steps or not {"data", "padded"} <= set(whole):
        return "not run"
    usual = [ms for ms in steps if ms <= APART * statistics.median(steps)]
    others = sorted({f"{ms:.0f}" for ms in steps if ms not in usual})
    took = f"{min(usual):.0f} to {max(usual):.0f} ms in {len(usual)} of {len(steps)} cases"
    took += f", and {' and '.join(others)} ms in the rest" if others else ""
    asked = whole["padded"] / 1.5
    said = (
        f"In the memory runs (two GPUs, batch 40) the model without what its experts compute took {took}. Base at top-4 took "
        f"{whole['data']:.0f} ms with hexa_fx and {whole['padded']:.0f} ms with padding. For padding to take 1.5 times as long "
        f"as hexa_fx, hexa_fx would have to take {asked:.0f} ms"
    )
    return said + (": less than the model takes without any expert." if asked < min(usual) else ".")
