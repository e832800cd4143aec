"""States of torch: those that code may ask for, each by a function without arguments, and those that trial runs put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hexa_fx.contexts import set_to
from hexa_fx.isolation.module_tree import named_modules


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


def processes() -> int:
    """How many there are; 0 before they are told of each other."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 0


def gradients_state() -> tuple[bool, bool]:
    """Whether gradients are on, and whether they are of no use all the same."""
    on = torch.is_grad_enabled()
    return on, on and torch.is_inference_mode_enabled()


_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""What autocast has where nobody ever switched it on."""


def _kinds() -> tuple[str, ...]:
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


_AS_IT_SAYS = (
    "is_inference_mode_enabled get_default_dtype get_default_device are_deterministic_algorithms_enabled "
    "is_deterministic_algorithms_warn_only_enabled get_float32_matmul_precision get_num_threads initial_seed"
)
_OF_AUTOCAST = (
    "is_autocast_enabled is_autocast_cpu_enabled is_autocast_available get_autocast_dtype get_autocast_gpu_dtype "
    "get_autocast_cpu_dtype"
)
STATE: Mapping[str, Callable[[], Any]] = {
    "is_grad_enabled": gradients_state,
    **{name: getattr(torch, name) for name in _AS_IT_SAYS.split()},
    **dict.fromkeys(_OF_AUTOCAST.split(), autocast_state),
    **dict.fromkeys(("is_initialized", "get_world_size"), processes),
}
"""By the name that code calls."""

STANDS_FOR = dict.fromkeys(("tensor", "as_tensor", "scalar_tensor", "asarray"), "get_default_dtype")
"""Functions whose results depend on a state, by name: the state's."""


SEED = 7_309_611_482
"""Of trial runs: a number that no code seeds its random numbers with, so that a run that does so shows."""


_kept: ContextVar[bool] = ContextVar("hexa_fx_random_state_kept", default=False)


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """A context at whose end the default generators of torch are in the state that they were in, those of all GPUs included, and
    Python's and numpy's.

    Inside another one it only seeds them, if it is to: numpy takes as long for its state as a small block for a run.

    Args:
        seed: of these generators inside. `torch.manual_seed` would also decide what a process draws that first uses CUDA later.
    """
    numpy = sys.modules.get("numpy")
    if seed is not None and _kept.get():
        _seed_torch(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        yield
        return
    before, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else ()
    try:
        # numpy's state is no tuple where a user gave it another kind of generator, which takes no seed
        with torch.random.fork_rng(_devices()), set_to(_kept, isinstance(of_numpy, tuple)):
            if seed is not None:
                _seed_torch(seed)
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _seed_torch(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)


def random_states() -> list[torch.Tensor]:
    """The states of torch's default generators, which differ once random numbers are drawn."""
    return [generator.get_state() for generator in _generators()]


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators[device] for device in _devices())]


def _devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


@contextmanager
def training_mode(root: nn.Module, training: bool) -> Iterator[None]:
    """A context in which a module is in train or eval mode, at whose end every module is in its own again.

    What a module's own ``train`` does besides, such as merging adapters into weights, is taken back by another call of it.
    """
    before = [(module, module.training) for _, module in named_modules(root)]
    root.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            if module.training is not mode and has_own_train(module):
                module.train(mode)
        for module, mode in before:
            if module.training is not mode:
                module.training = mode


def has_own_train(module: nn.Module) -> bool:
    """Whether something else than torch's ``train`` sets the mode of a module."""
    return type(module).train is not nn.Module.train or "train" in vars(module)
