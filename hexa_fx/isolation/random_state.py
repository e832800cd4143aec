"""Random numbers for trial runs, taken from nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """A context at whose end the default generators of torch are in the state that they were in, those of all GPUs included.

    Args:
        seed: of these generators inside. `torch.manual_seed` would also decide what a process draws that first uses CUDA later.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        if seed is not None:
            for generator in (torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)):
                generator.manual_seed(seed)
        yield
