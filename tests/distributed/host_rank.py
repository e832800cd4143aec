"""One rank of a job on two hosts.   torchrun's variables; then WHAT as argument.

``links`` measures what a rank receives from its own host and from the other. ``axes`` times a training step whose partition stays
within a host, with replicas on the other, against one over both.
"""

import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from test_mesh import CONFIG, build, data, loss_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hexa_fx
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.distributed.groups import make_groups
from hexa_fx.distributed.profile import measure_bandwidth
from hexa_fx.passes.partition.plan_layers import PartitionConfig

PATIENCE = timedelta(seconds=20)


def main(what: str) -> None:
    dist.init_process_group("gloo", timeout=PATIENCE)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("host", "device"))
    {"links": links, "axes": axes}[what](mesh)
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def links(mesh: DeviceMesh) -> None:
    for name in ("device", "host"):
        bandwidth, _ = measure_bandwidth(make_groups(mesh[name]), torch.device("cpu"), nbytes=2**22)
        say(f"{name} {bandwidth:.0f}")


def axes(mesh: DeviceMesh) -> None:
    for name, axis, replicas in (("within", mesh["device"], mesh["host"]), ("over both", None, None)):
        model, x = build("stacked"), data(64)
        config = PartitionConfig(tile=1, batch=32 if replicas else 64)
        given = {"mesh": axis or dist.group.WORLD, "data_mesh": replicas, "strategy": "model", "capacities": None}
        hexa_fx.optimize_(model, x, CONFIG, **given, partition=config)
        session = model.partition
        mine = x.split(32)[mesh["host"].get_local_rank()] if replicas else x
        mine = split_batch(mine, session.plan, session.rank)
        seconds, losses = [], []
        for _ in range(6):
            model.zero_grad()
            begin = time.perf_counter()
            loss = weighted_loss(session, loss_of(model, mine), len(mine))
            loss.backward()
            sync_gradients(model, session)
            seconds.append(time.perf_counter() - begin)
            losses.append(float(session.sum(loss.detach())))
        session.close()
        want = float(loss_of(build("stacked"), x).detach())
        assert abs(losses[0] - want) < 1e-12, (losses, want)
        say(f"{name} {statistics.median(seconds):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
