"""Tools that do not know of slices: what they mix is refused a forward later, what they let drift apart is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging import utils as averages
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

from hexa_fx.distributed import sampled_agreement
from hexa_fx.distributed.gradients import clip_grad_norm_, sync_gradients, unscale_
from hexa_fx.errors import PlanError

ONE = [KINDS["concat"]]
Step = Callable[[Net, Any, torch.optim.Optimizer], None]


def adam(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def zero(model: Net) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def post_local(model: Net) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(adam(model), averagers.PeriodicModelAverager(period=2))


def right(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    sync_gradients(model, session)
    clip_grad_norm_(model, session, 0.1)
    optimizer.step()


def summed_by_hand(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def averaged(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    right(model, session, optimizer)
    averages.average_parameters(model.parameters(), dist.group.WORLD)


def broadcast(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    right(model, session, optimizer)


def clipped_by_torch(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    sync_gradients(model, session)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def not_synced(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def overflowed(model: Net, session: Any, optimizer: torch.optim.Optimizer, ours: bool = False) -> None:
    """An overflow in the experts of one rank, in the second step."""
    sync_gradients(model, session)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    if dist.get_rank() == 1 and optimizer.state:
        model.layers[0].w1.grad[0, 0, 0] = torch.inf
    if ours:
        unscale_(scaler, optimizer, session)
    scaler.step(optimizer)


def overflowed_and_told(model: Net, session: Any, optimizer: torch.optim.Optimizer) -> None:
    overflowed(model, session, optimizer, True)


CASES: dict[str, tuple[Step, Callable[[Net], Any], str, str]] = {
    "right": (right, adam, "", ""),
    "zero": (right, zero, "ranks [0, 1] have become equal", ""),
    "post-local": (right, post_local, "have become equal", ""),
    "averaged": (averaged, adam, "have become equal", ""),
    "broadcast": (broadcast, adam, "have become equal", ""),
    "summed": (summed_by_hand, adam, "the gradients of the slices of 'layers.0.w1'", ""),
    "clipped": (clipped_by_torch, adam, "", "clip_grad_norm_ of hexa_fx"),
    "not synced": (not_synced, adam, "", "call sync_gradients before"),
    "overflowed": (overflowed, adam, "", "call unscale_"),
    "overflowed, told": (overflowed_and_told, adam, "", ""),
    "same channels": (right, adam, "", ""),
}


def repeat_channels(model: Net) -> None:
    """As models are grown: both ranks' slices are equal, their gradients too, and nobody mixed them."""
    for layer in model.layers:
        for weight, shape, dim in ((layer.w1, (4, 2, 2, 12, 8), 2), (layer.w2, (4, 8, 2, 12), 2)):
            halves = weight.data.view(shape)
            halves.select(dim, 1).copy_(halves.select(dim, 0))


def outcomes(rank: int, world: int, plan: Any, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Of every case, the error of four steps and what was said."""
    found = {}
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    for name in names:
        step, make, _, _ = CASES[name]
        model, said, error = Net(ONE), [], ""
        if name == "same channels":
            repeat_channels(model)
        session = install(model, plan).session
        session.follow(model)
        optimizer = make(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampled_agreement.log, "warning", lambda text, *args, said=said: said.append(text % args))
            try:
                for _ in range(4):
                    loss_sum(model(x[mine]), target[mine]).backward()
                    step(model, session, optimizer)
                    model.zero_grad()
            except PlanError as refusal:
                error = str(refusal)
        found[name] = (error, "\n".join(said))
        session.close()
    return found


QUICK = ("right", "zero", "summed", "clipped", "overflowed")


@pytest.mark.parametrize(
    ("mode", "names"),
    [("model", QUICK), *(pytest.param(mode, tuple(CASES), marks=pytest.mark.slow) for mode in ("data", "model"))],
)
def test_what_is_refused_and_what_is_said(mode: str, names: tuple[str, ...]) -> None:
    for found in run(2, outcomes, make_plan(2, "even", MODES[mode][:1], ONE), names):
        for name, (error, said) in found.items():
            _, _, refused, told = CASES[name]
            assert (refused in error, bool(error)) == (True, bool(refused)), (name, error)
            assert (told in said, said.count("hexa_fx")) == (True, int(bool(told))), (name, said)


def test_unequal_slices_that_one_rank_has_sent() -> None:
    """Gloo takes fewer numbers than there is room for."""
    for found in run(2, outcomes, make_plan(2, "uneven", MODES["model"][:1], ONE), ("right", "broadcast")):
        assert [bool(error) for error, _ in found.values()] == [False, True]


def loaded(rank: int, world: int, plan: Any) -> str:
    """What a rank's own weights of before do, and those of another model; then the error of another rank's, without metadata."""
    model = Net(ONE)
    session = install(model, plan).session
    session.follow(model)
    optimizer = adam(model)
    x, target = batch(sum(plan.batch))

    def step() -> None:
        loss_sum(model(x[own(plan.batch, rank)]), target[own(plan.batch, rank)]).backward()
        right(model, session, optimizer)
        model.zero_grad()

    kept = {name: value.clone() for name, value in model.state_dict().items()}
    step(), step()
    model.load_state_dict(kept)
    model.load_state_dict({name: torch.randn_like(value) * 0.01 for name, value in kept.items()})
    model.load_state_dict(kept)
    step()
    of_all: list[Any] = [None] * world
    dist.all_gather_object(of_all, kept)
    error = ""
    try:
        model.load_state_dict(of_all[1 - rank])
    except PlanError as refusal:
        error = str(refusal)
    session.close()
    return error


def test_slices_of_another_rank_that_say_not_whose_they_are() -> None:
    for error in run(2, loaded, make_plan(2, "even", MODES["model"][:1], ONE)):
        assert "that was loaded is a slice of another rank" in error
