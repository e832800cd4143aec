"""A built kernel that can be launched, on any device of the process."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from struct import Struct, pack
from threading import Lock
from typing import Any

from hexa_fx.codegen.render import ENTRY, KernelSource, render
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.jit.background import builder
from hexa_fx.jit.build import build
from hexa_fx.jit.cache import BuiltKernel
from hexa_fx.jit.driver import NO_CONTEXT, Driver, driver
from hexa_fx.jit.env import JitSettings

log = logging.getLogger(__name__)


_ARRAYS = [ctypes.c_char_p * count for count in range(16)]
_CONFIG = Struct("7IPPI0P")
"""CUlaunchConfig: blocks x, y, z; threads x, y, z; bytes of dynamic shared memory; stream; attributes and their number."""
_DEPENDENT = ctypes.create_string_buffer(pack("I4xi60x", 6, 1))
"""A CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, on."""
_ATTRIBUTES = {False: (0, 0), True: (ctypes.addressof(_DEPENDENT), 1)}


class KernelHandle:
    """One kernel. Its only hot functions are `launch` and `queue`, which allocate nothing on the device.

    Args:
        source: what it was rendered from.
        entry: what it was built into.
        api: the driver.
    """

    def __init__(self, source: KernelSource, entry: BuiltKernel, api: Driver) -> None:
        self.source, self.entry, self.spec = source, entry, source.spec
        self.threads, self.shared_bytes = source.launch.threads, source.launch.shared_bytes
        self._attributes = _ATTRIBUTES[source.launch.dependent]
        self._api = api
        self._library = api.load(entry.cubin)
        self._kernel = api.kernel(self._library, ENTRY)
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()

    def launch(self, device: int, grid: tuple[int, int, int], args: tuple[bytes, ...], stream: int) -> None:
        """Queues the kernel.

        Args:
            device: CUDA device index, torch's current one.
            grid: blocks. A grid without blocks launches nothing.
            args: one `bytes` per kernel parameter, as the kernel's structs lie in memory.
            stream: the raw stream, ``torch._C._cuda_getCurrentRawStream(device)``.

        Raises:
            DriverError: the driver refused the launch.
        """
        if 0 not in grid:
            self.queue(device, self.config(grid, stream), _ARRAYS[len(args)](*args))

    def config(self, grid: tuple[int, int, int], stream: int) -> bytes:
        """Grid, threads, shared memory, stream and attributes as the driver takes them."""
        return _CONFIG.pack(*grid, self.threads, 1, 1, self.shared_bytes, stream, *self._attributes)

    def queue(self, device: int, config: bytes, parameters: ctypes.Array[Any]) -> None:
        """As `launch`, with everything packed already.

        Args:
            device: as in `launch`.
            config: that of a grid which is not empty.
            parameters: an address per kernel parameter; what lies there is copied before this returns.

        Raises:
            DriverError: the driver refused the launch.
        """
        function = self._functions.get(device) or self._prepare(device)
        result = self._api.launch_kernel(config, function, parameters, None)
        if result == NO_CONTEXT:
            self._api.bind(device)
            result = self._api.launch_kernel(config, function, parameters, None)
        if result:
            self._api.check(f"launch of {self.spec.op} with grid {_CONFIG.unpack(config)[:3]}", result)

    def blocks_per_sm(self, device: int) -> int:
        """How many blocks one multiprocessor of `device` holds at a time, for the size of a persistent grid."""
        function = self._functions.get(device) or self._prepare(device)
        return self._api.blocks_per_sm(function, self.threads, self.shared_bytes)

    def _prepare(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._functions:
                launch = self.source.launch
                self._functions[device] = self._api.prepare(self._kernel, device, self.shared_bytes, launch.overlaps)
            return self._functions[device]


@cache
def get_kernel(spec: KernelSpec) -> KernelHandle:
    """The kernel of `spec`, rendered, built (or read from the cache) and loaded once per process. Waits for the compiler.

    Args:
        spec: what to get.

    Raises:
        SpecError, ToolchainError, BuildError, DriverError.
    """
    source = render(spec)
    return KernelHandle(source, builder().ready(spec) or build(source), driver())


def loaded_kernel(spec: KernelSpec) -> KernelHandle | None:
    """As `get_kernel`, without waiting: None while the background has not built it, or was never asked to.

    Raises:
        SpecError, ToolchainError, BuildError: it was asked to and failed.
        DriverError: it does not load.
    """
    own = builder()
    own.check(spec)
    return get_kernel(spec) if own.ready(spec) else None


def device_arch(device: int) -> int:
    """Compute capability to build for on `device`: 90 for 9.0."""
    import torch  # here, so that processes that only build kernels start without it

    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def kernel_arch(device: int) -> int:
    """Compute capability to choose kernels for: HEXA_FX_CUDA_ARCH if set, else the device's."""
    return JitSettings.from_env().cuda_arch or device_arch(device)
