"""A partitioned step captured in a CUDA graph, collectives included."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("captured_step.py")


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("split", ["even", "uneven"])
@pytest.mark.parametrize("mode", ["data", "model", "mixed"])
def test_replays_see_fresh_tokens_and_weights(mode: str, split: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(SCRIPT), mode, split]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished") == 2
