"""Layers and token counts of bench_partition.py, and the options that its parts share."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hexa_fx.distributed.groups import make_groups
from hexa_fx.distributed.profile import gathered, synchronize
from hexa_fx.plan import ExpertShape

Record = dict[str, Any]

MIXTRAL = ExpertShape(8, 4096, 14336, 3, 2)
QWEN3 = ExpertShape(128, 2048, 768, 3, 8)
SWIN = ExpertShape(8, 512, 2048, 2, 2)
SHAPES = {
    "mixtral": (MIXTRAL, (8192, 32768, 131072)),
    "qwen3-30b": (QWEN3, (8192, 32768, 131072)),
    "swin-moe-b": (SWIN, (8192, 32768, 131072)),
}
TINY = {"tiny": (ExpertShape(4, 32, 128, 3, 2), (64, 256))}
MEMORY = ExpertShape(8, 2048, 4096, 3, 2)
UNEQUAL = {"mixtral": (65536, 1024), "swin-moe-b": (131072, 2048)}
"""Global tokens and sequence length of the runs on unequal devices."""


@dataclass(frozen=True)
class Options:
    """What every part of the benchmark needs to know.

    Args:
        length: tokens of a sequence.
        seconds: that a case on unequal devices is timed.
        end: of the clock `time.monotonic`, after which no case starts.
    """

    device: torch.device
    dtype: torch.dtype
    smoke: bool = False
    layers: int = 2
    repeats: int = 3
    length: int = 2048
    seconds: float = 0.6
    end: float = float("inf")

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def clean(o: Options) -> None:
    gc.collect()  # a model and its patched forward refer to each other
    if o.cuda:
        torch.cuda.empty_cache()


def milliseconds(run: Callable[[], None], o: Options, repeats: int) -> float:
    """Median of the slowest rank, after one warm-up."""
    samples = []
    for _ in range(repeats + 1):
        synchronize(o.device)
        dist.barrier()
        start = time.perf_counter()
        run()
        synchronize(o.device)
        samples.append(time.perf_counter() - start)
    return round(max(gathered(statistics.median(samples[1:]), make_groups())) * 1e3, 3)


def attempt(run: Callable[[], Record], o: Options) -> Record:
    """Errors that all ranks raise alike (out of memory, say) are records; others end the process, and partition_run.py goes on."""
    if max(gathered(float(time.monotonic() > o.end), make_groups())):
        return {"skipped": "out of time"}
    try:
        return run()
    except (RuntimeError, AssertionError) as error:
        text = f"{type(error).__name__}: {error}"
        if "CUDA error" in text or "NCCL" in text:  # the context is lost
            raise
        return {"error": text[:400]}
