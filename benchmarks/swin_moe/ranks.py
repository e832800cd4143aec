"""What one rank of a run does. Apart from the command line, so that spawned processes can import it."""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.swin_moe.bench import Bench, Effort
from benchmarks.swin_moe.experiments import RECORDED, experiments
from benchmarks.swin_moe.journal import Journal


def rank_main(rank: int, world: int, store: str, names: tuple[str, ...], options: argparse.Namespace) -> None:
    """One rank of one run: joins the others and runs the experiments in turn."""
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    else:
        torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=options.timeout),
            device_id=device if device.type == "cuda" else None,
        )
    effort = Effort(1, 1) if options.tiny else Effort()
    journal = Journal(options.out, options.tag, tuple({file for name in names for file in RECORDED[name]}))
    bench = Bench(
        rank,
        world,
        device,
        options.out,
        options.tiny,
        effort,
        options.end,
        options.tag,
        journal,
        frozenset(options.top_k),
    )
    for name in names:
        experiments(options.tiny, options.variant)[name][1](bench)
    if world > 1:
        dist.barrier(group=bench.host)
        dist.destroy_process_group()
