"""A kernel that was chosen, loaded as soon as it is built.

No launch waits for a compiler. A kernel that is not built is requested, and asking for it raises `NotBuilt`; then another
tile's kernel or torch's operators run. Nothing of that is remembered, so the next call after the build takes the kernel.
"""

from __future__ import annotations

import logging

import torch

from hexa_fx.codegen.family import get_family
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.choosing import cached_choice
from hexa_fx.cuda.modes import awaits_kernels
from hexa_fx.errors import KernelError
from hexa_fx.jit import background
from hexa_fx.jit.env import waits_for_kernels
from hexa_fx.jit.kernel import KernelHandle, get_kernel, loaded_kernel

log = logging.getLogger(__name__)


class NotBuilt(KernelError):
    """The kernel is being built; something else has to run meanwhile."""


class Kernel:
    """A kernel that was chosen; see `kernel_of`. It is loaded when it is first launched."""

    __slots__ = ("loaded", "spec")

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.loaded: KernelHandle | None = None

    @property
    def handle(self) -> KernelHandle:
        """The loaded kernel.

        Raises:
            NotBuilt: it is not there yet. Never while `waits_for_kernels` or in `kernels_awaited`.
            SpecError, ToolchainError, BuildError, DriverError: it cannot be had.
        """
        if self.loaded is None:
            self.loaded = _load(self.spec)
        return self.loaded


def _load(spec: KernelSpec) -> KernelHandle:
    if awaits_kernels() or waits_for_kernels():
        return get_kernel(spec)
    own = background.builder()
    try:
        own.request([spec], first=True)
        found = loaded_kernel(spec)
    except OSError as error:  # of the cache's folder
        raise KernelError(f"built kernels cannot be kept: {error}") from error
    if found is None:
        raise NotBuilt(f"its kernel ({spec.family}) is being built, {own.left()} are left")
    return found


@cached_choice
def kernel_of(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`.

    Raises:
        KernelError: it does not run on that compute capability.
    """
    if reason := get_family(spec.family).why_not_on(spec.arch):
        raise KernelError(reason)
    return Kernel(spec)


def is_built(spec: KernelSpec) -> bool:
    """Whether the kernel can be launched at once, if it was requested before."""
    return kernel_of(spec).loaded is not None or background.builder().ready(spec) is not None


_said: set[tuple[str, str]] = set()


def say_provisional(op: str, what: str, reason: NotBuilt) -> None:
    """Logs, once for each operator, what runs in place of a kernel that is being built."""
    if (op, what) in _said:
        return
    _said.add((op, what))
    kept = "; the CUDA graph that is captured now keeps it" if torch.cuda.is_current_stream_capturing() else ""
    said = str(reason)  # a record of the error itself would keep its callers and their tensors
    log.warning("hexa::%s runs %s for the moment: %s%s", op, what, said, kept)
