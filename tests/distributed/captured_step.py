"""One rank of a job whose partitioned step is a CUDA graph.   torchrun's variables, then MODE and SPLIT as arguments.

Replays with other tokens, other targets, other weights and random numbers must give what the step gives when it is launched by the
host. Without a GPU nothing is recorded and everything else is the same.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from models import KINDS, MODES, Net, batch, install, loss_sum, make_plan, own
from torch import Tensor

from hexa_fx.distributed.session import PartitionSession

STEPS = 6
CUDA = torch.cuda.is_available()
Step = Callable[[Tensor, Tensor], Tensor]


def main(mode: str, split: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=device if CUDA else None)
    kinds = [KINDS["concat"], KINDS["mlp"], KINDS["split"]]
    static = mode == "mixed"  # else hosts exchange numbers of tokens, and a recording takes those of the step before
    plan = make_plan(world, split, MODES[mode], kinds, slots=2, static=static)
    model = Net(kinds, torch.float32).to(device)
    session = install(model, plan).session
    examples = [_own(plan.batch, rank, device, seed) for seed in range(STEPS + 1)]

    def step(x: Tensor, target: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_sum(model(x), target)
        loss.backward()
        return loss.detach()

    fresh_values(model, session, step, examples)
    print("fresh tokens and weights: equal", flush=True)
    random_numbers(model, session, examples[0])
    print("random numbers: equal", flush=True)
    values_read_back(model, session, step, examples[0])
    print("a step that reads back: runs as it is", flush=True)
    if CUDA:
        torch.cuda.synchronize()
    session.join("after the steps")
    session.close()  # a communicator ends only after the graphs that use it
    print("finished", flush=True)
    dist.destroy_process_group()


def fresh_values(model: Net, session: PartitionSession, step: Step, examples: list[list[Tensor]]) -> None:
    graphed = session.graphed(step, warmup=1)
    for x, target in examples:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        session.invalidate()
        got = [graphed(x, target), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        session.invalidate()
        want = [step(x, target), *(p.grad for p in model.parameters())]
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert any(g is not None and g.any() for g in want[1:])
    assert not CUDA or graphed.replays >= 3, (graphed.replays, graphed.reason)


def random_numbers(model: Net, session: PartitionSession, example: list[Tensor]) -> None:
    def noisy(x: Tensor, target: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_sum(torch.dropout(model(x), 0.5, True), target)
        loss.backward()
        return loss.detach()

    graphed, losses = session.graphed(noisy, warmup=1), []
    for run in (noisy, graphed):
        torch.manual_seed(7)
        losses.append([float(run(*example)) for _ in range(5)])
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=1e-6)
    assert len(set(losses[0])) == 5 or not len(example[0])
    assert not CUDA or graphed.replays >= 3, (graphed.replays, graphed.reason)


def values_read_back(model: Net, session: PartitionSession, step: Step, example: list[Tensor]) -> None:
    seen = []

    def reads(x: Tensor, target: Tensor) -> Tensor:
        loss = step(x, target)
        seen.append(float(loss))
        return loss

    graphed = session.graphed(reads, warmup=1)
    got = [float(graphed(*example)) for _ in range(4)]
    assert got == seen[-4:]
    torch.testing.assert_close(torch.tensor(got), torch.tensor([float(step(*example))] * 4), rtol=1e-5, atol=1e-6)
    assert graphed.replays == 0
    assert ("cannot be recorded" if CUDA else "has no graphs") in graphed.reason


def _own(shares: tuple[int, ...], rank: int, device: torch.device, seed: int) -> list[Tensor]:
    x, target = (t[own(shares, rank)].to(device, torch.float32) for t in batch(sum(shares)))
    return [x + 0.1 * seed, target - 0.1 * seed]


if __name__ == "__main__":
    main(*sys.argv[1:])
