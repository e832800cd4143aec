"""Random numbers for trial runs, taken from nobody."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SEED = 7_309_611_482
"""Of trial runs: a number that no code seeds its random numbers with, so that a run that does so shows."""


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """A context at whose end the default generators of torch are in the state that they were in, those of all GPUs included, and
    Python's and numpy's.

    Args:
        seed: of these generators inside. `torch.manual_seed` would also decide what a process draws that first uses CUDA later.
    """
    numpy, before = sys.modules.get("numpy"), random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(_devices()):
            if seed is not None:
                for generator in _generators():
                    generator.manual_seed(seed)
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def random_states() -> list[torch.Tensor]:
    """The states of torch's default generators, which differ once random numbers are drawn."""
    return [generator.get_state() for generator in _generators()]


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators[device] for device in _devices())]


def _devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
