"""Runs a function on several processes over Gloo and judges by what each of them reported, not by exit codes.

`run` keeps its processes for the next test; `start` takes fresh ones, for tests in which ranks fail. `scripts` is the exception:
its processes are scripts of their own, judged by exit codes and by what they print.
"""

import atexit
import gc
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A server that has imported torch forks the ranks: a launch costs tenths of a second instead of seconds.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("pytest", "torch.distributed.fsdp", "torch.optim", "torch._dynamo", "hexa_fx.passes.partition.apply"),
        *("hexa_fx.distributed.checkpoint", "hexa_fx.distributed.gradients", "hexa_fx.api", "models"),
        *(f"transformers.models.{name}.modeling_{name}" for name in ("mixtral", "qwen3_moe")),
    ]
)


class Failed(Exception):
    """What went wrong on a rank, as text."""


def _freeze() -> None:
    """What was imported need not be collected, nor counted in each `hexa_fx.optimize_`: both take longer than most tests run."""
    gc.freeze()
    gc.get_freeze_count = lambda: 1


def _rank(
    rank: int, world: int, store: str, timeout: float, pipe: Connection, fn: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _freeze()
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


@contextmanager
def scripts(
    world: int, name: str, store: Path, *arguments: str, **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """A script of this folder as WORLD processes, `NAME STORE RANK ARGUMENTS`. STORE is a new file, where they meet."""
    command = [sys.executable, str(Path(__file__).with_name(name)), str(store)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()


class _Pool:
    """Ranks of one process group that run one function after the other."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world):
            mine, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, world, f"{self._folder.name}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], args: Any, seconds: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((fn, args))
        end = time.monotonic() + seconds
        return [_receive(pipe, max(0.1, end - time.monotonic())) for pipe in self._pipes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._folder.cleanup()


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    _freeze()
    while True:
        fn, args = pipe.recv()
        try:
            pipe.send(("ok", fn(rank, world, *args)))
        except BaseException as error:
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        gc.collect()  # models and their patched forwards refer to each other


_pools: dict[int, _Pool] = {}


def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


atexit.register(_close_pools)


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """The value of every rank; raises `Failed` with all errors if a rank did not report one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = _pools.pop(world, None) or _Pool(world)
    outcomes = pool.run(fn, args, timeout + 60)
    bad = [f"rank {rank}: {kind}\n{value}" for rank, (kind, value) in enumerate(outcomes) if kind != "ok"]
    if bad:  # whatever the ranks are waiting for now, nobody uses them again
        pool.close()
        raise Failed("\n".join(bad))
    _pools[world] = pool
    return [value for _, value in outcomes]
