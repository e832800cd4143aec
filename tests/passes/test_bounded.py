"""Where memory ends during the analysis it goes on with less, and otherwise says what was needed and what to do."""

import pytest
import torch

import hexa_fx
from hexa_fx.config import HexaConfig
from hexa_fx.isolation.size import is_out_of_memory
from tests.runtime.handmade import D, ListMoE

HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. "
X = torch.randn(12, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(HOST.format(64)), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def fails(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Makes the first ``times`` analyses of a block end as on a host without memory."""
    from hexa_fx.passes import _analyse

    left = [times]

    def analyse(*args: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError(HOST.format(64 << 20))
        return _analyse(*args)

    monkeypatch.setattr("hexa_fx.passes._analyse", analyse)


def test_it_says_what_was_needed_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, 99)
    report = hexa_fx.explain(ListMoE(), X)
    (block,) = report.refused
    assert "which takes up to 2.0 GiB beside the model (the last attempt asked for 64.0 MiB more)" in block.reason
    assert "free as much, or set HexaConfig(analysis_bytes=...)" in block.reason
    assert "report" not in str(report)
    assert block.advice == ""


def test_with_less_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, 2)
    assert hexa_fx.explain(ListMoE(), X, HexaConfig(verify=False)).rewritten


def test_no_memory_to_measure_costs_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def snapshots(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hexa_fx.inspection.inspector.snapshots", snapshots)
    (block,) = hexa_fx.explain(ListMoE(), X, HexaConfig(verify=False)).rewritten
    assert block.costs is None
    assert "no memory left to measure what it costs" in caplog.text
    assert "report" not in caplog.text
