"""A rank that dies in the middle of a step: every survivor ends in time. On NCCL behind the `multigpu` mark, the same over Gloo.

What a survivor on NCCL sees depends on who notices first. Where hosts talk in the step (model-centric layers exchange token
counts over Gloo) it is a RankError that names the lost rank. Elsewhere the device waits for a collective that never ends, and
torch's watchdog ends the process after the group's timeout, with its own message; with TORCH_NCCL_BLOCKING_WAIT=1 the host
waits for collectives and raises, so it is a RankError again, at the price of a host that no longer runs ahead.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("dying_rank.py")


def survivor(backend: str, mode: str, when: str, **environment: str) -> tuple[int, str, float]:
    """Exit status, output and seconds of rank 0 of two; rank 1 has to end as WHEN says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    } | environment
    began, ranks = time.monotonic(), []
    for rank in range(2):
        command = [sys.executable, str(SCRIPT), backend, mode, when]
        ranks.append(
            subprocess.Popen(
                command,
                env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        output, _ = ranks[0].communicate(timeout=150)
        assert ranks[1].wait(30) == (0 if when == "never" else 17)
    finally:
        for process in ranks:
            process.kill()
    return ranks[0].returncode, output, time.monotonic() - began


def is_named(output: str) -> bool:
    return "RankError" in output and "ranks [1] do not answer" in output


def test_over_gloo() -> None:
    status, output, _ = survivor("gloo", "data", "backward")
    assert status not in (0, None)
    assert "finished" not in output
    assert is_named(output), output


@pytest.fixture(scope="module")
def kernels() -> None:
    """Built before anybody waits for anybody in seconds."""
    for mode in ("data", "model"):
        status, output, _ = survivor("nccl", mode, "never")
        assert status == 0, output
        assert "finished" in output, output


@pytest.mark.multigpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["data", "model"])
def test_on_nccl_a_survivor_ends_in_time(mode: str, when: str) -> None:
    status, output, seconds = survivor("nccl", mode, when)
    assert status not in (0, None)
    assert "finished" not in output
    assert is_named(output) or "watchdog" in output.lower(), output
    assert seconds < 120


@pytest.mark.multigpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("mode", ["data", "model"])
def test_on_nccl_a_waiting_host_names_the_lost_rank(mode: str) -> None:
    status, output, _ = survivor("nccl", mode, "backward", TORCH_NCCL_BLOCKING_WAIT="1")
    assert status not in (0, None)
    assert is_named(output), output
