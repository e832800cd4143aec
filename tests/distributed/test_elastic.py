"""One training run over several plans and numbers of ranks; wrong plans, missing ranks and crashes are errors in time."""

import dataclasses
import os
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run, start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own
from test_mesh import CONFIG, build, difference, loss_of
from test_mesh import data as tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx.distributed import checkpoint, profile
from hexa_fx.distributed.async_checkpoint import async_save
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.distributed.pace import Pace
from hexa_fx.errors import PlanError, RankError
from hexa_fx.passes.partition.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape, Plan


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


class Job:
    """The training loop: a model under a plan, and one device's that makes the same steps from the beginning."""

    def __init__(self, rank: int, world: int, kind: str, strategy: Any, capacities: Any, steps: int = 0) -> None:
        self.rank, self.made, self.found = rank, 0, [0.0]
        self.model, self.whole = build(kind), build(kind)
        if steps:
            for parameter in self.model.parameters():
                nn.init.zeros_(parameter)
        given = {"strategy": strategy, "capacities": capacities, "partition": PartitionConfig(tile=1, batch=11)}
        hexa_fx.optimize_(self.model, tokens(11), CONFIG, mesh=init_device_mesh("cpu", (world,)), **given)
        self.ours, self.theirs = optimizer_of(self.model), optimizer_of(self.whole)
        for _ in range(steps):
            self.reference()

    def reference(self) -> float:
        loss = loss_of(self.whole, self.batch())
        loss.backward()
        self.theirs.step()
        self.theirs.zero_grad()
        self.made += 1
        return float(loss.detach())

    def batch(self) -> torch.Tensor:
        return tokens(11) * (1 + 0.1 * self.made)

    def step(self) -> None:
        session = self.model.partition
        mine = split_batch(self.batch(), session.plan, self.rank)
        loss = weighted_loss(session, loss_of(self.model, mine), len(mine))
        loss.backward()
        sync_gradients(self.model, session)
        self.ours.step()
        self.ours.zero_grad()
        total = float(session.sum(loss.detach()))
        self.found.append(abs(total - self.reference()))
        self.found.append(difference(self.model, self.whole, session, lambda p: p.detach()))


def begun(rank: int, world: int, kind: str, folder: str) -> Any:
    """A plan, another one, and a device that has become slow, with checkpoints that are written meanwhile."""
    job = Job(rank, world, kind, "data", None)
    job.step()
    first = job.model.partition
    saving = async_save(f"{folder}/one", job.model, first, job.ours)
    second = first.replan([job.ours], capacities=(1.0, 3.0), strategy="model")
    assert job.model.partition is second
    assert second.plan.fingerprint in str(job.model.report)
    assert first.plan.fingerprint not in str(job.model.report)
    with pytest.raises(PlanError, match="to or from 'fsdp'"):
        second.replan([job.ours], capacities=None, strategy="fsdp")
    job.step()
    again = async_save(f"{folder}/two", job.model, second, job.ours)
    assert saving.done
    assert checkpoint.is_complete(f"{folder}/one")
    job.step()  # what is being written does not see it
    again.wait()
    plans = [first.plan, second.plan]

    timed = profile._seconds
    profile._seconds = lambda *_: 3.0 - 2 * rank
    try:
        pace = second.pace(min_seconds=0.001)
    finally:
        profile._seconds = timed
    assert pace.seconds == (3.0, 1.0)
    assert pace.gain > 0.6
    assert "rank 0 has become 9.00 times as slow" in str(pace)
    third = second.replan([job.ours], capacities=pace.seconds)
    job.step()
    plans.append(third.plan)
    third.close()
    return job.found, plans


def continued(rank: int, world: int, kind: str, folder: str) -> Any:
    """Other numbers of devices of other speeds take up the second checkpoint."""
    job = Job(rank, world, kind, {"0": "model", "1": "data"}, [1.0, 2.0, 4.0, 1.5][:world], steps=2)
    checkpoint.load(f"{folder}/two", job.model, job.model.partition, job.ours)
    job.found.append(difference(job.model, job.whole, job.model.partition, lambda p: p.detach()))
    job.step()
    job.step()
    job.model.partition.close()
    return job.found


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [("stacked", (4,)), *(pytest.param(k, (3, 1), marks=pytest.mark.slow) for k in ("listed", "separate"))],
)
def test_a_run_over_several_plans_is_one_run(kind: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    for found, plans in run(2, begun, kind, str(tmp_path), timeout=60):
        assert max(found) < 1e-12, found
        assert [layer.shards for layer in (plan.layers[0] for plan in plans)] == [(6, 6), (9, 3), (3, 9)]
        assert [plan.layers[0].mode for plan in plans] == ["data_centric", "model_centric", "model_centric"]
        assert [plan.batch for plan in plans] == [(6, 5), (9, 2), (3, 8)]
    for world in worlds:
        for found in run(world, continued, kind, str(tmp_path), timeout=60):
            assert max(found) < 1e-12, found


def refused(rank: int, world: int) -> Any:
    """What a new plan could not bring along, and steps that were made for the old one. The old plan goes on."""
    job = Job(rank, world, "separate", "model", None)
    job.step()
    session = job.model.partition
    step = session.graphed(job.step)
    step()
    with pytest.raises(PlanError, match="AdamW has state of the experts and was not given"):
        session.replan(capacities=(1.0, 3.0))
    ours = {**job.ours.state}
    if rank:
        job.ours.state.pop(session.shards[0].parameter)
    with pytest.raises(PlanError, match=r"the state of .* in optimizers is .* and on rank"):
        session.replan([job.ours], capacities=(1.0, 3.0))
    job.ours.state.update(ours)
    factored = torch.optim.SGD([session.shards[0].parameter])
    session.shards[0].parameter.grad = torch.zeros_like(session.shards[0].parameter)
    factored.step()
    factored.state[session.shards[0].parameter]["row_sum"] = session.shards[0].parameter.sum(-1)
    with pytest.raises(PlanError, match="keeps 'row_sum'"):
        session.replan([job.ours, factored], capacities=(1.0, 3.0))
    factored.state.clear()
    job.ours.zero_grad()
    step()
    session.replan([job.ours], capacities=(1.0, 3.0))
    with pytest.raises(PlanError, match="belongs to a plan that was closed or exchanged"):
        step()
    job.step()
    job.model.partition.close()
    return job.found


def test_what_replan_refuses() -> None:
    assert max(map(max, run(2, refused))) < 1e-12


def lost(rank: int, world: int) -> str:
    model, x = build("stacked"), tokens(6)
    mesh, config = init_device_mesh("cpu", (world,)), PartitionConfig(tile=2)
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh, strategy="data", capacities=None, partition=config)
    if rank == 1:
        os._exit(1)
    with pytest.raises(RankError, match="failed in the exchange of plans on rank 0") as error:
        model.partition.replan(capacities=(1.0, 3.0))
    return str(error.value)


def test_a_rank_that_is_lost_before_a_new_plan() -> None:
    (kind, said), (other, _) = start(2, lost)
    assert (kind, other) == ("ok", "gone"), said


def test_pace_weighs_what_other_shares_would_save() -> None:
    shape = ExpertShape(8, 64, 256, 3, 2)
    plan = plan_layers({"a": shape}, [1.0, 1.0], "model", PartitionConfig(batch=8))
    same, slow = Pace.of(plan, (2.0, 2.0)), Pace.of(plan, (2.0, 6.0))
    assert (same.gain, same.slower) == (0.0, (1.0, 1.0))
    assert slow.gain == pytest.approx(0.5)  # 192 and 64 channels take half as long as 128 on the slow one
    assert slow.slower == (1.0, 3.0)
    weighted = dataclasses.replace(plan, capacities=(1.0, 3.0), batch=(6, 2))
    weighted = dataclasses.replace(weighted, layers=(dataclasses.replace(plan.layers[0], mode="data_centric"),))
    assert Pace.of(weighted, (1.0, 3.0)).gain == 0.0
    assert Pace.of(weighted, (1.0, 1.0)).gain == pytest.approx(1 / 3)


TWO = [KINDS["concat"]] * 2


def different_plans(rank, world):
    plan = make_plan(2, "uneven", MODES["model"][:2], TWO)
    if rank == 1:
        layer = dataclasses.replace(plan.layers[1], shards=(16, 8))
        plan = dataclasses.replace(plan, layers=(plan.layers[0], layer))
    install(Net(TWO), plan)


def test_different_plans_are_refused_on_every_rank():
    outcomes = start(2, different_plans)
    prints = [make_plan(2, "uneven", MODES["model"][:2], TWO).fingerprint, "fingerprints"]
    for kind, text in outcomes:
        assert kind == "error"
        assert "PlanError: ranks hold different plans" in text
        assert all(part in text for part in prints)


def other_world(rank, world):
    install(Net(TWO), make_plan(4, "even", MODES["model"][:2], TWO))


def test_plan_for_another_number_of_ranks():
    for kind, text in start(2, other_world):
        assert kind == "error"
        assert "the plan is for 4 ranks, the mesh has 2" in text


def other_model(rank, world):
    install(Net(TWO[:1]), make_plan(2, "even", MODES["model"][:2], TWO))


def test_plan_for_another_model():
    for kind, text in start(2, other_model):
        assert kind == "error"
        assert "the plan is for layers ['layers.0', 'layers.1']" in text


@contextmanager
def rank_1_stays_away(rank):
    """Rank 1 does nothing until rank 0 has waited for it in vain. Gives if this is rank 0."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gave up"], timedelta(seconds=60))
    try:
        yield rank == 0
    finally:
        store.set("gave up", "")


def missing(rank, world):
    with rank_1_stays_away(rank) as waits:
        if waits:
            install(Net(TWO), make_plan(2, "even", MODES["model"][:2], TWO), timeout=timedelta(seconds=2))


def test_missing_rank_is_an_error_in_time():
    kind, text = start(2, missing)[0]
    assert kind == "error"
    assert "RankError: ranks [1] did not arrive within 2 s" in text


def crash(rank, world, plan, when):
    model = Net(TWO)
    installed = install(model, plan)
    x, target = batch(sum(plan.batch))
    mine = own(plan.batch, rank)
    loss_sum(model(x[mine]), target[mine]).backward()
    if when == "forward" and rank == 1:
        os._exit(17)
    loss = loss_sum(model(x[mine]), target[mine])
    if when == "backward" and rank == 1:
        os._exit(17)
    loss.backward()
    installed.session.join("after the step")


@pytest.mark.parametrize(("mode", "when"), [("data", "forward"), ("model", "backward")])
def test_a_crash_is_an_error_on_survivors(mode, when):
    outcomes = start(2, crash, make_plan(2, "uneven", MODES[mode][:2], TWO), when)
    assert outcomes[1][0] == "gone"
    kind, text = outcomes[0]
    assert kind == "error"
    assert "RankError: a collective failed in" in text
    assert when in text


def hang(rank, world, plan):
    model = Net(TWO)
    session = install(model, plan, timeout=timedelta(seconds=2)).session
    x, _ = batch(sum(plan.batch))
    with rank_1_stays_away(rank) as waits:
        if waits:
            with session.guard("a step", barrier=True):
                model(x[own(plan.batch, rank)])


def test_a_hanging_rank_is_named_by_a_barrier():
    kind, text = start(2, hang, make_plan(2, "uneven", MODES["data"][:2], TWO))[0]
    assert kind == "error"
    assert "RankError: not all ranks arrived before a step" in text
    assert "1 failed to pass monitoredBarrier" in text


def test_plan_text_of_another_job_is_recognised():
    plan = make_plan(2, "uneven", MODES["model"][:2], TWO)
    assert Plan.from_json(plan.to_json()).fingerprint == plan.fingerprint
