"""Routing recorded and replayed over a partition, against one device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from test_mesh import CONFIG, build, data, difference, loss_of
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.routing import record_routing, replay_routing


def replayed(rank: int, world: int, kind: str, strategy: str) -> list[float]:
    """Differences of losses and gradients on replayed routing, after routers have changed, before and after a new plan."""
    model, whole, x = build(kind), build(kind), data(9)
    config = hexa_fx.PartitionConfig(tile=2)
    mesh = init_device_mesh("cpu", (world,))
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh, strategy=strategy, capacities=(1.0, 2.0), partition=config)
    hexa_fx.optimize_(whole, x, CONFIG)
    session, found = model.partition, []
    for capacities in (None, (3.0, 1.0)):
        session = session if capacities is None else session.replan(capacities=capacities)
        mine = split_batch(x, session.plan, rank)
        logs = []
        for net, rows in ((model, mine), (whole, x)):
            with record_routing(net) as log, torch.no_grad():
                net(rows)
            logs.append(log)
            for layer in net:
                layer.moe.router.weight.data.neg_()
        with replay_routing(model, logs[0]):
            loss = weighted_loss(session, loss_of(model, mine), len(mine))
            loss.backward()
        with replay_routing(whole, logs[1]):
            reference = loss_of(whole, x)
            reference.backward()
        sync_gradients(model, session)
        total = loss.detach().clone()
        dist.all_reduce(total)
        found += [float((total - reference).abs()), difference(model, whole, session, lambda p: p.grad)]
        model.zero_grad(), whole.zero_grad()
    session.close()
    return found


@pytest.mark.parametrize(("kind", "strategy"), [("stacked", "model"), ("listed", "data")])
def test_replay_over_a_partition(kind: str, strategy: Any) -> None:
    for found in run(2, replayed, kind, strategy):
        assert max(found) < 1e-12
