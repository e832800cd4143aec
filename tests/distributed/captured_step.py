"""One rank of a job whose partitioned step is captured in a CUDA graph.   torchrun's variables, then MODE and SPLIT as arguments.

Replays with other tokens, other targets and other weights must give what the step gives when it is launched by the host.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own
from torch import Tensor

STEPS = 3


def main(mode: str, split: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60), device_id=device)
    kinds = [KINDS["concat"], KINDS["mlp"], KINDS["split"]]
    plan = make_plan(world, split, MODES[mode], kinds, slots=2, static=True)
    model = Net(kinds, torch.float32).to(device)
    session = install(model, plan).session
    examples = [_own(plan.batch, rank, device, seed) for seed in range(STEPS + 1)]
    x, target = (t.clone() for t in examples[0])

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_sum(model(x), target)
        loss.backward()
        return loss.detach()

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    gradients = [p.grad for p in model.parameters()]
    for fresh in examples[1:]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
            x.copy_(fresh[0])
            target.copy_(fresh[1])
        graph.replay()
        got = [captured.clone(), *(None if g is None else g.clone() for g in gradients)]
        session.invalidate()
        want = [step(), *(p.grad for p in model.parameters())]
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert any(g is not None and g.any() for g in want[1:])
    torch.cuda.synchronize()
    graph.reset()  # a communicator ends only after the graphs that use it
    session.join("after the steps")
    print("finished", flush=True)
    dist.destroy_process_group()


def _own(shares: tuple[int, ...], rank: int, device: torch.device, seed: int) -> list[Tensor]:
    x, target = (t[own(shares, rank)].to(device, torch.float32) for t in batch(sum(shares)))
    return [x + 0.1 * seed, target - 0.1 * seed]


if __name__ == "__main__":
    main(*sys.argv[1:])
