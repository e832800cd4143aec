"""Wrong plans, missing ranks and crashes: an error that says what happened, on every surviving rank, in time."""

import dataclasses
import os
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own

from hexa_fx.plan import Plan

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
