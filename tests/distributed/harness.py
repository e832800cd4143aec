"""Runs a function on several processes over Gloo and judges by what each of them reported, not by exit codes."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# A server that has imported torch forks the ranks: a launch costs tenths of a second instead of seconds.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.fsdp",
        "torch.optim",
        "torch._dynamo",
        "hexa_fx.passes.partition",
        "hexa_fx.runtime.distributed.checkpoint",
        "hexa_fx.runtime.distributed.gradients",
        "hexa_fx.api",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "models",
    ]
)


class Failed(Exception):
    """What went wrong on a rank, as text."""


def _rank(
    rank: int, world: int, store: str, timeout: float, pipe: Connection, fn: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        result = fn(rank, world, *args)
        pipe.send(("ok", result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)


def start(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """One outcome a rank: ("ok", value), ("error", text) or ("gone", None)."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(rank, world, f"{folder}/store", timeout, theirs, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        outcomes = [_receive(pipe, timeout + 60) for pipe in pipes]
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return outcomes


def _receive(pipe: Connection, seconds: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(seconds) else ("hang", None)
    except EOFError:
        return ("gone", None)


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """The value of every rank; raises `Failed` with all errors if a rank did not report one."""
    outcomes = start(world, fn, *args, timeout=timeout)
    bad = [f"rank {rank}: {kind}\n{value}" for rank, (kind, value) in enumerate(outcomes) if kind != "ok"]
    if bad:
        raise Failed("\n".join(bad))
    return [value for _, value in outcomes]
