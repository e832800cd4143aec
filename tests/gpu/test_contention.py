"""Several processes share the device, which stops their kernels anywhere: no warp may wait for what another one has long passed."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

PROCESSES, SECONDS = 6, 8.0


def launches(columns: int, rank: int) -> None:
    """Launches of a product with gathered rows, of few steps, all with the same result."""
    from benchmarks.launching import on_tensors
    from hexa_fx.codegen.family_gemm_sm90 import COOPERATIVE
    from hexa_fx.cuda import gemm_sm90

    sm90 = on_tensors(gemm_sm90)
    from hexa_fx.ops.table import Esmm
    from hexa_fx.ops.table_variants import EsmmLowRank
    from tests.gpu.cases import make_routing, randn

    r = make_routing("random", 301, 3, 7)
    x, w = randn(301, columns, dtype=torch.bfloat16), randn(7, 328, columns, dtype=torch.bfloat16)
    u, c = randn(r.n, rank, dtype=torch.bfloat16), randn(7, 328, rank, dtype=torch.bfloat16)
    plain = Esmm(x, w, None, r.v, r.offs, 3, "nk")
    given = EsmmLowRank(*plain, u, c) if rank else plain
    first, end = sm90.esmm(given, COOPERATIVE), time.monotonic() + SECONDS
    while time.monotonic() < end:
        results = [sm90.esmm(given, COOPERATIVE) for _ in range(50)]
        assert all(torch.equal(result, first) for result in results)


@pytest.mark.parametrize(
    ("columns", "rank"),
    [(200, 0), (200, 16), (200, 32), (200, 328), (64, 32)],
    ids=["plain", "second product in staging", "in a stage", "of more steps than stages", "two tiles in the stages"],
)
def test_kernels_end_wherever_they_are_stopped(columns: int, rank: int, hopper: None) -> None:
    """Gathering warps that came late once waited for room that had been given back twice."""
    command = [sys.executable, "-c", f"from tests.gpu.test_contention import launches; launches({columns}, {rank})"]
    running = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(PROCESSES)]
    end = time.monotonic() + 60 + SECONDS
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    statuses = [process.poll() for process in running]  # None: it hangs
    for process in running:
        process.kill()
    assert statuses == [0] * PROCESSES
