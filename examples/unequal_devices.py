"""Two processes, one twice as fast as the other, train one model; loss and weights are those of a single process.

    torchrun --nproc-per-node 2 examples/unequal_devices.py

Runs on CPUs over Gloo. On GPUs only the mesh changes: ``init_device_mesh("cuda", (world,))``, and ``capacities="measure"`` (the
default) has every device run the operator to find out how fast it is.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from handwritten_moe import Model
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx.distributed.data import split_batch
from hexa_fx.distributed.gradients import sync_gradients, weighted_loss
from hexa_fx.passes.partition.plan_layers import PartitionConfig

SECONDS = (1.0, 2.0)
"""How long each device takes for the same work."""


def main() -> None:
    if not dist.is_torchelastic_launched():
        sys.exit("several processes are needed: torchrun --nproc-per-node 2 examples/unequal_devices.py")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = Model(), torch.randn(5, 6, 20, 32)  # 5 steps of 6 samples
    alone = copy.deepcopy(model)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # experts are cut every 64 channels, as suits kernels; these have 48
    narrow = PartitionConfig(tile=16)
    hexa_fx.optimize_(model, data[0], mesh=mesh, strategy="model", capacities=SECONDS, partition=narrow)
    session = model.partition
    if session.rank == 0:
        print(session.plan.describe())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data:
        mine = split_batch(batch, session.plan, session.rank)  # B_i samples, by speed
        optimizer.zero_grad()
        loss = weighted_loss(session, F.mse_loss(model(mine), torch.zeros_like(mine)), len(mine))
        loss.backward()
        sync_gradients(model, session)
        optimizer.step()
        dist.all_reduce(loss.detach())

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in data:
        reference.zero_grad()
        expected = F.mse_loss(alone(batch), torch.zeros_like(batch))
        expected.backward()
        reference.step()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-4, atol=1e-6)
    if session.rank == 0:
        sizes = {tuple(p.shape) for name, p in model.named_parameters() if "gate" in name}
        print(f"this rank keeps expert gates of {sizes}, {len(mine)} of {data.shape[1]} samples")
        print(f"loss {loss.item():.6f}, of one process {expected.item():.6f}: equal")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
