"""Ranks that do not make the same forwards and backwards: a sentence on all of them, before anything else pairs up."""

from __future__ import annotations

import pytest
import torch
from harness import start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan

from hexa_fx.distributed.gradients import loss_weight, sync_gradients
from hexa_fx.errors import RankError

TWO = [KINDS["concat"]] * 2


def apart(rank: int, world: int, mode: str, what: str) -> str:
    """What both ranks are told when rank 1 makes a forward more than rank 0."""
    model = Net(TWO)
    session = install(model, make_plan(world, "even", MODES[mode][:2], TWO, slots=2)).session
    session.follow(model)
    x, target = batch(3)
    loss_sum(model(x), target).backward()
    loss = loss_sum(model(x), target)
    others = {
        "backward": loss.backward,
        "count": lambda: loss_weight(session, 3),
        "sync": lambda: sync_gradients(model, session),
    }
    with pytest.raises(RankError, match="have come apart") as error, torch.set_grad_enabled(rank == 0):
        others[what]() if rank == 0 else model(x)
    return str(error.value)


@pytest.mark.parametrize("mode", ["data", "model"])
@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("backward", "a backward"),
        ("count", "the count of a step's samples or tokens"),
        ("sync", "the sum of a step's gradients"),
    ],
)
def test_a_forward_more_on_one_rank(mode: str, what: str, place: str) -> None:
    forward = "the beginning of a forward" if mode == "data" else "the forward of a layer"
    for kind, said in start(2, apart, mode, what):
        assert kind == "ok", said
        assert f"ranks [0] at {place}, ranks [1] at {forward}" in said
        assert "synced_gpus=True" in said
