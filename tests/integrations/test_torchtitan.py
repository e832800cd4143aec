"""torchtitan: its training loop with our experts, against its own. Skipped where torchtitan is missing, as in CI."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

SCRIPT = Path(__file__).with_name("titan_training.py")
OVERRIDE = "hexa_fx.integrations.torchtitan.hexa_grouped_experts"


def trained(folder: Path, steps: int, world: int, kind: str, *overrides: str) -> list[dict[str, Any]]:
    """What every rank prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    command, ranks = [sys.executable, str(SCRIPT), str(steps), kind, *overrides], []
    for rank in range(world):
        (folder / f"{rank}").mkdir(parents=True)
        given = {"cwd": folder / f"{rank}", "env": os.environ | place | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}}
        with (folder / f"{rank}" / "out").open("w") as out, (folder / f"{rank}" / "err").open("w") as err:
            ranks.append(subprocess.Popen(command, **given, stdout=out, stderr=err))
    try:
        ended = [process.wait(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(ended), (folder / "0" / "err").read_text()[-3000:]
    return [json.loads((folder / f"{rank}" / "out").read_text().strip().splitlines()[-1]) for rank in range(world)]


@pytest.mark.timeout(1050)  # two runs of at most 500 s
@pytest.mark.parametrize(
    ("world", "kind", "held"),
    [(1, "expert", [64, 768, 256]), (2, "expert", [32, 768, 256]), (2, "tensor", [64, 384, 256])],
)
def test_losses_of_20_steps_are_those_of_its_own_experts(
    world: int, kind: str, held: list[int], tmp_path: Path
) -> None:
    """On 2 ranks each has half of the experts, or half of every expert's channels."""
    own, ours = trained(tmp_path / "own", 20, world, kind), trained(tmp_path / "ours", 20, world, kind, OVERRIDE)
    for theirs, found in zip(own, ours):
        assert theirs["experts"] != found["experts"] == ["HexaGroupedExperts"]
        assert theirs["held"] == found["held"] == [held]
        assert found["dispatchers"] == ["AllToAllTokenDispatcher"]
        expected, losses = torch.tensor(theirs["losses"]), torch.tensor(found["losses"])
        assert len(losses) == 20
        assert losses[-1] < losses[0] - 0.5  # it learns
        # Both compute in bf16 and round at other places.
        torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0.0)


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
