"""torchtitan: its training loop with our experts, against its own. Skipped where torchtitan is missing, as in CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

SCRIPT = Path(__file__).with_name("titan_training.py")
OVERRIDE = "hexa_fx.integrations.torchtitan.hexa_grouped_experts"


def trained(folder: Path, steps: int, *overrides: str) -> dict[str, Any]:
    folder.mkdir()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29611"}
    command = [sys.executable, str(SCRIPT), str(steps), *overrides]
    done = subprocess.run(command, cwd=folder, env=os.environ | place, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.timeout(1050)  # two runs of at most 500 s
def test_losses_of_20_steps_are_those_of_its_own_experts(tmp_path: Path) -> None:
    own, ours = trained(tmp_path / "own", 20), trained(tmp_path / "ours", 20, OVERRIDE)
    assert own["experts"] != ours["experts"] == ["HexaGroupedExperts"]
    theirs, losses = torch.tensor(own["losses"]), torch.tensor(ours["losses"])
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5  # it learns
    # Both compute in bf16 and round at other places.
    torch.testing.assert_close(losses, theirs, rtol=2e-2, atol=2e-2)


def test_experts_alone_with_rows_that_nobody_sent() -> None:
    from torchtitan.models.common.moe import GroupedExperts

    from hexa_fx.integrations.torchtitan import HexaGroupedExperts

    torch.manual_seed(0)
    sizes = {"dim": 16, "hidden_dim": 24, "num_experts": 4}
    own, ours = GroupedExperts(GroupedExperts.Config(**sizes)), HexaGroupedExperts(HexaGroupedExperts.Config(**sizes))
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(own.state_dict())
    x, counts = torch.randn(20, 16), torch.tensor([5, 0, 7, 8])
    expected, y = own(x, counts), ours(x, counts)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    x[15:] = float("nan")
    y = ours(x, torch.tensor([5, 0, 7, 3]))
    torch.testing.assert_close(y[:15], expected[:15], rtol=2e-2, atol=2e-2)
    assert not y[15:].any()
