"""One rank of a job in which rank 1 ends in the middle of a step.   torchrun's variables, then BACKEND MODE WHEN as arguments.

WHEN is forward, backward, or never: then nobody ends early, and there is time to build kernels.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own


def main(backend: str, mode: str, when: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = backend == "nccl"
    seconds, dtype = (10, torch.float32) if cuda else (3, torch.float64)
    timeout = timedelta(seconds=120 if when == "never" else seconds)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, device_id=device if cuda else None
    )
    kinds = [KINDS["concat"]] * 2
    plan = make_plan(world, "uneven", MODES[mode][:2], kinds)
    model = Net(kinds, dtype).to(device)
    installed = install(model, plan, timeout=timeout)
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
    main(*sys.argv[1:])
