"""Wrong plans, missing ranks and crashes: an error that says what happened, on every surviving rank, in time."""

from __future__ import annotations

import dataclasses
import os
import time
from datetime import timedelta

import pytest
import torch
from harness import run, start
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own

from hexa_fx.distributed.collective_errors import explain_failure
from hexa_fx.distributed.groups import make_groups
from hexa_fx.plan import Plan

TWO = [KINDS["concat"]] * 2


def different_plans(rank, world):
    plan = make_plan(2, "uneven", MODES["model"][:2], TWO)
    if rank == 1:
        layer = dataclasses.replace(plan.layers[1], shards=(16, 8))
        plan = dataclasses.replace(plan, layers=(plan.layers[0], layer))
    install(Net(TWO), plan)


def test_different_plans_are_refused_on_every_rank():
    began = time.monotonic()
    outcomes = start(2, different_plans)
    assert time.monotonic() - began < 20
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


def missing(rank, world):
    if rank == 1:
        time.sleep(4)
        return
    install(Net(TWO), make_plan(2, "even", MODES["model"][:2], TWO), timeout=timedelta(seconds=2))


def test_missing_rank_is_an_error_in_time():
    began = time.monotonic()
    kind, text = start(2, missing, timeout=5)[0]
    assert time.monotonic() - began < 30
    assert kind == "error"
    assert "RankError: ranks [1] did not arrive within 2 s" in text


def crash(rank, world, plan, when):
    model = Net(TWO)
    installed = install(model, plan, timeout=timedelta(seconds=2))
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


@pytest.mark.parametrize(
    ("mode", "when"),
    [
        ("data", "forward"),
        pytest.param("model", "backward", marks=pytest.mark.slow),
        pytest.param("model", "forward", marks=pytest.mark.slow),
        pytest.param("data", "backward", marks=pytest.mark.slow),
    ],
)
def test_crash_is_named_by_survivors(mode, when):
    plan = make_plan(4, "uneven", MODES[mode][:2], TWO)
    began = time.monotonic()
    outcomes = start(4, crash, plan, when, timeout=2)
    assert time.monotonic() - began < 30
    assert outcomes[1][0] == "gone"
    for rank in (0, 2, 3):
        kind, text = outcomes[rank]
        assert kind == "error"
        assert "RankError" in text
        assert "[1]" in text


def hang(rank, world, plan):
    model = Net(TWO)
    install(model, plan, timeout=timedelta(seconds=2))
    x, _ = batch(sum(plan.batch))
    if rank == 1:
        time.sleep(8)
        return
    with torch.no_grad():
        model(x[own(plan.batch, rank)])


def test_hanging_rank_is_named():
    outcomes = start(2, hang, make_plan(2, "uneven", MODES["data"][:2], TWO), timeout=2)
    kind, text = outcomes[0]
    assert kind == "error"
    assert "RankError" in text
    assert "ranks [1] do not answer" in text


def told(rank, world):
    groups = make_groups()
    return str(explain_failure(RuntimeError("gloo timed out"), f"place {rank}", groups))


def test_different_collectives_are_told():
    first, second = run(2, told)
    assert (
        "failed in place 0 on rank 0: all ranks answer, so they issued different collectives; rank 1 was in place 1."
        in first
    )
    assert "rank 0 was in place 0" in second


def test_plan_text_of_another_job_is_recognised():
    plan = make_plan(2, "uneven", MODES["model"][:2], TWO)
    assert Plan.from_json(plan.to_json()).fingerprint == plan.fingerprint
