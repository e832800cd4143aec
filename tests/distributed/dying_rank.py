"""One rank of a job in which rank 1 ends in the middle of a step.   Arguments: STORE RANK BACKEND MODE WHEN; STORE is a new file.

WHEN is forward, backward, or never: then nobody ends early. There is time to build kernels, to load them and to connect: on a
busy machine one rank starts many seconds behind the other. What ends a survivor is the loss, long before any of these limits.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own

PATIENCE = timedelta(seconds=120)


def main(store: str, rank: int, backend: str, mode: str, when: str) -> None:
    world = 2
    cuda = backend == "nccl"
    dtype = torch.float32 if cuda else torch.float64
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
        device_id=device if cuda else None,
    )
    dist.barrier()
    kinds = [KINDS["concat"]] * 2
    plan = make_plan(world, "uneven", MODES[mode][:2], kinds)
    model = Net(kinds, dtype).to(device)
    # over Gloo, where nobody watches, a survivor waits as long for the marks of the others
    installed = install(model, plan, timeout=PATIENCE if cuda else timedelta(seconds=3))
    x, target = (t[own(plan.batch, rank)].to(device, dtype) for t in batch(sum(plan.batch)))
    loss_sum(model(x), target).backward()
    for _ in range(3):
        if when == "forward" and rank == 1:
            os._exit(17)
        loss = loss_sum(model(x), target)
        if when == "backward" and rank == 1:
            os._exit(17)
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
    installed.session.join("after the steps")
    print("finished", flush=True)


if __name__ == "__main__":
    store, rank, *rest = sys.argv[1:]
    main(store, int(rank), *rest)
