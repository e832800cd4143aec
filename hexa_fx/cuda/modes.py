"""How a thread's operators run on CUDA where the usual will not do: by torch's own operators, or waiting for their kernels.

Usually no call waits for a compiler: while a kernel is not built, another tile's kernel or torch's operators run
(`hexa_fx.cuda.kernel`). Autograd would run backward in threads of its own, which know of no mode, so in these contexts it runs
it in the same thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch

from hexa_fx.contexts import set_to

_torch_only: ContextVar[bool] = ContextVar("torch_only", default=False)
_awaited: ContextVar[bool] = ContextVar("awaited", default=False)

runs_torch_only = _torch_only.get
"""Whether this thread is in `torch_operators`."""
awaits_kernels = _awaited.get
"""Whether this thread is in `kernels_awaited`."""


@contextmanager
def _set(mode: ContextVar[bool]) -> Iterator[None]:
    with set_to(mode, True), torch.autograd.set_multithreading_enabled(False):
        yield


torch_operators = partial(_set, _torch_only)
"""A context in which the operators run torch's own on CUDA, and no kernel is built."""
kernels_awaited = partial(_set, _awaited)
"""A context in which a launch waits until its kernel is built, for measurements."""
