"""Shares of hidden communication, from events as a profiler writes them."""

import pytest

from benchmarks import partition_trace as trace


def kernel(name: str, start: float, end: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_shares_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        kernel(gather, 0, 1000),  # before anything runs
        kernel("gemm", 1000, 3000),
        kernel("gemm", 2500, 4000),  # beside the one before: counted once
        kernel(gather, 2000, 3000),
        kernel(gather, 3000, 6000),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 4000, 4500),
    ]
    ran = []
    monkeypatch.setattr(trace, "_traced", lambda run, align, kinds: run() and events)
    found = trace.hidden_shares(lambda: ran.append(1), lambda: None, 2, layer_ms=1.5)
    assert len(ran) == 2
    assert found["compute_ms"] == 1.5
    assert found["span_ms"] == 3.0
    assert found["AllGather"] == {
        "kernels": 3,
        "ms": 5.0,
        "hidden": 0.4,
        "shorter": 2,
        "hidden_of_shorter": 0.5,
        "each": [[1.0, 0.0], [1.0, 1.0], [3.0, 1.0]],
    }
    assert found["ReduceScatter"]["hidden"] == 0.0
    assert trace.compute_ms(lambda: [1]) == 3.0
