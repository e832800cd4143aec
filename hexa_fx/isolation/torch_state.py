"""States of torch that code may ask for, each by a function without arguments. A guard asks them again at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def autocast_state() -> tuple[Any, ...]:
    """Whether autocast is on, and to which dtype, for each kind of device."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds())


@contextmanager
def autocast_off() -> Iterator[bool]:
    """A context in which autocast is off for each kind of device. Yields whether it was on for one."""
    on = [kind for kind in _kinds() if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in on:
            stack.enter_context(torch.autocast(kind, _DTYPES[kind], enabled=False))
        yield bool(on)


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """A context in which autocast is as it was, and keeps no casts of weights: they may hold other numbers for a while."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes on one thread: on a busy CPU threads of small operations wait for each other for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gradients_state() -> tuple[bool, bool]:
    """Whether gradients are on, and whether they are of no use all the same."""
    on = torch.is_grad_enabled()
    return on, on and torch.is_inference_mode_enabled()


_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""What autocast has where nobody ever switched it on."""


def _kinds() -> tuple[str, ...]:
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


STATE: Mapping[str, Callable[[], Any]] = {
    "is_grad_enabled": gradients_state,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "get_default_dtype": torch.get_default_dtype,
    "get_default_device": torch.get_default_device,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_threads": torch.get_num_threads,
    "initial_seed": torch.initial_seed,
    "is_autocast_enabled": autocast_state,
    "is_autocast_cpu_enabled": autocast_state,
    "is_autocast_available": autocast_state,
    "get_autocast_dtype": autocast_state,
    "get_autocast_gpu_dtype": autocast_state,
    "get_autocast_cpu_dtype": autocast_state,
}
"""By the name that code calls."""

STANDS_FOR = dict.fromkeys(("tensor", "as_tensor", "scalar_tensor", "asarray"), "get_default_dtype")
"""Functions whose results depend on a state, by name: the state's."""
