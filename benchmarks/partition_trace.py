"""How much of the gathers runs beside compute, from a torch.profiler trace of steps that follow each other as in training."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

Span = tuple[float, float]
Event = dict[str, Any]


def hidden_shares(run: Callable[[], None], align: Callable[[], None], steps: int, layer_ms: float) -> dict[str, Any]:
    """Communication of ``steps`` steps by kind: milliseconds of its kernels, and the share of them beside a compute kernel.

    Every kernel of the trace counts, also the first gather, before which nothing runs. Kernels of a collective also wait for
    the other ranks; that waiting counts as theirs.

    Args:
        run: one step; the host does not wait between steps.
        align: brings the ranks together once the profiler is on, which takes a different time on each.
        layer_ms: compute time of a layer's forward (attention, router, experts), behind which two slots should hide a gather:
            ``shorter`` has the gathers that last less.
    """
    kernels = _kernels(lambda: [run() for _ in range(steps)], align)
    if not kernels:
        return {"communication": ["the profiler recorded no kernels"]}
    compute = _union([_span(e) for e in kernels if not _is_communication(e)])
    out: dict[str, Any] = {
        "communication": sorted({e["name"].split("(")[0] for e in kernels if _is_communication(e)}),
        "compute_ms": round(_length(compute) / steps, 3),
        "span_ms": round((max(map(_end, kernels)) - min(_span(e)[0] for e in kernels)) / 1e3 / steps, 3),
    }
    for kind in ("AllGather", "ReduceScatter"):
        spans = sorted(_span(e) for e in kernels if f"nccldevkernel_{kind}".lower() in e["name"].lower())
        if spans:
            out[kind] = _summary(spans, compute, layer_ms)
    return out


def compute_ms(run: Callable[[], object]) -> float:
    """Milliseconds in which a compute kernel of ``run`` runs."""
    kernels = _kernels(run, lambda: None)
    return _length(_union([_span(e) for e in kernels if not _is_communication(e)]))


def _summary(spans: list[Span], compute: list[Span], layer_ms: float) -> dict[str, Any]:
    pairs = [((end - start) / 1e3, _overlap((start, end), compute) / 1e3) for start, end in spans]
    shorter = [pair for pair in pairs if pair[0] < layer_ms]
    return {
        "kernels": len(pairs),
        "ms": round(sum(ms for ms, _ in pairs), 3),
        "hidden": _share(pairs),
        "shorter": len(shorter),
        "hidden_of_shorter": _share(shorter),
        "each": [[round(ms, 3), round(beside, 3)] for ms, beside in pairs],
    }


def _share(pairs: list[tuple[float, float]]) -> float | None:
    total = sum(ms for ms, _ in pairs)
    return round(sum(beside for _, beside in pairs) / total, 4) if total else None


def _kernels(run: Callable[[], object], align: Callable[[], None]) -> list[Event]:
    # Without the host's events: they slow down a host that is what short layers wait for as it is.
    cuda, cpu = torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU
    return _traced(run, align, [cuda]) or _traced(run, align, [cuda, cpu])


def _traced(run: Callable[[], object], align: Callable[[], None], activities: list[Any]) -> list[Event]:
    with torch.profiler.profile(activities=activities) as profile:
        align()
        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("cat") == "kernel" and "allreduce" not in e["name"].lower()]


def _is_communication(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _end(event: Event) -> float:
    return _span(event)[1]


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(spans: list[Span]) -> float:
    """Milliseconds."""
    return sum(end - start for start, end in spans) / 1e3


def _overlap(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
