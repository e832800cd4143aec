"""How much of the gathers runs beside compute, from a torch.profiler trace of one step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

Span = tuple[float, float]


def hidden_shares(run: Callable[[], None]) -> dict[str, Any]:
    """One step's communication by kind: milliseconds of its kernels, and the share of them beside a compute kernel.

    Kernels of a collective also wait for the other ranks; that waiting counts as theirs.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    compute = _union([_span(e) for e in kernels if "nccl" not in e["name"].lower()])
    names = sorted({e["name"].split("(")[0] for e in kernels if "nccl" in e["name"].lower()})
    out: dict[str, Any] = {
        "communication": names,
        "compute_ms": round(sum(end - start for start, end in compute) / 1e3, 3),
    }
    for kind in ("AllGather", "ReduceScatter"):
        spans = [_span(e) for e in kernels if f"nccldevkernel_{kind}".lower() in e["name"].lower()]
        total = sum(end - start for start, end in spans)
        if total:
            beside = sum(_overlap(span, compute) for span in spans)
            out[kind] = {"kernels": len(spans), "ms": round(total / 1e3, 3), "hidden": round(beside / total, 4)}
    return out


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
