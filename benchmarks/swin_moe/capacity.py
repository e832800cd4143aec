"""Unequal devices, emulated on equal ones: a stream that may use some of a GPU's multiprocessors only (a green context).

Communication keeps its own streams and all multiprocessors. On a CPU nothing is emulated.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

_SM, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1
_RESOURCE_BYTES, _SM_COUNT_AT = 512, 96


def limited_stream(device: torch.device, multiprocessors: int) -> tuple[Any, int]:
    """A stream on at least ``multiprocessors`` multiprocessors of the device, and how many it got (all: the default stream)."""
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if multiprocessors >= total:
        return torch.cuda.current_stream(device), total
    torch.cuda.current_stream(device).synchronize()  # the primary context exists from here on
    driver, index = ctypes.CDLL("libcuda.so.1"), device.index or 0
    everything, some, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    groups, description, context, stream = ctypes.c_uint(1), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuDeviceGetDevResource(index, everything, _SM))
    _check(
        driver.cuDevSmResourceSplitByCount(
            some, ctypes.byref(groups), everything, rest, 0, ctypes.c_uint(multiprocessors)
        )
    )
    _check(driver.cuDevResourceGenerateDesc(ctypes.byref(description), some, 1))
    _check(driver.cuGreenCtxCreate(ctypes.byref(context), description, index, _DEFAULT_STREAM))
    _check(driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, _NON_BLOCKING, 0))
    got = int.from_bytes(some.raw[_SM_COUNT_AT : _SM_COUNT_AT + 4], "little")
    return torch.cuda.ExternalStream(stream.value or 0, device), got


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"green context: CUDA driver error {result}")


def matmul_seconds(device: torch.device) -> float:
    """The paper's proxy task (its Algorithm 5), synchronised: seconds of products of fresh random matrices."""
    size, times = (2048, 64) if device.type == "cuda" else (64, 4)

    def run(count: int) -> None:
        for _ in range(count):
            torch.matmul(torch.randn(size, size, device=device), torch.randn(size, size, device=device))

    run(2)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run(times)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / times
