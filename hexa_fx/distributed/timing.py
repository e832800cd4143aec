"""Times work on a device, says how much memory is free there, and exchanges such numbers between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hexa_fx.distributed.groups import Groups


def timed(run: Callable[[], object], device: torch.device, count: int) -> float:
    """Wall-clock seconds of ``count`` consecutive runs, including the device's work."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gathered(value: float, groups: Groups) -> tuple[float, ...]:
    """Every rank's value, exchanged over the host group."""
    out = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(groups.world)]
    dist.all_gather(out, torch.tensor([value], dtype=torch.float64, device="cpu"), group=groups.host)
    return tuple(float(t) for t in out)


def room(device: torch.device) -> float:
    """Bytes of memory that may be used on the device."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 4.0 * 2**30
