"""The errors between CUDA text and a launched kernel."""

from __future__ import annotations

from hexa_fx.errors import KernelError


class ToolchainError(KernelError):
    """No compiler can be used. The message says what was tried, why each was refused, and what to do."""

    message = (
        "no CUDA compiler: {detail}. Install one with `pip install '.[cuda]'` or set HEXA_FX_NVCC, or install a kernel pack; "
        "until then other implementations are used"
    )


class BuildDisabledError(ToolchainError):
    """Building is disabled, and the cache does not have the kernel."""

    message = (
        "HEXA_FX_DISABLE_JIT is set and the cache has no kernel {detail}. Unset it once to build the kernel; "
        "until then other implementations are used"
    )


class BuildError(KernelError):
    """The compiler refused a source. Shows where the source is and the end of the log."""

    message = "kernel {key} did not compile ({compiler}).\nsource: {source}\ncommand: {command}\n{detail}"


class DriverError(KernelError):
    """The CUDA driver refused a call."""

    message = "{call} failed: {detail}"
