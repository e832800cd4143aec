"""A rank that dies in the middle of a step: every survivor ends in time. On NCCL behind the `multigpu` mark, the same over Gloo.

On NCCL a collective with a dead rank does not fail, it waits; see `hexa_fx.distributed.rank_failures` for what ends it. What a
survivor sees depends on where its host stands: in a call that looks who is lost, or in a wait for the device. Either way its
last words name the lost rank.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from harness import scripts


def survivor(folder: Path, backend: str, mode: str, when: str, **environment: str) -> tuple[int, str, float]:
    """Exit status and output of rank 0 of two, and its seconds after the end of rank 1, which has to end as WHEN says."""
    with scripts(2, "dying_rank.py", folder / "store", backend, mode, when, **environment) as ranks:
        last_words, _ = ranks[1].communicate(timeout=180)
        assert ranks[1].returncode == (0 if when == "never" else 17), last_words
        began = time.monotonic()
        output, _ = ranks[0].communicate(timeout=150)
        return ranks[0].returncode, output, time.monotonic() - began


def is_named(output: str) -> bool:
    return "RankError" in output and "ranks [1] do not answer" in output


@pytest.mark.slow  # a rehearsal of the script; test_failures.py has the same on ranks that are forked
def test_over_gloo(tmp_path: Path) -> None:
    status, output, _ = survivor(tmp_path, "gloo", "data", "backward")
    assert status not in (0, None)
    assert "finished" not in output
    assert is_named(output), output


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Built before anybody waits for anybody in seconds."""
    for mode in ("data", "model"):
        status, output, _ = survivor(tmp_path_factory.mktemp(mode), "nccl", mode, "never")
        assert status == 0, output
        assert "finished" in output, output


@pytest.mark.multigpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("environment", [{}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}], ids=["running ahead", "waiting host"])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["data", "model"])
def test_on_nccl_a_survivor_names_the_lost_rank_and_ends(
    mode: str, when: str, environment: dict[str, str], tmp_path: Path
) -> None:
    status, output, seconds = survivor(tmp_path, "nccl", mode, when, **environment)
    assert status not in (0, None)
    assert "finished" not in output
    assert is_named(output), output
    assert seconds < 30, output  # a collective's limit is 120 s
